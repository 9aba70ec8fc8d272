"""N GPUs: the reference engine grows and shrinks under streaming load, joiners from each tier.

On four GPUs 2 -> 4 -> 2 -> 4, on two 1 -> 2 -> 1 -> 2, one engine a GPU, about 30 GB of weights a
rank (the shape of Qwen3-30B-A3B, made up from a seed). The real agent restores and parks; this
program does what the coordinator would. Times run from the request to the first token that a user
gets from a joiner. Run as root: `python benchmarks/gpu_scale.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from dataclasses import replace
from typing import Any

from gpu_report import Report, inventory, run

from dynamo_elastic.agent.base import Tier
from dynamo_elastic.agent.open_images import open_images
from dynamo_elastic.config import parse_config
from dynamo_elastic.engine.base import Request
from dynamo_elastic.engine.launch import engine_argv
from dynamo_elastic.engine.reference.make_model import write_model
from dynamo_elastic.engine.shape import ModelShape
from dynamo_elastic.snapshot.gpu import open_gpu
from dynamo_elastic.testing.fleet import each
from dynamo_elastic.testing.gpu_agent import work_area
from dynamo_elastic.testing.gpu_deployment import (
    GpuHost,
    ReferenceAgent,
    Streams,
    deployment_settings,
)
from dynamo_elastic.topology import EngineShape, ScalePlan
from dynamo_elastic.types import WorkerId

DEADLINE_S = 420.0
QWEN3_30B_A3B = ModelShape(
    hidden_size=2048,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    intermediate_size=0,
    vocab_size=512,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    eos_token_id=0,
)
"""But for the vocabulary, which the tokenizer of made-up models does not have."""
BATCH_TOKENS = 32
IMAGE_BYTES = 6 << 30
DRAIN_TOKENS = 8


class Scenario:
    """One host through its operations; every number goes into `report`."""

    def __init__(self, report: Report, host: GpuHost) -> None:
        self._report = report
        self._host = host
        self._windows: dict[str, tuple[float, float]] = {}

    async def up(self, name: str, target: int, tier: Tier) -> None:
        """Joiners come from `tier`; done when each has given a user its first token."""
        fleet, phases = self._host.fleet, dict[str, float]()
        began_s = last_s = time.monotonic()

        def lap(phase: str) -> None:
            nonlocal last_s
            now = time.monotonic()
            phases[phase], last_s = round(now - last_s, 4), now

        width = fleet.in_force.world_size
        started = await asyncio.gather(*(self._host.start(s, tier) for s in range(width, target)))
        lap("restore")
        plan = fleet.plan(target)
        await fleet.connect(plan.after)
        lap("connect")
        sources = [fleet.all[w] for w in plan.retained]
        epoch = plan.after.epoch
        reports = await each(
            sources, lambda e: e.client.push_dense(epoch, plan.retained, plan.joiners)
        )
        lap("stream")
        joiners = [fleet.all[w] for w in plan.joiners]
        await each(joiners, lambda e: e.client.check(reports[0].digests[e.worker_id]))
        lap("check")
        await fleet.switch(plan.after)
        lap("commit")
        await each(joiners, lambda e: e.client.canary())
        lap("canary")
        await each(joiners, lambda e: e.generate(_first_request(e.worker_id)))
        firsts = [e.token_times[_first_request(e.worker_id).request_id][0] for e in joiners]
        phases["first_token"] = round(max(firsts) - last_s, 4)
        self._report.metric(f"{name}_s", max(firsts) - began_s)
        serving_s = time.monotonic()
        await fleet.rebalance(plan.after, plan.settled)
        phases["rebalance"] = round(time.monotonic() - serving_s, 4)
        ended_s = time.monotonic()
        self._report.note(f"{name}_phases_s", phases)
        self._report.note(f"{name}_engine_ready_s", [round(s.ready_s, 4) for s in started])
        self._report.note(f"{name}_dense_bytes", sum(r.size_bytes for r in reports))
        self._windows[f"{name}_token_gap_max_s"] = (began_s, serving_s)
        self._windows[f"{name}_rebalance_gap_max_s"] = (serving_s, ended_s)

    def gaps(self, streams: Streams) -> None:
        """The longest gaps of each operation; `streams` have ended."""
        for name, (begin_s, end_s) in self._windows.items():
            self._report.metric(name, streams.longest_gap_s(begin_s, end_s))

    async def down(self, name: str, target: int) -> None:
        """Leavers are parked; done when their GPUs are free."""
        began_s = time.monotonic()
        fleet = self._host.fleet
        plan: ScalePlan = await fleet.scale_down(target)
        switched_s = time.monotonic()
        await each([fleet.all[w] for w in plan.leavers], lambda e: e.client.disconnect(_next(plan)))
        parked = [await self._host.park(w) for w in plan.leavers]
        ended_s = time.monotonic()
        self._report.metric(f"{name}_s", ended_s - began_s)
        self._report.note(
            f"{name}_phases_s",
            {"until_left": switched_s - began_s, "park": [round(s, 4) for s in parked]},
        )
        self._windows[f"{name}_token_gap_max_s"] = (began_s, ended_s)


def _next(plan: ScalePlan) -> Any:
    return plan.after.epoch + 1


def _first_request(worker: WorkerId) -> Request:
    return Request(f"first-of-{worker}", (9, 8, 7, 6), 4, temperature=0.0)


async def measure(report: Report, *, layers: int, gpus: int, clients: int) -> None:
    low = max(1, gpus // 2)
    with work_area(IMAGE_BYTES * gpus) as area:
        shape = replace(QWEN3_30B_A3B, num_hidden_layers=layers)
        model = area / "model"
        write_model(model, shape, seed=11, in_file=False)
        slots = -(-shape.num_experts // low)
        engine = {
            "slots_per_rank": slots,
            "batch_tokens": BATCH_TOKENS,
            "max_context": 256,
            "kv_blocks": 1024,
            "peer_timeout_s": 1.0,
        }
        config = parse_config(
            deployment_settings(area, model, slots=gpus, images=area / "images", engine=engine)
        )
        images = open_images(config, engine_argv, open_gpu())
        made_s = time.monotonic()
        manifests = [await asyncio.to_thread(images.create, slot) for slot in range(gpus)]
        report.metric("images_s", time.monotonic() - made_s)
        report.metric("image_bytes", max(sum(f.size_bytes for f in m.files) for m in manifests))
        async with ReferenceAgent(config) as agent:
            host = GpuHost(config, agent, EngineShape(shape.num_experts, slots))
            try:
                await scenario(report, host, low, gpus, clients)
            finally:
                await host.close()


async def scenario(report: Report, host: GpuHost, low: int, high: int, clients: int) -> None:
    """low -> high from images, back, and up again from parked engines."""
    began_s = time.monotonic()
    await asyncio.gather(*(host.start(slot, Tier.IMAGE) for slot in range(low)))
    report.metric("first_ranks_s", time.monotonic() - began_s)
    await host.fleet.boot(low)
    retained = [WorkerId(f"slot{slot}") for slot in range(low)]
    used = [g.total_bytes - g.free_bytes for g in inventory("cuda").gpus()]
    report.metric("bytes_per_rank", max(used))
    streams = Streams(host, retained, tokens=64)
    streams.start(clients)
    await asyncio.sleep(2.0)
    quiet_s = time.monotonic()
    steps = Scenario(report, host)
    try:
        await steps.up("up_image", high, Tier.IMAGE)
        await asyncio.sleep(1.0)
        await steps.down("down", low)
        await asyncio.sleep(1.0)
        await steps.up("up_parked", high, Tier.PARKED)
        await asyncio.sleep(1.0)
    finally:
        await streams.stop()
    steps.gaps(streams)
    report.metric("quiet_token_gap_max_s", streams.longest_gap_s(quiet_s - 1.5, quiet_s))
    report.metric("requests_total", len(streams.requests) + len(streams.failed))
    report.metric("requests_failed", len(streams.failed))
    report.note("failed", streams.failed[:5])
    report.metric("step_median_s", statistics.median(_steps(streams)))
    await same_again(report, host, streams)


def _steps(streams: Streams) -> list[float]:
    return [b - a for times in streams.times.values() for a, b in itertools.pairwise(times)]


async def same_again(report: Report, host: GpuHost, streams: Streams) -> None:
    """The same requests once more, nothing going on: tokens that differ are rounding, or worse."""
    asked = list(streams.requests.values())[:: max(1, len(streams.requests) // 40)]
    engine = host.fleet.all[WorkerId("slot0")]
    equal = 0
    for number, (request, tokens) in enumerate(asked):
        again = await engine.generate(replace(request, request_id=f"again/{number}"))
        equal += again.tokens == tokens
    report.metric("requests_repeated", len(asked))
    report.metric("requests_equal", equal)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=0, help="0: as many as make 30 GB a rank")
    parser.add_argument("--clients", type=int, default=8)
    arguments = parser.parse_args()
    gpus = len(inventory("cuda").gpus())
    # A lone rank holds every expert: half the layers are as many bytes.
    layers = arguments.layers or (24 if gpus < 4 else 48)

    async def body(report: Report) -> None:
        report.metric("gpus", gpus)
        report.metric("layers", layers)
        await measure(report, layers=layers, gpus=gpus, clients=arguments.clients)

    run("gpu_scale", body, deadline_s=DEADLINE_S)


if __name__ == "__main__":
    main()
