"""Plots as SVG, the same bytes for the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from cycler import cycler
from matplotlib import pyplot

PLOTS = Path(__file__).parent.parent / "docs" / "plots"
COLOURS = (
    *("#2a6fb0", "#c0561f", "#4a8f3c", "#8a5aa8", "#b0912a"),
    *("#5f6b76", "#b04a6a", "#3a9a9a", "#d0a0a0"),
)

mpl.use("Agg")
mpl.rcParams.update(
    {
        "svg.hashsalt": "dynamo-elastic",
        "svg.fonttype": "none",
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.3,
        "axes.prop_cycle": cycler(color=COLOURS),
    }
)


@contextmanager
def plot(name: str, *, width: float = 7.2, height: float = 4.0) -> Iterator[Any]:
    """Axes whose figure is written to docs/plots/`name`.svg."""
    figure, axes = pyplot.subplots(figsize=(width, height), layout="constrained")
    try:
        yield axes
        PLOTS.mkdir(exist_ok=True)
        path = PLOTS / f"{name}.svg"
        figure.savefig(path, format="svg", metadata={"Date": None})
        lines = path.read_text().splitlines()
        path.write_text("\n".join(line.rstrip() for line in lines) + "\n")
    finally:
        pyplot.close(figure)


def by_ranks(axes: Any, ranks: list[int], what: str) -> None:
    """Ranks along the bottom, doubling."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [str(n) for n in ranks])
    axes.minorticks_off()
    axes.set_xlabel("ranks after the operation (from 2)")
    axes.set_ylabel(what)
