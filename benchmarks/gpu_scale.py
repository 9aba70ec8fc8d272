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
import os
import shutil
import statistics
import time
from dataclasses import replace
from pathlib import Path

from gpu_report import Report, inventory, run
from gpu_scenario import Scenario, home

from dynamo_elastic.agent.base import Tier
from dynamo_elastic.agent.open_images import open_images
from dynamo_elastic.config import DeploymentConfig, parse_config
from dynamo_elastic.engine.launch import engine_argv
from dynamo_elastic.engine.reference.make_model import write_model
from dynamo_elastic.engine.reference.model import TileSize
from dynamo_elastic.engine.shape import ModelShape
from dynamo_elastic.snapshot.gpu import open_gpu
from dynamo_elastic.testing.gpu_agent import work_area
from dynamo_elastic.testing.gpu_deployment import (
    GpuHost,
    ReferenceAgent,
    Streams,
    deployment_settings,
)
from dynamo_elastic.topology import EngineShape
from dynamo_elastic.types import WorkerId

DEADLINE_S = 250.0
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
IMAGE_BYTES = 4 << 30
MAX_CONTEXT = 256
STEP_TIMEOUT_S = 60.0


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
            "max_context": MAX_CONTEXT,
            "kv_blocks": 1024,
            "peer_timeout_s": 1.0,
        }
        config = parse_config(
            deployment_settings(area, model, slots=gpus, images=area / "images", engine=engine)
        )
        try:
            await make_images(report, config)
            async with ReferenceAgent(config) as agent:
                host = GpuHost(config, agent, EngineShape(shape.num_experts, slots))
                streams = Streams(host, home(low), tokens=64)
                steps = Scenario(report, host, streams)
                try:
                    await scenario(report, host, steps, streams, (low, gpus, clients))
                finally:
                    await host.close()
        finally:
            keep_logs(config)
        await asyncio.to_thread(against_one_rank, steps, model)


async def make_images(report: Report, config: DeploymentConfig) -> None:
    images = open_images(config, engine_argv, open_gpu())
    began_s = time.monotonic()
    manifests = []
    for slot in range(config.scale.max_ranks):
        manifests.append(await asyncio.to_thread(images.create, slot))
        report.note(f"image_{slot}_s", round(time.monotonic() - began_s, 2))
    report.metric("images_s", time.monotonic() - began_s)
    report.metric("image_bytes", max(sum(f.size_bytes for f in m.files) for m in manifests))


def keep_logs(config: DeploymentConfig) -> None:
    """What the agent and the engines wrote goes to the folder that OUT names: it says which part of
    a restore took how long."""
    if folder := os.environ.get("OUT"):
        for log in config.run_dir.rglob("*.log"):
            shutil.copy(log, Path(folder, f"{log.parent.name}-{log.name}"))


def against_one_rank(steps: Scenario, model: Path) -> None:
    import torch

    from dynamo_elastic.engine.reference.gpu_device import GpuStore
    from dynamo_elastic.memory.cuda_vmm import CudaVmm

    store = GpuStore(CudaVmm(), torch.cuda.Stream())  # type: ignore[no-untyped-call]
    steps.compare(model, TileSize(BATCH_TOKENS, MAX_CONTEXT), store)


async def scenario(
    report: Report, host: GpuHost, steps: Scenario, streams: Streams, sizes: tuple[int, int, int]
) -> None:
    """low -> high from images, back, and up again from parked engines."""
    low, high, clients = sizes
    began_s = time.monotonic()
    await asyncio.gather(*(host.start(slot, Tier.IMAGE) for slot in range(low)))
    report.metric("first_ranks_s", time.monotonic() - began_s)
    await host.fleet.boot(low)
    report.metric("first_boot_s", time.monotonic() - began_s)
    used = [g.total_bytes - g.free_bytes for g in inventory("cuda").gpus()]
    report.metric("bytes_per_rank", max(used))
    streams.start(clients)
    await asyncio.sleep(2.0)
    quiet_s = time.monotonic()
    try:
        await operations(steps, streams, low, high)
    finally:
        await asyncio.wait_for(streams.stop(), STEP_TIMEOUT_S)
        steps.gaps()
        report.metric("quiet_token_gap_max_s", streams.longest_gap_s(quiet_s - 1.5, quiet_s))
        report.metric("requests_total", len(streams.requests) + len(streams.failed))
        report.metric("requests_failed", len(streams.failed))
        report.note("failed", streams.failed[:5])
        if pauses := [b - a for t in streams.times.values() for a, b in itertools.pairwise(t)]:
            report.metric("token_median_s", statistics.median(pauses))
    await same_again(report, host, streams)


async def operations(steps: Scenario, streams: Streams, low: int, high: int) -> None:
    await steps.look(f"first {low}")
    async with asyncio.timeout(STEP_TIMEOUT_S):
        await steps.up("up_image", high, Tier.IMAGE)
    await steps.look(f"then {high}")
    streams.visit(home(high)[low:], 2)
    await asyncio.sleep(1.0)
    async with asyncio.timeout(STEP_TIMEOUT_S):
        await steps.down("down", low)
    await steps.look(f"then {low}")
    await asyncio.sleep(1.0)
    async with asyncio.timeout(STEP_TIMEOUT_S):
        await steps.up("up_parked", high, Tier.PARKED)
    await steps.look(f"then {high} again")
    streams.visit(home(high)[low:], 2)
    await asyncio.sleep(1.0)
    async with asyncio.timeout(STEP_TIMEOUT_S):
        await steps.down("down_again", low)


async def same_again(report: Report, host: GpuHost, streams: Streams) -> None:
    """Some requests once more, nothing else going on: tokens that differ are rounding, or worse."""
    asked = list(streams.requests.values())[:: max(1, len(streams.requests) // 32)][:32]
    engine = host.fleet.all[WorkerId("slot0")]
    outputs = await asyncio.gather(
        *(
            engine.generate(replace(request, request_id=f"again/{number}"))
            for number, (request, _) in enumerate(asked)
        )
    )
    equal = [o.tokens == tokens for o, (_, tokens) in zip(outputs, asked, strict=True)]
    report.metric("requests_repeated", len(asked))
    report.metric("requests_equal", sum(equal))


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
