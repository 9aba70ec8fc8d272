"""The report: one JSON, and a table of failpoints and faults that needs nothing but a browser."""

from __future__ import annotations

import html
import importlib.util
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dynamo_elastic.errors import ResourceMissing
from dynamo_elastic.failpoint_table import FAILPOINTS
from dynamo_elastic.testing.chaos.scenario import ANY_MOMENT, cells

NAME = "chaos"
BENCHMARKS = Path("benchmarks")
Verdicts = Sequence[Mapping[str, Any]]


def write_report(verdicts: Verdicts, *, benchmarks: Path = BENCHMARKS) -> tuple[Path, Path]:
    """The JSON and the HTML in `benchmarks/results`. Raises ResourceMissing outside a checkout."""
    simulation = _simulation(benchmarks / "results")
    metrics, detail = metrics_of(verdicts), detail_of(verdicts, simulation)
    path = _writer(benchmarks)(NAME, metrics, detail)
    page = path.with_suffix(".html")
    page.write_text(html_of(verdicts, metrics, detail))
    return path, page


def metrics_of(verdicts: Verdicts) -> dict[str, float]:
    """What the runs add up to."""
    fired = [v for v in verdicts if v["fired"]]
    at_failpoints = {v["place"] for v in fired} - {ANY_MOMENT}
    return {
        "runs": len(verdicts),
        "runs_with_fault": len(fired),
        "failpoints": len(at_failpoints),
        "faults": len({v["act"] for v in fired}),
        "violations": sum(len(v["violations"]) for v in verdicts),
        "hangs": sum(bool(v["hang"]) for v in verdicts),
        "requests_total": sum(v["requests"] for v in verdicts),
        "requests_retried": sum(v["retried"] for v in verdicts),
        "requests_lost": sum(v["lost"] for v in verdicts),
        "silence_max_s": max((v["silence_s"] for v in verdicts), default=0.0),
        "seconds": round(sum(v["seconds"] for v in verdicts), 1),
    }


def detail_of(verdicts: Verdicts, simulation: Mapping[str, Any]) -> dict[str, Any]:
    """How often each failpoint was hit, what was not reached, and every run that was bad."""
    hits = Counter(v["place"] for v in verdicts if v["fired"])
    reachable = sorted({c[1].place for d in (False, True) for c in cells(d)} - {ANY_MOMENT})
    return {
        "hits": {name: hits[name] for name in sorted(hits)},
        "hit_less_than_3_times": [name for name in reachable if hits[name] < 3],
        "not_passed_without_a_gpu_or_kubernetes_or_another_fault": sorted(
            {f.name for f in FAILPOINTS} - {*reachable, *hits}
        ),
        "faults": dict(Counter(v["act"] for v in verdicts if v["fired"])),
        "bad": [dict(v) for v in verdicts if v["violations"] or v["hang"]],
        "simulation": dict(simulation),
    }


def _simulation(results: Path) -> dict[str, Any]:
    """The newest numbers of protocol_sim: every failpoint x mishap x process, in virtual time."""
    found = sorted(results.glob("protocol_sim-*.json"))
    if not found:
        return {}
    read = json.loads(found[-1].read_text())
    return {"date": read["date"], "commit": read["commit"], **read["metrics"]}


def _writer(benchmarks: Path) -> Callable[[str, dict[str, float], Any], Path]:
    """benchmarks/provenance.py is no part of the package."""
    file = benchmarks / "provenance.py"
    spec = importlib.util.spec_from_file_location("provenance", file)
    if spec is None or spec.loader is None or not file.exists():
        raise ResourceMissing(f"there is no {file}", remedy="run this in a checkout")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    write: Callable[[str, dict[str, float], Any], Path] = module.write_result
    return write


def html_of(verdicts: Verdicts, metrics: Mapping[str, float], detail: Mapping[str, Any]) -> str:
    """One page: the sums, faults of the surroundings, and the table of failpoints x faults."""
    at_any_moment = [v for v in verdicts if v["place"] == ANY_MOMENT]
    at_failpoints = [v for v in verdicts if v["place"] != ANY_MOMENT]
    return _PAGE.format(
        sums=_rows([("what", "number"), *((k, f"{v:g}") for k, v in metrics.items())]),
        simulation=_rows([("what", "number"), *detail["simulation"].items()]),
        around=_matrix(at_any_moment, "act", "process"),
        failpoints=_matrix(at_failpoints, "place", "act"),
        missed=html.escape(", ".join(detail["hit_less_than_3_times"]) or "none"),
    )


def _matrix(verdicts: Verdicts, row: str, column: str) -> str:
    """Runs in which the fault happened, by two of their fields; bad ones are marked."""
    fired, bad = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for v in verdicts:
        cell = v[row], v[column]
        fired[cell] += bool(v["fired"])
        bad[cell] += bool(v["violations"] or v["hang"])
    columns = sorted({c for _, c in fired})
    head = "".join(f"<th>{html.escape(c or '-')}</th>" for c in columns)
    body = []
    for name in sorted({r for r, _ in fired}):
        cells = "".join(_cell(fired[name, c], bad[name, c]) for c in columns)
        body.append(f"<tr><th>{html.escape(name)}</th>{cells}</tr>")
    return f"<table><tr><th></th>{head}</tr>{''.join(body)}</table>"


def _cell(fired: int, bad: int) -> str:
    if bad:
        return f'<td class="bad">{fired} ({bad} bad)</td>'
    return f'<td class="good">{fired}</td>' if fired else "<td></td>"


def _rows(rows: Sequence[tuple[str, object]]) -> str:
    body = "".join(
        f"<tr><th>{html.escape(str(k))}</th><td>{html.escape(str(v))}</td></tr>" for k, v in rows
    )
    return f"<table>{body}</table>"


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Fault matrix</title>
<style>
body {{ font: 14px/1.4 sans-serif; margin: 2em; color: #222 }}
table {{ border-collapse: collapse; margin: 0 0 2em }}
th, td {{ border: 1px solid #ccc; padding: 2px 8px; text-align: right; font-weight: normal }}
th {{ text-align: left; background: #f6f6f6 }}
.good {{ background: #dff5df }} .bad {{ background: #f8c9c9 }}
</style>
<h1>Fault matrix on real processes</h1>
<p>A run is one resize under streaming load with one fault in it, and the recovery after it. A cell
says in how many runs the fault happened there; a bad run violated a rule of the history checker, or
did not come to rest in a minute.</p>
{sums}
<h2>Deterministic simulation</h2>{simulation}
<h2>Faults at a moment drawn by lot, by process</h2>{around}
<h2>Failpoints and faults</h2>
<p>Passed in a resize on this machine, but hit less than 3 times: {missed}.</p>
{failpoints}
</html>
"""
