"""Engines that come from images, by the real agent: they reach each other, leave, and come back."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from dynamo_elastic.agent.base import StartedEngine, Tier
from dynamo_elastic.agent.open_images import open_images
from dynamo_elastic.config import parse_config
from dynamo_elastic.engine.base import Request
from dynamo_elastic.engine.launch import engine_argv
from dynamo_elastic.engine.reference.make_model import write_model
from dynamo_elastic.snapshot.gpu import open_gpu
from dynamo_elastic.testing.engine_process import SMALL_SHAPE
from dynamo_elastic.testing.fleet import each
from dynamo_elastic.testing.gpu_deployment import GpuHost, ReferenceAgent, deployment_settings
from dynamo_elastic.topology import EngineShape
from dynamo_elastic.types import WorkerId

SHAPE = replace(SMALL_SHAPE, hidden_size=2048, num_hidden_layers=4, num_experts=16)
ENGINE = {
    "slots_per_rank": 16,
    "batch_tokens": 8,
    "max_context": 64,
    "kv_blocks": 64,
    "peer_timeout_s": 1.0,
}
FIRST, SECOND = WorkerId("slot0"), WorkerId("slot1")


@pytest.mark.gpu(2)
@pytest.mark.root
@pytest.mark.criu
@pytest.mark.timeout(145)
def test_engines_from_images_serve_together(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_model(model, SHAPE, seed=5, in_file=False)
    settings = deployment_settings(
        tmp_path, model, slots=2, images=tmp_path / "images", engine=ENGINE
    )
    config = parse_config(settings)
    images = open_images(config, engine_argv, open_gpu())
    # Each is taken in a pid namespace of its own, which is gone afterwards.
    for slot in range(2):
        assert images.create(slot).engine["kernels"]

    async def scenario() -> None:
        async with ReferenceAgent(config) as agent, asyncio.timeout(60):
            host = GpuHost(config, agent, EngineShape(SHAPE.num_experts, 16))
            try:
                await grow_and_shrink(host)
            finally:
                await host.close()

    asyncio.run(scenario())


def listeners(engine: StartedEngine) -> int:
    """Of processes with CUDA, those that others in the engine's pid namespace find."""
    namespace = Path(f"/proc/{engine.pid}/ns/pid").stat().st_ino
    return Path("/proc/net/unix").read_text().count(f"@cuda-uvmfd-{namespace}-")


async def grow_and_shrink(host: GpuHost) -> None:
    fleet = host.fleet
    request = Request("r", (1, 2, 3), 12, temperature=0.0)
    started = await host.start(0, Tier.IMAGE)
    assert listeners(started) == 1
    await fleet.boot(1)
    alone = (await fleet.all[FIRST].generate(request)).tokens
    for tier in (Tier.IMAGE, Tier.PARKED):
        started = await host.start(1, tier)
        assert listeners(started) == 2
        await fleet.scale_up(2)
        both = await each(list(fleet.all.values()), lambda e: e.generate(request))
        assert [output.tokens for output in both] == [alone, alone]
        await fleet.scale_down(1)
        await host.park(SECOND)
