"""Writes docs/scaling.md and its plots from the results of control_plane and simulate."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plots import by_ranks, plot
from results import Result

PAGE = Path(__file__).parent.parent / "docs" / "scaling.md"
TEXT = Path(__file__).with_name("scaling_text.md")


def write_page(simulated: Mapping[str, Any], control_plane: Result) -> None:
    """Plots and page; what is measured and what is simulated is said at each."""
    _plot_phases(simulated)
    _plot_weights(simulated)
    _plot_etcd(simulated, control_plane)
    rungs, in_memory = control_plane["detail"]["rungs"], control_plane["detail"]["in_memory"]
    heads = [f"{r['ranks']:,}" for r in rungs]
    if in_memory is not None:
        rungs, heads = [*rungs, in_memory], [*heads, f"{in_memory['ranks']:,}, etcd in memory"]
    parts = {
        "RUNGS": _table(
            ("ranks", *heads),
            *((label, *(_number(r[key]) for r in rungs)) for label, key in _ROWS),
        ),
        "BREAKS": _breaks(control_plane),
        "CHECKS": _table(
            ("operation", "measured", "simulated", "off by", "where the parts come from"),
            *(
                (
                    c["name"],
                    f"{c['measured_s']:.3f} s",
                    f"{c['simulated_s']:.3f} s",
                    f"{100 * c['rel_err']:.0f} %",
                    c["how"],
                )
                for c in simulated["checks"]
            ),
        ),
        "OPERATIONS": _table(
            ("ranks", "images, today", "images, tree", "parked, today", "parked, tree"),
            *_operations(simulated),
        ),
        "WEIGHTS": _table(
            ("ranks", "dense, direct", "dense, tree", "experts, direct", "experts, tree"),
            *(
                (str(r["ranks"]), *(f"{r[way]:.2f} s" for way in _WAYS))
                for r in simulated["weights"]
            ),
        ),
    }
    text = TEXT.read_text()
    for name, part in parts.items():
        text = text.replace(f"{{{{{name}}}}}", part)
    PAGE.write_text(text)


_WAYS = ("dense_direct_s", "dense_tree_s", "experts_direct_s", "experts_tree_s")
_ROWS = (
    ("admission of all ranks, s", "admission_s"),
    ("commit transaction, p50, ms", "commit_p50_ms"),
    ("commit transaction, p99, ms", "commit_p99_ms"),
    ("fsync of etcd's log, p99 at most, ms", "etcd_fsync_p99_ms"),
    ("decision answered -> a rank has heard, p50, ms", "watch_p50_ms"),
    ("the same, p99, ms", "watch_p99_ms"),
    ("boot of all ranks at once, s", "boot_s"),
    ("scale by 8 ranks, p50, s", "operation_p50_s"),
    ("keys", "keys"),
    ("watches", "watchers"),
    ("events told in an operation", "events_per_operation"),
    ("bytes sent by etcd in an operation", "sent_bytes_per_operation"),
    ("etcd's CPU in an operation, s", "etcd_cpu_s_per_operation"),
    ("etcd's database, bytes", "db_bytes"),
    ("its growth by an operation, bytes", "db_bytes_per_operation"),
)


def _number(value: float) -> str:
    return f"{value:,}"


def _breaks(control_plane: Result) -> str:
    breaks = control_plane["detail"]["breaks"]
    if breaks is None:
        return f"Nothing broke up to {control_plane['detail']['rungs'][-1]['ranks']:,} ranks."
    return f"At {breaks['ranks']:,} ranks, on this machine: `{breaks['breaks'].split('; the')[0]}`."


def _table(head: tuple[str, ...], *rows: tuple[str, ...]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _rows(simulated: Mapping[str, Any], tier: str, *, tree: bool) -> list[dict[str, Any]]:
    return [r for r in simulated["operations"] if (r["tier"], r["tree"]) == (tier, tree)]


def _operations(simulated: Mapping[str, Any]) -> list[tuple[str, ...]]:
    columns = [
        _rows(simulated, tier, tree=tree) for tier in ("image", "parked") for tree in (False, True)
    ]
    return [
        (str(row[0]["ranks"]), *(f"{r['total_s']:.2f} s, {r['dominant']}" for r in row))
        for row in zip(*columns, strict=True)
    ]


def _plot_phases(simulated: Mapping[str, Any]) -> None:
    rows = _rows(simulated, "image", tree=True)
    ranks = [r["ranks"] for r in rows]
    with plot("scaling_operation") as axes:
        phases = list(rows[0]["phases_s"])
        axes.stackplot(ranks, [[r["phases_s"][p] for r in rows] for p in phases], labels=phases)
        today = [r["total_s"] for r in _rows(simulated, "image", tree=False)]
        axes.plot(ranks, today, color="black", linestyle="--", label="total, weights as today")
        by_ranks(axes, ranks, "seconds (simulated)")
        axes.set_ylim(0, 1.3 * max(r["total_s"] for r in rows))
        axes.set_title("One scale-up from 2 ranks, from images, weights in a tree, by phase")
        axes.legend(loc="upper left", ncols=2, fontsize=8)


def _plot_weights(simulated: Mapping[str, Any]) -> None:
    rows = simulated["weights"]
    ranks = [r["ranks"] for r in rows]
    with plot("scaling_weights") as axes:
        for way, style in zip(_WAYS, ("o-", "s-", "o--", "s--"), strict=True):
            label = way.removesuffix("_s").replace("_", ", ")
            axes.plot(ranks, [r[way] for r in rows], style, label=label)
        by_ranks(axes, ranks, "seconds (simulated)")
        axes.set_yscale("log")
        axes.set_title("Weights to every joiner: from the retained ranks, or in a tree")
        axes.legend()


def _plot_etcd(simulated: Mapping[str, Any], control_plane: Result) -> None:
    rows = _rows(simulated, "image", tree=False)
    ranks = [r["ranks"] for r in rows]
    with plot("scaling_etcd") as axes:
        axes.plot(ranks, [r["etcd_busy_s"] for r in rows], marker="o", label="simulated, 2 -> n")
        rungs = control_plane["detail"]["rungs"]
        axes.plot(
            [r["ranks"] for r in rungs],
            [r["etcd_cpu_s_per_operation"] for r in rungs],
            marker="x",
            linestyle="none",
            label="CPU of etcd alone, measured, n -> n + 8",
        )
        by_ranks(axes, ranks, "seconds")
        axes.set_yscale("log")
        axes.set_title("What one operation costs etcd and the coordinator")
        axes.legend()
