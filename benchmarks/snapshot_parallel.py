"""All GPUs: an image of each slot restored alone, then all of them at once.

Run as root: `python benchmarks/snapshot_parallel.py`. It takes the GPUs that it finds.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import time
from typing import Any

from gpu_report import SMALL, Report, inventory, run

from dynamo_elastic.agent.base import Tier
from dynamo_elastic.agent.open_images import open_images
from dynamo_elastic.errors import ResourceMissing
from dynamo_elastic.testing.deployments import deployment
from dynamo_elastic.testing.gpu_agent import GpuAgent, work_area
from dynamo_elastic.testing.gpu_settings import gpu_argv

DEADLINE_S = 440.0
IMAGE_AREA_BYTES = 6 << 30
WEIGHTS_BYTES = 4_000_000_000
NUMBERS = {2: "two", 4: "four", 8: "eight"}


async def measure(report: Report, *, repeats: int, small: bool) -> None:
    sizes: dict[str, Any] = SMALL if small else {"weights_bytes": WEIGHTS_BYTES}
    slots = 2 if small else len(inventory("cuda").gpus())
    if slots < 2:
        raise ResourceMissing("one GPU is not parallel", remedy="run on a host with two or more")
    report.metric("slots", slots)
    with work_area(slots * ((1 << 30) if small else IMAGE_AREA_BYTES)) as area:
        config = deployment(area, slots=slots)
        images = open_images(config, gpu_argv(**sizes))
        probes = set()
        for slot in range(slots):
            manifest = await asyncio.to_thread(images.create, slot)
            probes.add(manifest.engine["probe"])
        async with GpuAgent(config, **sizes) as agent:
            await restores(report, agent, slots, repeats, probes)


async def restores(
    report: Report, agent: GpuAgent, slots: int, repeats: int, probes: set[str]
) -> None:
    """One after the other, then together; each that often."""
    alone: list[float] = []
    together: list[float] = []
    digests: set[str] = set()
    for _ in range(repeats):
        for slot in range(slots):
            started = await agent.start(slot, Tier.IMAGE)
            alone.append(started.elapsed_s)
            await agent.end(started)
        began_s = time.perf_counter()
        all_started = await asyncio.gather(*(agent.start(s, Tier.IMAGE) for s in range(slots)))
        together.append(time.perf_counter() - began_s)
        report.note("each_s", [round(s.elapsed_s, 3) for s in all_started])
        answers = await asyncio.gather(*(agent.probe(s, host=True) for s in all_started))
        digests |= {answer["digest"] for answer in answers}
        report.note("timings", [answer["timings_s"] for answer in answers])
        await asyncio.gather(*(agent.end(s) for s in all_started))
    report.median("restore_one_s", alone)
    report.median("restore_all_s", together)
    if slots in NUMBERS:
        report.metric(f"restore_{NUMBERS[slots]}_s", report.metrics["restore_all_s"])
    report.metric("ratio", report.metrics["restore_all_s"] / report.metrics["restore_one_s"])
    report.metric("digests_equal", len(digests | probes) == 1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="try it out without a GPU")
    given = parser.parse_args()
    body = functools.partial(measure, repeats=given.repeats, small=given.small)
    run("snapshot_parallel", body, deadline_s=DEADLINE_S)
