"""Engines on a real GPU: they leave it, come back to it, and compute what they did before."""

from __future__ import annotations

import asyncio

import pytest

from dynamo_elastic.agent.base import SlotState, Tier
from dynamo_elastic.agent.rehearse import rehearse
from dynamo_elastic.snapshot.nvml import Nvml
from dynamo_elastic.snapshot.process import identify
from dynamo_elastic.testing.deployments import asyncio_test
from dynamo_elastic.testing.gpu_agent import GpuAgent
from dynamo_elastic.testing.gpu_meter import used_bytes
from dynamo_elastic.testing.gpu_world import SIZES, image_of, images_of, world

_TOLERANCE_BYTES = 64 << 20

pytestmark = [pytest.mark.gpu(1), pytest.mark.root, pytest.mark.criu]


def test_an_image_holds_the_cuda_state_and_no_weights() -> None:
    manifest = image_of(world())
    assert manifest.gpu.processes == 1
    assert manifest.engine["graphs"] == 32
    on_gpu = sum(manifest.gpu.device_bytes.values()) or manifest.engine["state_bytes"]
    assert on_gpu >= manifest.engine["state_bytes"]
    assert manifest.sizes.cuda_bytes > 256 << 20
    assert manifest.size_bytes < 1.3 * (manifest.engine["host_bytes"]["rss"] + on_gpu)


@asyncio_test
async def test_every_tier_brings_the_same_engine_back() -> None:
    config = world()
    await asyncio.to_thread(image_of, config)
    gpus = Nvml.open()
    async with GpuAgent(config, **SIZES) as agent:
        idle_bytes = used_bytes(gpus)
        started = await agent.start(0, Tier.IMAGE)
        await agent.probe(started, host=True)
        await agent.probe(started, seed=99)
        await agent.probe(started)
        process = identify(started.engine.pid)
        assert process is not None
        for _ in range(2):
            await agent.park(started)
            (slot,) = await agent.client.slots()
            assert slot.state is SlotState.PARKED
            assert slot.pid == process.pid
            assert not gpus.used_bytes(process.pid)
            assert used_bytes(gpus) - idle_bytes < _TOLERANCE_BYTES
            assert slot.parked_bytes > 256 << 20

            started = await agent.start(0, Tier.PARKED)
            assert started.engine.tier is Tier.PARKED
            assert identify(started.engine.pid) == process
            await agent.probe(started, host=True)
        await agent.end(started)
        assert not gpus.used_bytes(process.pid)
        assert (await agent.start(0)).engine.tier is Tier.IMAGE


@asyncio_test
async def test_an_image_is_rehearsed_beside_a_running_engine() -> None:
    config = world()
    manifest = await asyncio.to_thread(image_of, config)
    async with GpuAgent(config, **SIZES) as agent:
        started = await agent.start(0, Tier.IMAGE)
        timings = await rehearse(images_of(config), manifest, timeout_s=60)
        assert timings["ready"] < 60
        await agent.probe(started, host=True)
