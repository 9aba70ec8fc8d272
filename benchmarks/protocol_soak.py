"""A walk at random among the legal widths, under streaming load, with every component ended and
started anew on the way: what is violated, and what grows.

A run takes --minutes, or ends after --resizes. `--add` adds it to the result of the same day, so
that a long soak can be had in slices; `--take` adds the slices of results of other machines.
Growth is per 100 resizes: the least-squares line over what a process held at each rest, summed over
the processes. A process is warm WARM_RESIZES after it was first seen; what it holds before is drawn
and does not count, so some slices need few restarts (--restart-every), that lives are long.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot
from provenance import RESULTS, write_result
from rich.console import Console

from dynamo_elastic.demo.load import Prompt
from dynamo_elastic.testing.cycles import is_ours
from dynamo_elastic.testing.soak import REST_EVERY, RESTART_EVERY, SoakResult, soak, soak_config

CLIENTS = 2
PROMPTS = [
    Prompt("river stone light", 7, 12),
    Prompt("amber cloud", 8, 24),
    Prompt("silver morning", 9, 48),
]
SAY_EVERY = 20
WARM_RESIZES = 100
"""A process has filled its caches and pools by then: the plot shows it."""
LEAST_RESTS = 10
"""Of one process while it was warm, for a line through what it held."""
MEASURES = ("rss_bytes", "fds", "threads")

Slice = Mapping[str, Any]
"""One run, as it is stored."""
Life = list[tuple[int, float]]
"""Of one process: resizes since it was first seen, and what it held then."""


def run(arguments: argparse.Namespace, console: Console) -> Slice:
    """Walk, and say from time to time how it goes."""
    began_s = time.monotonic()
    until_s = began_s + 60 * arguments.minutes

    def lasts(result: SoakResult) -> bool:
        if result.resizes and result.resizes % SAY_EVERY == 0:
            console.print(so_far(result, time.monotonic() - began_s), soft_wrap=True)
        most: int = arguments.resizes
        return time.monotonic() < until_s and result.resizes < most

    result = asyncio.run(
        soak(
            soak_config(arguments.work_dir.resolve(), "soak"),
            PROMPTS,
            seed=arguments.seed,
            clients=CLIENTS,
            lasts=lasts,
            say=console.print,
            restart_every=arguments.restart_every,
        )
    )
    return stored(result, arguments.restart_every, time.monotonic() - began_s)


def so_far(result: SoakResult, elapsed_s: float) -> str:
    tally = result.tally
    return (
        f"{elapsed_s:.0f} s: {result.resizes} resizes, {result.retried} asked for again, "
        f"{sum(result.restarts.values())} restarts, {len(result.violations)} violations, "
        f"{tally.requests} requests, {tally.failed} failed, {tally.unequal} unequal"
    )


def stored(result: SoakResult, restart_every: int, elapsed_s: float) -> Slice:
    tally = result.tally
    return {
        "seed": result.seed,
        "restart_every": restart_every,
        "elapsed_s": round(elapsed_s, 1),
        "resizes": result.resizes,
        "retried": result.retried,
        "restarts": dict(result.restarts),
        "violations": list(result.violations),
        "requests_total": tally.requests,
        "requests_failed": tally.failed,
        "requests_unequal": tally.unequal,
        "requests_moved": tally.moved,
        "errors": sorted(tally.errors),
        "resize_s": [round(s, 3) for s in result.resize_s],
        "rests": [
            {
                "resizes": rest.resizes,
                "etcd_keys": rest.etcd_keys,
                "processes": {name: asdict(f) for name, f in rest.footprints.items()},
            }
            for rest in result.rests
        ],
    }


def lives(slices: Sequence[Slice], measure: str) -> dict[str, list[Life]]:
    """Process name -> for each life of it, what it held at each rest. A life begins when its pid is
    first seen, under whichever name."""
    found: dict[str, list[Life]] = {}
    for part in slices:
        born: dict[str, int] = {}
        points: dict[str, Life] = {}
        for rest in part["rests"]:
            for process, held in rest["processes"].items():
                age = rest["resizes"] - born.setdefault(process.partition(":")[2], rest["resizes"])
                points.setdefault(process, []).append((age, held[measure]))
        for process, life in points.items():
            if is_ours(process):
                found.setdefault(process.partition(":")[0], []).append(life)
    return found


def warm(found: Sequence[Life]) -> list[Life]:
    """Of each life the warm part, if that is long enough to tell."""
    parts = [[point for point in life if point[0] >= WARM_RESIZES] for life in found]
    return [part for part in parts if len(part) >= LEAST_RESTS]


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Growth per 100 resizes: that of the least-squares line."""
    x, y = zip(*points, strict=True)
    return 100 * statistics.linear_regression(x, y).slope if len(set(x)) > 1 else 0.0


def growth(slices: Sequence[Slice], measure: str) -> dict[str, float]:
    """Of each process: the mean over its lives, weighted with how long they were warm."""
    found = {}
    for name, of in sorted(lives(slices, measure).items()):
        parts = warm(of)
        if parts:
            weight = sum(len(points) for points in parts)
            found[name] = sum(slope(points) * len(points) for points in parts) / weight
    return found


