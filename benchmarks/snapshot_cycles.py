"""One GPU: one engine parked and restored again and again; how long it takes, and what grows.

Run as root: `python benchmarks/snapshot_cycles.py`. 50 cycles; flat is below 1 % of the level.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

import numpy as np
from gpu_report import SMALL, Report, inventory, run

from dynamo_elastic.agent.base import Tier
from dynamo_elastic.testing.cycles import SLOPE_CYCLES, slope
from dynamo_elastic.testing.deployments import deployment
from dynamo_elastic.testing.gpu_agent import GpuAgent, work_area
from dynamo_elastic.testing.gpu_meter import used_bytes

DEADLINE_S = 440.0
AREA_BYTES = 8 << 30
WEIGHTS_BYTES = 4_000_000_000
SETTLED = 5
"""Growth is counted from here: caches and pools are filled by then."""
FLAT = 0.01
_MEASURED = ("rss_bytes", "fd", "gpu_bytes")


async def measure(report: Report, *, cycles: int, small: bool) -> None:
    sizes: dict[str, Any] = SMALL if small else {"weights_bytes": WEIGHTS_BYTES}
    gpus = inventory(sizes.get("device", "cuda"))
    with work_area((1 << 30) if small else AREA_BYTES) as area:
        async with GpuAgent(deployment(area, slots=1), **sizes) as agent:
            started = await agent.start(0, Tier.COLD)
            seconds, samples = [], []
            for _ in range(cycles):
                await agent.park(started)
                started = await agent.start(0, Tier.PARKED)
                seconds.append(started.elapsed_s)
                answer = await agent.probe(started)
                gpu_bytes = gpus.used_bytes(started.engine.pid) or used_bytes(gpus)
                samples.append((answer["memory_bytes"]["rss"], answer["descriptors"], gpu_bytes))
            await agent.probe(started, host=True)
    report.metric("cycles", len(seconds))
    report.median("restore_p50_s", seconds)
    report.metric("restore_p95_s", float(np.percentile(seconds, 95)))
    for name, values in zip(_MEASURED, zip(*samples, strict=True), strict=True):
        growth(report, name, list(values))


def growth(report: Report, name: str, values: list[float]) -> None:
    """Level at the end, growth per cycle, and growth over the run in parts of the level."""
    settled = values[min(SETTLED, len(values) - 1) :]
    report.detail[name] = values
    level = float(np.median(settled))
    per_cycle = slope(settled) / SLOPE_CYCLES
    grown = per_cycle * len(settled) / level if level else 0.0
    report.metric({"fd": "fd_slope"}.get(name, name.replace("_bytes", "_slope_bytes")), per_cycle)
    report.metric(f"{name}_level", level)
    report.metric(f"{name}_growth", grown)
    report.metric(f"{name}_flat", grown < FLAT)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=50)
    parser.add_argument("--small", action="store_true", help="try it out without a GPU")
    given = parser.parse_args()
    body = functools.partial(measure, cycles=given.cycles, small=given.small)
    run("snapshot_cycles", body, deadline_s=DEADLINE_S)
