"""The report: one JSON, and a table of failpoints and faults that needs nothing but a browser."""

from __future__ import annotations

import html
import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from dynamo_elastic.errors import ResourceMissing
from dynamo_elastic.testing.chaos.elsewhere import ELSEWHERE
from dynamo_elastic.testing.chaos.matrix import places_reached
from dynamo_elastic.testing.chaos.tally import (
    ENOUGH,
    Cells,
    Tally,
    Verdicts,
    tally,
    tally_of_result,
)

NAME = "chaos"
BENCHMARKS = Path("benchmarks")
PROVENANCE = "provenance.json"
"""Beside verdicts that come from another machine: what it was, and which tree it ran."""


def write_report(
    verdicts: Verdicts,
    *,
    onto: Path | None = None,
    provenance: Mapping[str, Any] | None = None,
    benchmarks: Path = BENCHMARKS,
) -> tuple[Path, Path]:
    """The JSON and the HTML in `benchmarks/results`, of `verdicts` and those of the result `onto`.
    `provenance`: where and when `verdicts` were made, if not here and now. Raises ResourceMissing
    outside a checkout."""
    results = _provenance_module(benchmarks)
    earlier = json.loads(onto.read_text()) if onto is not None else None
    sum_ = tally(verdicts)
    made = {**(provenance or results.provenance()), "runs": len(verdicts)}
    parts = [made]
    if earlier is not None:
        sum_ = tally_of_result(earlier) + sum_
        parts = [*earlier["detail"]["parts"], made]
    detail = detail_of(sum_, parts, _simulation(benchmarks / "results"))
    path: Path = results.write_result(NAME, sum_.metrics(), detail)
    page = path.with_suffix(".html")
    page.write_text(html_of(sum_, detail))
    return path, page


def detail_of(
    sum_: Tally, parts: Sequence[Mapping[str, Any]], simulation: Mapping[str, Any]
) -> dict[str, Any]:
    """What each part was made by; how often each failpoint was hit; what was not, and where it
    is."""
    hits = sum_.hits
    reached = sorted(places_reached())
    return {
        "parts": [dict(part) for part in parts],
        **sum_.detail(),
        "hit_less_than_3_times": [n for n in reached if hits.get(n, 0) < ENOUGH],
        "hit_elsewhere": dict(sorted(ELSEWHERE.items())),
        "simulation": dict(simulation),
    }


def _simulation(results: Path) -> dict[str, Any]:
    """The newest numbers of protocol_sim: every failpoint x mishap x process, in virtual time."""
    found = sorted(results.glob("protocol_sim-*.json"))
    if not found:
        return {}
    read = json.loads(found[-1].read_text())
    return {"date": read["date"], "commit": read["commit"], **read["metrics"]}


def _provenance_module(benchmarks: Path) -> ModuleType:
    """benchmarks/provenance.py is no part of the package."""
    file = benchmarks / "provenance.py"
    spec = importlib.util.spec_from_file_location("provenance", file)
    if spec is None or spec.loader is None or not file.exists():
        raise ResourceMissing(f"there is no {file}", remedy="run this in a checkout")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def html_of(sum_: Tally, detail: Mapping[str, Any]) -> str:
    """One page: the sums, faults of the surroundings, and the table of failpoints x faults."""
    metrics = [(name, f"{value:g}") for name, value in sum_.metrics().items()]
    return _PAGE.format(
        sums=_rows([("what", "number"), *metrics]),
        parts=_rows([("from", "runs"), *((_of_part(p), p["runs"]) for p in detail["parts"])]),
        simulation=_rows([("what", "number"), *detail["simulation"].items()]),
        around=_matrix(sum_.around, sum_.bad_around),
        failpoints=_matrix(sum_.failpoints, sum_.bad_failpoints),
        missed=html.escape(", ".join(detail["hit_less_than_3_times"]) or "none"),
        elsewhere=_rows([("failpoint", "test"), *detail["hit_elsewhere"].items()]),
    )


def _of_part(part: Mapping[str, Any]) -> str:
    hardware = part["hardware"]
    on = ", ".join(hardware.get("gpus", ())) or f"{hardware['cores']} CPU cores"
    note = f" ({part['note']})" if "note" in part else ""
    return f"{part['date']}, commit {part['commit']}, {on}{note}"


def _matrix(happened: Cells, bad: Cells) -> str:
    """Runs in which the fault happened; bad ones are marked."""
    rows = sorted({*happened, *bad})
    columns = sorted({c for of_row in (*happened.values(), *bad.values()) for c in of_row})
    head = "".join(f"<th>{html.escape(c or '-')}</th>" for c in columns)
    body = []
    for name in rows:
        runs, bad_runs = happened.get(name, {}), bad.get(name, {})
        line = "".join(_cell(runs.get(c, 0), bad_runs.get(c, 0)) for c in columns)
        body.append(f"<tr><th>{html.escape(name)}</th>{line}</tr>")
    return f"<table><tr><th></th>{head}</tr>{''.join(body)}</table>"


def _cell(happened: int, bad: int) -> str:
    if bad:
        return f'<td class="bad">{happened} ({bad} bad)</td>'
    return f'<td class="good">{happened}</td>' if happened else "<td></td>"


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
<p>A run is one resize under streaming load with one fault in it, and the recovery after it; or work
on an image beside a deployment that serves; or, on a GPU, a rank that joins another one, or an
agent that parks and restores. A cell says in how many runs the fault happened there; a bad run
violated a rule, or did not come to rest in time.</p>
{sums}
<h2>Parts of it</h2>{parts}
<h2>Deterministic simulation</h2>{simulation}
<h2>Faults at a moment drawn by lot, by process</h2>{around}
<h2>Failpoints and faults</h2>
<p>Hit less than 3 times: {missed}.</p>
{failpoints}
<h2>Failpoints of tests alone</h2>{elsewhere}
</html>
"""
