"""Writes the comparison: docs/benchmarks.md, docs/comparison.html (one file) and their plots."""

from __future__ import annotations

import html
import json
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from catalog import BENCHMARKS
from plots import PLOTS, plot
from questions import QUESTIONS, Question, Results
from results import gpus_of, newest_results
from vllm_elastic_plot import draw_ramp

DOCS = Path(__file__).parent.parent / "docs"
REFERENCE_POINTS = Path(__file__).with_name("reference_points.json")
NOT_RUN = "not run"

Row = tuple[str, ...]


def told(value: Any, unit: str) -> str:
    """'2.97 s', '4.1 GB', '0.15-0.24 s'."""
    if isinstance(value, list):
        return f"{value[0]:g}-{value[1]:g} {unit}"
    if unit == "bytes":
        return f"{value / 1e9:.2f} GB"
    digits = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{digits} {unit}"


def rows_of(question: Question, results: Results, points: Mapping[str, Any]) -> Iterator[Row]:
    """What, number, hardware, source: ours first, then what was measured before, then published."""
    for ours in question.ours:
        value, result = ours.value(results), results.get(ours.benchmark)
        if value is None or result is None:
            yield f"**ours**: {ours.what}", NOT_RUN, "", f"`{ours.benchmark}`"
        else:
            source = f"`{ours.benchmark}` of {result['date']}, commit {result['commit'][:12]}"
            yield f"**ours**: {ours.what}", told(value, ours.unit), gpus_of(result), source
    before = {p["id"]: p for p in points["measured_before"]["points"]}
    for name in question.before:
        point = before[name]
        hardware = points["measured_before"]["hardware"]
        number = told(point["value"], point["unit"])
        yield f"{point['system']}: {point['what']}", number, hardware, "measured before (a)"
    published = {p["id"]: p for p in points["published"]}
    for name in question.published:
        point = published[name]
        number = f"{told(point['value'], point['unit'])} (published)"
        yield f"{point['system']}: {point['what']}", number, point["hardware"], point["source"]


def inventory(results: Results) -> Iterator[Row]:
    """Every benchmark: on what it ran, or that it did not."""
    for benchmark in BENCHMARKS:
        result = results.get(benchmark.name)
        if result is None:
            yield f"`{benchmark.name}`", NOT_RUN, str(benchmark.needs), benchmark.summary
        else:
            ran = f"{result['date']}, {gpus_of(result)}"
            yield f"`{benchmark.name}`", ran, str(benchmark.needs), benchmark.summary


def draw(results: Results, points: Mapping[str, Any]) -> list[str]:
    """A plot for each question in seconds that has a number of ours; their names."""
    drawn = []
    for number, question in enumerate(QUESTIONS):
        bars = list(_bars(question, results, points))
        if not any(kind == "ours" for _, _, kind in bars):
            continue
        name = f"comparison_{number + 1}"
        with plot(name, width=9.5, height=0.8 + 0.36 * len(bars)) as axes:
            colours = {"ours": "#2a6fb0", "before": "#c0561f", "published": "#9aa4ad"}
            labels, values, kinds = zip(*reversed(bars), strict=True)
            wrapped = [textwrap.fill(label, 52) for label in labels]
            axes.barh(wrapped, values, color=[colours[k] for k in kinds])
            axes.tick_params("y", labelsize=8, length=0)
            axes.grid(axis="y", visible=False)
            axes.bar_label(axes.containers[0], fmt="%.3g s", padding=3, fontsize=8)
            axes.set_xscale("log")
            axes.margins(x=0.15)
            axes.set_xlabel("seconds: ours blue, measured before orange, published grey")
        drawn.append(name)
    return [*drawn, *draw_ramp(results.get("vllm_elastic", {}))]


