"""One GPU: how long an engine takes to come back from each tier, and what the tiers cost.

A restore lasts from the request to the agent until the engine answers: it has filled its weights
anew and replayed all its CUDA graphs, and what they gave is what they gave before the snapshot.
Run as root: `python benchmarks/snapshot_tiers.py`. 4 GB of weights, then 40 GB, within 240 s. What
takes longer is cut, and the result says so: `cut` in its metrics, and fewer times in its detail.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
from pathlib import Path
from typing import Any

from gpu_report import SMALL, Report, inventory, run

from dynamo_elastic.agent.base import Tier
from dynamo_elastic.agent.open_images import open_images
from dynamo_elastic.agent.rehearse import rehearse
from dynamo_elastic.snapshot.base import GpuInventory
from dynamo_elastic.snapshot.manifest import Manifest
from dynamo_elastic.testing.deployments import deployment
from dynamo_elastic.testing.gpu_agent import GpuAgent, Started, work_area
from dynamo_elastic.testing.gpu_meter import used_bytes
from dynamo_elastic.testing.gpu_settings import gpu_argv

DEADLINE_S = 210.0
CASE_DEADLINE_S = 95.0
"""Of each size of weights; what is left is for the memory of the images to be touched first."""
IMAGE_AREA_BYTES = 10 << 30
"""A new image is written before the old one goes."""
CASES = {"": 4_000_000_000, "_40gb": 40_000_000_000}
"""Ending of the metrics' names -> bytes of weights."""


async def measure(report: Report, *, repeats: int, small: bool) -> None:
    with work_area((2 << 30) if small else IMAGE_AREA_BYTES) as area:
        for ending, weights_bytes in CASES.items():
            sizes: dict[str, Any] = {"weights_bytes": weights_bytes}
            if small:
                sizes = SMALL | {"weights_bytes": weights_bytes // 100}
            try:
                async with asyncio.timeout(CASE_DEADLINE_S):
                    await one_size(report, area, ending, sizes, repeats)
            except TimeoutError:
                report.failed.append(f"cut{ending}")
                report.note(f"cut{ending}", f"not done after {CASE_DEADLINE_S:g} s")
        report.metric("cut", sum(name.startswith("cut") for name in report.failed))


async def one_size(
    report: Report, area: Path, ending: str, sizes: dict[str, Any], repeats: int
) -> None:
    """All tiers of an engine of these sizes; the image, which the others can be compared with,
    first."""
    config = deployment(area, slots=1)
    images = open_images(config, gpu_argv(**sizes))
    gpus = inventory(sizes.get("device", "cuda"))
    with report.part(f"take{ending}"):
        manifest = await asyncio.to_thread(images.create, 0)
        costs(report, ending, manifest)
        phases = await rehearse(images, manifest, timeout_s=60)
        report.note(f"image_phases_s{ending}", phases)
    idle_bytes = used_bytes(gpus)
    async with GpuAgent(config, **sizes) as agent:
        with report.part(f"image{ending}"):
            await restores(report, f"image_restore_s{ending}", agent, (Tier.IMAGE,), repeats)
        await agent.clear()
        with report.part(f"cold{ending}"):
            await restores(report, f"cold_s{ending}", agent, (Tier.COLD,), 1)
            cached = (Tier.CACHED, Tier.COLD)
            await restores(report, f"cold_cached_s{ending}", agent, cached, 1)
        with report.part(f"parked{ending}"):
            started = await agent.start(0, *cached)
            await agent.park(started)
            started = await agent.start(0, Tier.PARKED)
            await parked_costs(report, ending, agent, started, gpus, idle_bytes)
            await restores(report, f"parked_restore_s{ending}", agent, (Tier.PARKED,), repeats)
        await agent.clear()


async def restores(
    report: Report, name: str, agent: GpuAgent, tiers: tuple[Tier, ...], repeats: int
) -> None:
    """Start an engine of the slot that often, from one of `tiers`; every one is checked. Those of
    the parked tier are parked again, the others end."""
    timings: list[Any] = []
    report.detail[f"{name}_in_engine"] = timings
    seconds: list[float] = []
    for _ in range(repeats):
        started = await agent.start(0, *tiers)
        timings.append((await agent.probe(started, host=True))["timings_s"])
        await agent.probe(started, seed=99)
        # After each: a run that is cut has told what it knew.
        seconds.append(started.elapsed_s)
        report.median(name, seconds)
        await (agent.park(started) if Tier.PARKED in tiers else agent.end(started))


def costs(report: Report, ending: str, manifest: Manifest) -> None:
    """What the image is made of."""
    host = manifest.engine["host_bytes"]
    on_gpu = sum(manifest.gpu.device_bytes.values()) or manifest.engine["state_bytes"]
    taken = manifest.timings_s
    report.note(f"take_s{ending}", taken)
    report.note(f"sizes{ending}", vars_of(manifest))
    report.metric(f"dump_s{ending}", taken["freeze"] + taken["dump"] + taken["store"])
    report.metric(f"image_bytes{ending}", manifest.size_bytes)
    report.metric(f"host_rss_bytes{ending}", host["rss"])
    report.metric(f"host_own_bytes{ending}", host["anon"] + host["shared"])
    report.metric(f"cuda_state_bytes{ending}", on_gpu)
    report.metric(f"image_ratio{ending}", manifest.size_bytes / (host["rss"] + on_gpu))
    own_ratio = manifest.size_bytes / (host["anon"] + host["shared"] + on_gpu)
    report.metric(f"image_ratio_own{ending}", own_ratio)
    report.metric(f"graphs{ending}", manifest.engine["graphs"])


def vars_of(manifest: Manifest) -> dict[str, Any]:
    return {"sizes": str(manifest.sizes), "gpu": str(manifest.gpu), "engine": manifest.engine}


async def parked_costs(
    report: Report,
    ending: str,
    agent: GpuAgent,
    started: Started,
    gpus: GpuInventory,
    idle_bytes: int,
) -> None:
    """What an engine holds before it is parked, and after."""
    running_bytes = gpus.used_bytes(started.engine.pid) or 0
    await agent.park(started)
    (slot,) = await agent.client.slots()
    report.metric(f"gpu_bytes_running{ending}", running_bytes)
    report.metric(f"gpu_bytes_parked{ending}", gpus.used_bytes(slot.pid) or 0)
    report.metric(f"gpu_bytes_parked_over_idle{ending}", used_bytes(gpus) - idle_bytes)
    report.metric(f"parked_host_bytes{ending}", slot.parked_bytes)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="try it out without a GPU")
    given = parser.parse_args()
    body = functools.partial(measure, repeats=given.repeats, small=given.small)
    run("snapshot_tiers", body, deadline_s=DEADLINE_S)
