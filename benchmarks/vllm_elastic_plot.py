"""The plot of the ramp: how long requests waited for their first token, in every mode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from plots import plot

NAME = "vllm_elastic_ramp"
_LABELS = {
    "small": "small group",
    "large": "large group",
    "scaled": "scaled up in the middle",
    "restarted": "restarted with more ranks in the middle",
}


def draw_ramp(result: Mapping[str, Any]) -> list[str]:
    """Its name, if there is anything to draw."""
    ramps = list(_ramps(result))
    if not ramps:
        return []
    with plot(NAME, width=9.5) as axes:
        for label, step in ramps:
            ends_s, p95_s = zip(*step["p95_s"], strict=True)
            (line,) = axes.plot(ends_s, p95_s, label=label)
            if step["mode"] in ("scaled", "restarted"):
                until_s = step["change"]["until_s"]
                axes.axvline(until_s, color=line.get_color(), linestyle=":", linewidth=1)
        trace_s = ramps[0][1]["trace_s"]
        axes.axvline(trace_s / 2, color="#5f6b76", linestyle="--", linewidth=1)
        axes.set_yscale("log")
        axes.set_xlabel(
            "seconds of the trace, whose rate doubles; dashed: the change, dotted: done"
        )
        window_s = ramps[0][1]["window_s"]
        axes.set_ylabel(f"p95 of the first token, {window_s:g} s windows (s)")
        axes.legend(fontsize=8)
    return [NAME]


def _ramps(result: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The last ramp of each engine and mode that has a window."""
    for engine, steps in (result.get("detail") or {}).items():
        if not isinstance(steps, list):
            continue
        last = {step["mode"]: step for step in steps if step.get("step") == "ramp"}
        for mode, step in last.items():
            if step["p95_s"]:
                prefix = "upstream, " if engine == "upstream" else ""
                yield prefix + _LABELS[mode], step
