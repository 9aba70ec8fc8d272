"""The agent on made-up GPUs: what parking does to them, and what it does if they fail."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dynamo_elastic.agent.base import SlotState, StartedEngine, Tier
from dynamo_elastic.agent.client import AgentClient
from dynamo_elastic.agent.image_source import NoImages
from dynamo_elastic.agent.server import AgentServer
from dynamo_elastic.errors import ConfigError
from dynamo_elastic.metrics import AgentMetrics
from dynamo_elastic.snapshot.base import CudaOperation, CudaState
from dynamo_elastic.snapshot.gpu import Gpu
from dynamo_elastic.snapshot.process import alive, identify
from dynamo_elastic.testing.cuda import GIB, FakeCudaProcess, FakeGpuHost, fake_gpus
from dynamo_elastic.testing.deployments import asyncio_test, deployment, standin_argv
from dynamo_elastic.types import Epoch, OperationId, WorkerId

pytestmark = pytest.mark.root

ARGV = standin_argv("--mb", "1")
GPUS = fake_gpus(2)
USED = 60 * GIB


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="de-") as name:
        yield Path(name)


class World:
    """One agent on a host with two GPUs of 80 GiB."""

    def __init__(self, client: AgentClient, host: FakeGpuHost, metrics: AgentMetrics) -> None:
        self.client = client
        self.host = host
        self.metrics = metrics
        self._operations = 0

    async def start(self) -> StartedEngine:
        """An engine in slot 0; one that is booted takes GPU memory."""
        self._operations += 1
        engine = await self.client.start_engine(
            0,
            WorkerId("slot0"),
            OperationId(f"op-{self._operations}"),
            Epoch(self._operations),
            tiers=(Tier.PARKED, Tier.COLD),
            timeout_s=30,
        )
        if engine.tier is Tier.COLD:
            self.host.start(engine.pid, USED, gpu=0)
        return engine

    async def park(self, engine: StartedEngine) -> str:
        return await self.client.park_engine(0, engine.incarnation, timeout_s=10)

    async def state(self) -> SlotState:
        return (await self.client.slots())[0].state

    def free_bytes(self) -> int:
        return self.host.gpus()[0].free_bytes


@asynccontextmanager
async def world(directory: Path) -> AsyncIterator[World]:
    host, metrics = FakeGpuHost(GPUS), AgentMetrics()
    config = deployment(directory)
    server = AgentServer(config, NoImages("none made"), ARGV, gpu=Gpu(host, host), metrics=metrics)
    await server.start()
    client = AgentClient(config.agent_socket)
    try:
        yield World(client, host, metrics)
    finally:
        await client.stop_all()
        await client.close()
        await server.close()


@asyncio_test
async def test_gpu_of_a_parked_engine_is_free(directory: Path) -> None:
    async with world(directory) as here:
        engine = await here.start()
        variables = Path(f"/proc/{engine.pid}/environ").read_text().split("\0")
        assert f"CUDA_VISIBLE_DEVICES={GPUS[0].uuid}" in variables
        assert "UCX_CUDA_IPC_CACHE=n" in variables
        assert (await here.client.status())["gpus"] == {
            "0": GPUS[0].uuid,
            "1": GPUS[1].uuid,
        }
        assert here.free_bytes() == 20 * GIB
        assert await here.park(engine) == ""
        assert here.host.state(engine.pid) is CudaState.CHECKPOINTED
        assert here.free_bytes() == 80 * GIB
        again = await here.start()
        assert (again.tier, again.pid) == (Tier.PARKED, engine.pid)
        assert here.host.state(engine.pid) is CudaState.RUNNING
        assert [operation for operation, _ in here.host.calls] == list(CudaOperation)


@asyncio_test
async def test_gpu_taken_by_another_is_not_tried(directory: Path) -> None:
    async with world(directory) as here:
        engine = await here.start()
        process = identify(engine.pid)
        await here.park(engine)
        here.host.start(99, 30 * GIB, gpu=0)
        here.host.calls.clear()
        again = await here.start()
        assert again.tier is Tier.COLD
        assert f"parked: {GPUS[0].uuid} has" in again.fell_through[0]
        assert here.host.calls == []
        assert process is not None
        assert not alive(process)
        fell = here.metrics.value("fall_throughs_total", tier="parked", reason="no_memory")
        assert fell == 1


def _imports(process: FakeCudaProcess) -> None:
    process.ipc_imports = 1


def _hangs(process: FakeCudaProcess) -> None:
    process.hangs_in.add(CudaOperation.RESTORE)


@pytest.mark.parametrize("plant", [_imports, _hangs])
@asyncio_test
async def test_restore_that_fails_is_the_end_of_the_process(
    directory: Path, plant: Callable[[FakeCudaProcess], None]
) -> None:
    async with world(directory) as here:
        engine = await here.start()
        process = identify(engine.pid)
        plant(here.host.processes[engine.pid])
        assert await here.park(engine) == ""
        again = await here.start()
        assert again.tier is Tier.COLD
        assert again.fell_through[0].startswith("parked: killed processes")
        assert process is not None
        assert not alive(process)
        restores = [pid for operation, pid in here.host.calls if operation is CudaOperation.RESTORE]
        assert restores == [engine.pid]
        assert await here.state() is SlotState.SERVING


def _busy(process: FakeCudaProcess) -> None:
    process.busy = True


def _breaks(process: FakeCudaProcess) -> None:
    process.fails_in[CudaOperation.CHECKPOINT] = ("CUDA_ERROR_UNKNOWN", CudaState.FAILED)


@pytest.mark.parametrize("plant", [_busy, _breaks])
@asyncio_test
async def test_engine_that_keeps_its_gpu_is_ended(
    directory: Path, plant: Callable[[FakeCudaProcess], None]
) -> None:
    async with world(directory) as here:
        engine = await here.start()
        process = identify(engine.pid)
        plant(here.host.processes[engine.pid])
        assert "process" in await here.park(engine)
        assert process is not None
        assert not alive(process)
        assert await here.state() is SlotState.FREE
        assert here.metrics.value("parks_total", outcome="failed") == 1


def test_gpu_that_is_not_there(directory: Path) -> None:
    host = FakeGpuHost(GPUS)
    config = deployment(directory, agent={"gpus": [0, 5]})
    arguments: Any = (config, NoImages("none made"), ARGV)
    with pytest.raises(ConfigError, match="slot 1 has GPU 5"):
        AgentServer(*arguments, gpu=Gpu(host, host))
