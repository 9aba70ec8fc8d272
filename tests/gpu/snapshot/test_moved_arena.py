"""An engine that comes back on another GPU has its weights there, at the old addresses."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from dynamo_elastic.agent.base import Tier
from dynamo_elastic.agent.records import ENGINE_LOG, write_attach
from dynamo_elastic.engine.base import DETACHED_FILE, Attach
from dynamo_elastic.ipc import RpcClient, wait_for_socket
from dynamo_elastic.snapshot.gpu import Gpu, open_gpu
from dynamo_elastic.snapshot.park import park, unpark
from dynamo_elastic.snapshot.process import ProcessRef, identify
from dynamo_elastic.testing.deployments import asyncio_test
from dynamo_elastic.testing.gpu_agent import GpuAgent, Started
from dynamo_elastic.testing.gpu_world import SIZES, world
from dynamo_elastic.types import WorkerId

pytestmark = [pytest.mark.gpu(2), pytest.mark.root]

_TIMEOUT_S = 30.0
_POLL_S = 0.01


async def detached(started: Started, control_dir: Path) -> dict[str, Any]:
    """The engine has given up its identity; what it says of itself."""
    report = control_dir / DETACHED_FILE
    report.unlink(missing_ok=True)
    rpc = RpcClient(Path(started.engine.socket_path))
    try:
        await rpc.call("detach", {}, timeout_s=_TIMEOUT_S)
    finally:
        await rpc.close()
    deadline = time.monotonic() + _TIMEOUT_S
    while not report.exists():
        assert time.monotonic() < deadline
        await asyncio.sleep(_POLL_S)
    said: dict[str, Any] = json.loads(report.read_text())
    return said


def move(process: ProcessRef, said: dict[str, Any], gpu: Gpu) -> str:
    """It goes from the first GPU to the second; uuid of the second."""
    first, second, *others = [info.uuid for info in gpu.inventory.gpus()]
    swapped = {first: second, second: first} | {uuid: uuid for uuid in others}
    parked = park(process, gpu.driver, gpu.inventory, engine=said, timeout_s=_TIMEOUT_S)
    unpark(parked, gpu.driver, gpu.inventory, gpu_map=swapped, timeout_s=_TIMEOUT_S)
    return second


@asyncio_test
async def test_weights_are_where_the_engine_is() -> None:
    config = world()
    control_dir = config.control_dir(0)
    gpu = open_gpu()
    async with GpuAgent(config, **SIZES) as agent:
        started = await agent.start(0, Tier.COLD)
        process = identify(started.engine.pid)
        assert process is not None
        said = await detached(started, control_dir)
        there = await asyncio.to_thread(move, process, said, gpu)
        attach = Attach(
            incarnation=started.engine.incarnation,
            worker_id=WorkerId("slot0"),
            seed=1,
            log_path=str(control_dir / ENGINE_LOG),
        )
        write_attach(control_dir, attach)
        await wait_for_socket(Path(started.engine.socket_path), timeout_s=_TIMEOUT_S)
        await agent.probe(started, host=True)
        held = gpu.inventory.devices_of(process.pid)
        assert set(held) == {there}
        assert (held[there] or 0) > said["arena_bytes"] + said["state_bytes"]