def _bars(
    question: Question, results: Results, points: Mapping[str, Any]
) -> Iterator[tuple[str, float, str]]:
    for ours in question.ours:
        value, result = ours.value(results), results.get(ours.benchmark)
        if value and result is not None and ours.unit in ("s", "ms"):
            seconds = value / 1e3 if ours.unit == "ms" else value
            yield f"ours, {ours.what} ({gpus_of(result)})", seconds, "ours"
    before = {p["id"]: p for p in points["measured_before"]["points"]}
    published = {p["id"]: p for p in points["published"]}
    for ids, known, kind in (
        (question.before, before, "before"),
        (question.published, published, "published"),
    ):
        for point in (known[i] for i in ids):
            if point["unit"] == "s" and point["value"]:
                value = point["value"]
                worst = max(value) if isinstance(value, list) else value
                yield f"{point['system']}, {point['what']}", float(worst), kind


HEAD = ("what", "number", "hardware", "source")
INVENTORY_HEAD = ("benchmark", "ran", "needs", "what")


def table(head: Row, rows: Sequence[Row]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows))


def markdown(results: Results, points: Mapping[str, Any], drawn: Sequence[str]) -> str:
    """docs/benchmarks.md."""
    parts = [
        "# Benchmarks",
        "Made by `python benchmarks report` out of `benchmarks/results` and "
        "`benchmarks/reference_points.json`; `python benchmarks list` names what there is, "
        "`python benchmarks run NAME` runs one, `python benchmarks validate` checks every result "
        "against `benchmarks/result.schema.json`. The same as one file: "
        "[comparison.html](comparison.html).",
        "Numbers of different hardware, or of different models, are beside each other, not "
        f"against each other. *{NOT_RUN}* is what nobody has measured yet: nothing is filled in.",
        f"(a) {points['measured_before']['provenance']}.",
    ]
    for number, question in enumerate(QUESTIONS):
        parts.append(f"## {question.title}")
        if f"comparison_{number + 1}" in drawn:
            parts.append(f"![{question.title}](plots/comparison_{number + 1}.svg)")
        if question.figure in drawn:
            parts.append(f"![{question.title}](plots/{question.figure}.svg)")
        parts.append(table(HEAD, list(rows_of(question, results, points))))
    parts += ["## What was run, and on what", table(INVENTORY_HEAD, list(inventory(results)))]
    return "\n\n".join(parts) + "\n"


def page(results: Results, points: Mapping[str, Any], drawn: Sequence[str]) -> str:
    """docs/comparison.html: one file, plots inside."""
    body = [f"<p>{html.escape(points['measured_before']['provenance'])} (a).</p>"]
    for number, question in enumerate(QUESTIONS):
        body.append(f"<h2>{html.escape(question.title)}</h2>")
        for name in (f"comparison_{number + 1}", question.figure):
            if name in drawn:
                svg = (PLOTS / f"{name}.svg").read_text()
                body.append(svg[svg.index("<svg") :])
        body.append(_html_table(HEAD, list(rows_of(question, results, points))))
    body += ["<h2>What was run, and on what</h2>"]
    body.append(_html_table(INVENTORY_HEAD, list(inventory(results))))
    return _PAGE.replace("BODY", "\n".join(body))


def _html_table(head: Row, rows: Sequence[Row]) -> str:
    def line(cells: Row, tag: str) -> str:
        plain = (c.replace("**", "").replace("`", "") for c in cells)
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in plain) + "</tr>"

    return "\n".join(["<table>", line(head, "th"), *(line(r, "td") for r in rows), "</table>"])


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Benchmarks of dynamo_elastic</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; width: 100% } td, th { border-bottom: 1px solid #ddd;
padding: .3em .6em; text-align: left; vertical-align: top } svg { max-width: 100%; height: auto }
</style></head><body>
<h1>Ours, upstream, and what others have published</h1>
<p>Numbers of different hardware, or of different models, are beside each other, not against each
other. <em>not run</em>: nobody has measured it yet.</p>
BODY
</body></html>
"""


def main() -> int:
    results, points = newest_results(), json.loads(REFERENCE_POINTS.read_text())
    drawn = draw(results, points)
    (DOCS / "benchmarks.md").write_text(markdown(results, points, drawn))
    (DOCS / "comparison.html").write_text(page(results, points, drawn))
    print("docs/benchmarks.md, docs/comparison.html, docs/plots")
    return 0


if __name__ == "__main__":
    sys.exit(main())
