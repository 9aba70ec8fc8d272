"""1 -> 4 -> 2 -> 3 -> 1 ranks, hundreds of times, under streaming load, on one machine.

Everything that lives through all cycles must hold what it held after the first ones: each is
measured after every cycle, and the least-squares line from cycle 10 on is its growth.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot
from provenance import write_result
from rich.console import Console
from rich.progress import Progress

from dynamo_elastic.agent.base import Tier
from dynamo_elastic.demo.run import demo_prompts
from dynamo_elastic.testing.cycles import Footprint, is_ours, lasting, slope
from dynamo_elastic.testing.soak import Cycle, SoakResult, soak, soak_config

CLIENTS = 6
SETTLE_S = 0.5
SAY_EVERY = 10
WARM_CYCLES = 10
"""Growth is measured after so many: caches and pools are filled by then."""

Measure = Callable[[Footprint], int]
MEASURES: dict[str, Measure] = {
    "rss_bytes": lambda f: f.rss_bytes,
    "fds": lambda f: f.fds,
    "threads": lambda f: f.threads,
}


def run(cycles: int, work_dir: Path, console: Console) -> SoakResult:
    with Progress(console=console) as progress:
        task = progress.add_task("cycles", total=cycles)

        def show(result: SoakResult) -> None:
            progress.advance(task)
            if len(result.cycles) % SAY_EVERY == 0:
                console.print(so_far(result), soft_wrap=True)

        return asyncio.run(
            soak(
                soak_config(work_dir, "soak"),
                demo_prompts(),
                clients=CLIENTS,
                cycles=cycles,
                settle_s=SETTLE_S,
                say=console.print,
                progress=show,
            )
        )


def so_far(result: SoakResult) -> str:
    tally, last = result.tally, result.cycles[-1]
    held = [f for p, f in last.footprints.items() if is_ours(p)]
    return (
        f"cycle {len(result.cycles)}: {last.elapsed_s:.1f} s, {tally.requests} requests, "
        f"{tally.failed} failed, {tally.unequal} unequal, {tally.moved} moved, "
        f"{sum(f.rss_bytes for f in held) / 1e6:.1f} MB, {sum(f.fds for f in held)} descriptors, "
        f"{sum(f.threads for f in held)} threads, {last.etcd_keys} keys"
    )


def series(cycles: Sequence[Cycle], processes: Sequence[str], measure: Measure) -> list[int]:
    """The sum over `processes` at the end of each cycle."""
    return [sum(measure(c.footprints[p]) for p in processes) for c in cycles]


def growth(values: Sequence[float]) -> dict[str, float]:
    """How `values`, one a cycle, grow per 100 cycles: in their unit, and in percent."""
    grown = slope(values)
    return {"slope": round(grown, 3), "percent": round(100 * grown / statistics.mean(values), 3)}


def growths(cycles: Sequence[Cycle]) -> dict[str, dict[str, dict[str, float]]]:
    """Of each process that lives through all `cycles`, and of ours together."""
    processes = lasting([c.footprints for c in cycles])
    groups = {p: [p] for p in processes} | {"ours": [p for p in processes if is_ours(p)]}
    return {
        name: {m: growth(series(cycles, group, of)) for m, of in MEASURES.items()}
        for name, group in groups.items()
    }


def metrics_of(result: SoakResult, warm: Sequence[Cycle]) -> dict[str, float]:
    tiers = {t for c in result.cycles for t in c.tiers}
    if tiers != {Tier.IMAGE}:
        raise SystemExit(f"not every joiner came from an image: {sorted(tiers)}")
    tally, ours = result.tally, growths(warm)["ours"]
    keys = growth([c.etcd_keys for c in warm])
    return {
        "cycles": len(result.cycles),
        "cycle_s": round(statistics.median(c.elapsed_s for c in result.cycles), 3),
        "requests_total": tally.requests,
        "requests_failed": tally.failed,
        "requests_moved": tally.moved,
        "tokens_equal": int(tally.unequal == 0 and tally.requests > tally.failed),
        "token_gap_max_ms": round(1e3 * tally.gap_max_s, 1),
        "moved_gap_max_ms": round(1e3 * tally.moved_gap_max_s, 1),
        "rss_slope_bytes": ours["rss_bytes"]["slope"],
        "rss_slope_percent": ours["rss_bytes"]["percent"],
        "fd_slope": ours["fds"]["slope"],
        "fd_slope_percent": ours["fds"]["percent"],
        "thread_slope": ours["threads"]["slope"],
        "thread_slope_percent": ours["threads"]["percent"],
        "etcd_keys_slope": keys["slope"],
    }


def detail_of(result: SoakResult, warm: Sequence[Cycle]) -> dict[str, Any]:
    cycles = result.cycles
    processes = lasting([c.footprints for c in cycles])
    return {
        "errors": sorted(result.tally.errors),
        "requests_drained": sum(c.drained for c in cycles),
        "growth_per_100_cycles": growths(warm),
        "cycle_s": [round(c.elapsed_s, 3) for c in cycles],
        "etcd_keys": [c.etcd_keys for c in cycles],
        "series": {
            p: {m: series(cycles, [p], of) for m, of in MEASURES.items()} for p in processes
        },
    }


def plot(result: SoakResult, path: Path) -> None:
    """Resident memory and descriptors of each process of ours, over the cycles."""
    mpl.use("Agg")
    processes = [p for p in lasting([c.footprints for c in result.cycles]) if is_ours(p)]
    figure, (memory, descriptors) = pyplot.subplots(2, 1, sharex=True, figsize=(7, 6))
    for process in processes:
        name = process.partition(":")[0]
        sizes = series(result.cycles, [process], MEASURES["rss_bytes"])
        memory.plot([s / 1e6 for s in sizes], label=name)
        descriptors.plot(series(result.cycles, [process], MEASURES["fds"]), label=name)
    memory.set_ylabel("resident memory (MB)")
    descriptors.set_ylabel("open descriptors")
    descriptors.set_xlabel("cycle 1 -> 4 -> 2 -> 3 -> 1")
    for axes in (memory, descriptors):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    memory.legend(ncols=4, fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--work-dir", type=Path, default=Path(".demo/soak"))
    arguments = parser.parse_args()
    console = Console(highlight=False)
    result = run(arguments.cycles, arguments.work_dir.resolve(), console)
    warm = result.cycles[WARM_CYCLES:] or result.cycles
    metrics = metrics_of(result, warm)
    path = write_result("protocol_soak", metrics, detail_of(result, warm))
    plot(result, path.with_suffix(".png"))
    for name, value in metrics.items():
        console.print(f"{name:24} {value}")
    console.print(f"written to {path}")


if __name__ == "__main__":
    main()
