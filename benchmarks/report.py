"""Writes the comparison: docs/benchmarks.md, docs/comparison.html (one file) and their plots."""

from __future__ import annotations

import html
import json
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from catalog import BENCHMARKS
from plots import PLOTS, plot
from results import Result, gpus_of, newest_results

DOCS = Path(__file__).parent.parent / "docs"
REFERENCE_POINTS = Path(__file__).with_name("reference_points.json")
NOT_RUN = "not run"

Results = Mapping[str, Result]
Row = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ours:
    """One number of ours and where it is stored."""

    what: str
    benchmark: str
    metric: str
    unit: str = "s"

    def value(self, results: Results) -> float | None:
        """None if it has not been measured."""
        metrics = results.get(self.benchmark, {}).get("metrics", {})
        value = metrics.get(self.metric)
        return None if value is None else float(value)


@dataclass(frozen=True, slots=True)
class Question:
    """What is compared, with those of ours and those of others (ids of reference points)."""

    title: str
    ours: tuple[Ours, ...]
    before: tuple[str, ...] = ()
    published: tuple[str, ...] = ()


QUESTIONS = (
    Question(
        "How long does a scale-up take?",
        (
            Ours("vLLM, joiners from images", "vllm_elastic", "up_image_s"),
            Ours("vLLM, joiners from parked", "vllm_elastic", "up_parked_s"),
            Ours("vLLM, 1 -> 2, a joiner that was kept alive", "vllm_elastic", "up_kept_s"),
            Ours("upstream vLLM, in the same run", "vllm_elastic", "upstream_up_s"),
            Ours("reference engine, joiners from images", "gpu_scale", "up_image_s"),
            Ours("reference engine, joiners from parked", "gpu_scale", "up_parked_s"),
            Ours("reference engine on the CPU, 2 -> 4, from images", "cpu_scale", "up_s"),
        ),
        ("vllm031_up_first_s", "vllm031_up_s", "vllm033_up_s", "vllm033_restart_s"),
        ("vllm_v4_up_s", "vllm_v4_restart_s"),
    ),
    Question(
        "How long does a scale-down take?",
        (
            Ours("vLLM, 2 -> 1, the worst (gave up waiting)", "vllm_elastic", "down_s"),
            Ours("vLLM, 2 -> 1, the first", "vllm_elastic", "first_down_s"),
            Ours("upstream vLLM, in the same run", "vllm_elastic", "upstream_down_s"),
            Ours("reference engine", "gpu_scale", "down_s"),
        ),
        ("vllm031_down_s", "vllm033_down_s"),
        ("vllm_v4_down_s",),
    ),
    Question(
        "How long do users wait in between: the longest gap between two tokens of one stream?",
        (
            Ours("vLLM, up", "vllm_elastic", "gap_up_s"),
            Ours("vLLM, down, the worst", "vllm_elastic", "gap_down_s"),
            Ours("vLLM, down, the first", "vllm_elastic", "first_gap_down_s"),
            Ours("upstream vLLM, up, in the same run", "vllm_elastic", "upstream_gap_up_s"),
            Ours("reference engine, up", "gpu_scale", "token_gap_up_max_s"),
            Ours("reference engine, down", "gpu_scale", "token_gap_down_max_s"),
            Ours("reference engine, a stream that moves", "gpu_scale", "moved_gap_max_s"),
            Ours("on the CPU, up and down", "cpu_scale", "token_gap_max_ms", "ms"),
        ),
        ("vllm031_gap_up_s", "vllm031_gap_down_s", "vllm033_gap_up_s", "vllm033_gap_down_s"),
        ("vllm_v4_up_downtime_s", "vllm_v4_down_downtime_s"),
    ),
    Question(
        "How many requests fail?",
        (
            Ours("vLLM", "vllm_elastic", "requests_failed", "requests"),
            Ours("reference engine", "gpu_scale", "requests_failed", "requests"),
            Ours("on the CPU, 20 cycles", "cpu_scale", "requests_failed", "requests"),
            Ours("vLLM on the CPU, replicas", "vllm_cpu_replicas", "requests_failed", "requests"),
            Ours("planner-driven, with kills", "planner_cycle", "requests_failed", "requests"),
        ),
        ("vllm031_failed", "vllm033_failed"),
    ),
    Question(
        "How long until one engine is there?",
        (
            Ours("a GPU process with graphs, from its image", "snapshot_tiers", "image_restore_s"),
            Ours("the same, from parked", "snapshot_tiers", "parked_restore_s"),
            Ours("the same, cold", "snapshot_tiers", "cold_s"),
            Ours("vLLM on the CPU, from its image", "vllm_cpu_replicas", "ready_restored_s"),
            Ours("vLLM on the CPU, cold", "vllm_cpu_replicas", "ready_cold_s"),
            Ours("reference engine on the CPU, from its image", "cpu_scale", "ready_restored_s"),
            Ours("reference engine on the CPU, cold", "cpu_scale", "ready_cold_s"),
            Ours("size of a GPU process's image", "snapshot_tiers", "image_bytes", "bytes"),
        ),
        ("vllm031_restart_s", "vllm033_restart_s"),
        (
            "dynamo_snapshot_s",
            "dynamo_snapshot_cold_s",
            "dynamo_snapshot_outside_s",
            "dynamo_snapshot_image_gib",
            "modelexpress_ready_s",
            "modelexpress_cold_s",
            "foundry_s",
            "foundry_cold_s",
        ),
    ),
    Question(
        "How fast are weights, and graphs, in place?",
        (
            Ours("weights, GPU to GPU", "gpu_stream", "best_gbps", "GB/s"),
            Ours("of the copy rate of the same run", "gpu_stream", "best_of_copy", "x"),
            Ours("rebinding the graphs to a new group", "gpu_rebind", "rebind_s"),
            Ours("capturing them anew", "gpu_rebind", "recapture_s"),
        ),
        (),
        ("modelexpress_weights_s", "modelexpress_gpu_gbps"),
    ),
    Question(
        "What does the control plane bear?",
        (
            Ours("fake ranks", "control_plane", "ranks", "ranks"),
            Ours("admission of all of them", "control_plane", "admission_s"),
            Ours("transaction of the commit, p99", "control_plane", "commit_p99_ms", "ms"),
            Ours("until a rank has heard, p99", "control_plane", "watch_p99_ms", "ms"),
            Ours("simulation off by", "simulate", "sim_rel_err", "x"),
        ),
    ),
)


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
    return drawn


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
        parts.append(table(HEAD, list(rows_of(question, results, points))))
    parts += ["## What was run, and on what", table(INVENTORY_HEAD, list(inventory(results)))]
    return "\n\n".join(parts) + "\n"


def page(results: Results, points: Mapping[str, Any], drawn: Sequence[str]) -> str:
    """docs/comparison.html: one file, plots inside."""
    body = [f"<p>{html.escape(points['measured_before']['provenance'])} (a).</p>"]
    for number, question in enumerate(QUESTIONS):
        body.append(f"<h2>{html.escape(question.title)}</h2>")
        name = f"comparison_{number + 1}"
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