def levels(slices: Sequence[Slice], measure: str) -> dict[str, float]:
    """Of each process that lived for long enough to tell: what it held when it was warm."""
    found = {name: warm(of) for name, of in lives(slices, measure).items()}
    return {
        name: statistics.mean(held for points in parts for _, held in points)
        for name, parts in found.items()
        if parts
    }


def keys_slope(slices: Sequence[Slice]) -> float:
    lines = [[(r["resizes"], r["etcd_keys"]) for r in part["rests"]] for part in slices]
    lines = [points for points in lines if len(points) > 1]
    weight = sum(len(points) for points in lines)
    return sum(slope(points) * len(points) for points in lines) / weight if weight else 0.0


def metrics_of(slices: Sequence[Slice]) -> dict[str, float]:
    def total(name: str) -> int:
        return sum(part[name] for part in slices)

    durations = [s for part in slices for s in part["resize_s"]]
    return {
        "resizes": total("resizes"),
        "slices": len(slices),
        "violations": sum(len(part["violations"]) for part in slices),
        "restarts": sum(sum(part["restarts"].values()) for part in slices),
        "resize_s": round(statistics.median(durations), 3),
        "requests_total": total("requests_total"),
        "requests_failed": total("requests_failed"),
        "requests_unequal": total("requests_unequal"),
        "requests_moved": total("requests_moved"),
        "etcd_keys_slope": round(keys_slope(slices), 3),
        **growth_of(slices),
    }


def growth_of(slices: Sequence[Slice]) -> dict[str, float]:
    """Of all processes together; {} if none of them lived for long enough to tell. `rss_growth` is
    the share of the level; below 1 % is flat."""
    names = {"rss_slope_bytes": "rss_bytes", "fd_slope": "fds", "threads_slope": "threads"}
    found = {name: sum(growth(slices, measure).values()) for name, measure in names.items()}
    level = sum(levels(slices, "rss_bytes").values())
    if not level:
        return {}
    found |= {"rss_level_bytes": level, "rss_growth": found["rss_slope_bytes"] / level}
    return {name: round(value, 5) for name, value in found.items()}


def detail_of(slices: Sequence[Slice]) -> dict[str, Any]:
    return {
        "growth_per_100_resizes": {m: growth(slices, m) for m in MEASURES},
        "slices": list(slices),
    }


def plot(slices: Sequence[Slice], path: Path) -> None:
    """Resident memory and descriptors of each process, life by life, over the resizes."""
    mpl.use("Agg")
    figure, (memory, descriptors) = pyplot.subplots(2, 1, sharex=True, figsize=(7, 6))
    for axes, measure, scale in ((memory, "rss_bytes", 1e6), (descriptors, "fds", 1)):
        for number, (name, of) in enumerate(sorted(lives(slices, measure).items())):
            for life in of:
                label = name if life is of[0] else None
                x, y = zip(*life, strict=True)
                axes.plot(x, [v / scale for v in y], label=label, color=f"C{number}", linewidth=0.8)
        axes.axvline(WARM_RESIZES, color="grey", linestyle=":")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    memory.set_ylabel("resident memory (MB)")
    descriptors.set_ylabel("open descriptors")
    descriptors.set_xlabel(
        f"resizes since the process was first seen (a point every {REST_EVERY}, warm from the line)"
    )
    if memory.lines:
        memory.legend(ncols=4, fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def earlier_slices() -> list[Slice]:
    """Those of the newest result."""
    paths = sorted(RESULTS.glob("protocol_soak-*.json"))
    detail = json.loads(paths[-1].read_text())["detail"] if paths else {}
    return list(detail.get("slices", ()))


def slices_of(path: Path) -> list[Slice]:
    """Those of a result that another machine wrote, each with what that machine was."""
    result = json.loads(path.read_text())
    return [{**part, "hardware": result["hardware"]} for part in result["detail"]["slices"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--resizes", type=int, default=1_000_000)
    parser.add_argument("--restart-every", type=int, default=RESTART_EVERY, help="resizes")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 31))
    parser.add_argument("--add", action="store_true", help="to the newest result")
    parser.add_argument("--take", type=Path, nargs="+", help="results; nothing is run then")
    parser.add_argument("--work-dir", type=Path, default=Path(".demo/soak"))
    arguments = parser.parse_args()
    console = Console(highlight=False)
    if arguments.take:
        new = [part for path in arguments.take for part in slices_of(path)]
    else:
        console.print(f"seed {arguments.seed}")
        new = [run(arguments, console)]
    slices = [*(earlier_slices() if arguments.add else ()), *new]
    metrics = metrics_of(slices)
    path = write_result("protocol_soak", metrics, detail_of(slices))
    plot(slices, path.with_suffix(".png"))
    for name, value in metrics.items():
        console.print(f"{name:24} {value}")
    for violation in (v for part in new for v in part["violations"]):
        console.print(violation, soft_wrap=True)
    console.print(f"written to {path}")


if __name__ == "__main__":
    main()
