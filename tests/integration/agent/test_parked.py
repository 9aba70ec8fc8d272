"""Engines that are parked: they come back, end when they have to, and outlive the agent."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dynamo_elastic.agent.base import SlotState, StartedEngine, Tier
from dynamo_elastic.agent.client import AgentClient
from dynamo_elastic.agent.host import NAMESPACE_FILE, close_host, open_host
from dynamo_elastic.agent.image_source import NoImages
from dynamo_elastic.agent.images import Images
from dynamo_elastic.agent.records import PARKED_FILE
from dynamo_elastic.agent.server import AgentServer
from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.errors import EngineError, SnapshotInUse
from dynamo_elastic.failpoints import error_at, set_hook
from dynamo_elastic.ipc import RpcClient
from dynamo_elastic.metrics import AgentMetrics
from dynamo_elastic.snapshot.catalog import Catalog
from dynamo_elastic.snapshot.process import alive, identify
from dynamo_elastic.testing.deployments import asyncio_test, deployment, standin_argv
from dynamo_elastic.testing.imager import FakeImager
from dynamo_elastic.types import Epoch, OperationId, WorkerId

pytestmark = pytest.mark.root

ARGV = standin_argv("--mb", "1")
BOOT = (Tier.PARKED, Tier.COLD)


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="de-") as name:
        yield Path(name)
        config = deployment(Path(name))
        if (config.state_dir / NAMESPACE_FILE).exists():  # a test failed before its end
            close_host(config, open_host(config))


@pytest.fixture
def failures() -> Iterator[list[str]]:
    """Failpoints at which something fails, each as often as it is listed."""
    wanted: list[str] = []

    def fail(name: str) -> None:
        if name in wanted:
            wanted.remove(name)
            raise error_at(name)

    set_hook(fail)
    yield wanted
    set_hook(None)


class World:
    """One agent after another on the same deployment."""

    def __init__(self, config: DeploymentConfig) -> None:
        self.config = config
        self.metrics = AgentMetrics()
        self.client = AgentClient(config.agent_socket)
        self._operations = 0

    async def start(
        self, slot: int = 0, tiers: tuple[Tier, ...] = BOOT, **more: Any
    ) -> StartedEngine:
        """An engine of an operation of its own."""
        self._operations += 1
        return await self.client.start_engine(
            slot,
            WorkerId(f"slot{slot}"),
            OperationId(f"op-{self._operations}"),
            Epoch(self._operations),
            tiers=tiers,
            **({"timeout_s": 60.0} | more),
        )

    async def park(self, engine: StartedEngine, slot: int = 0, timeout_s: float = 20.0) -> str:
        return await self.client.park_engine(slot, engine.incarnation, timeout_s=timeout_s)

    async def states(self) -> list[SlotState]:
        return [slot.state for slot in await self.client.slots()]

    def evicted(self, reason: str) -> float:
        return self.metrics.value("parked_evictions_total", reason=reason)


@asynccontextmanager
async def world(
    config: DeploymentConfig, images: Any = None, argv: Any = ARGV, *, keep: bool = False
) -> AsyncIterator[World]:
    """With `keep` everything outlives the agent, as it does when an agent dies."""
    here = World(config)
    server = AgentServer(config, images or NoImages("none made"), argv, metrics=here.metrics)
    await server.start()
    try:
        yield here
        if not keep:
            await here.client.stop_all()
    finally:
        await here.client.close()
        await server.close()


async def ask(engine: StartedEngine, name: str) -> Any:
    rpc = RpcClient(Path(engine.socket_path))
    try:
        return await rpc.call(name, {}, timeout_s=10.0)
    finally:
        await rpc.close()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.005)


@asyncio_test
async def test_parked_engine_comes_back_as_another(directory: Path) -> None:
    async with world(deployment(directory)) as here:
        first = await here.start()
        before = await ask(first, "work")
        assert await here.park(first) == ""
        assert not Path(first.socket_path).exists()
        (status, other) = await here.client.slots()
        assert (status.state, status.pid) == (SlotState.PARKED, first.pid)
        assert status.parked_bytes > 1 << 20
        assert other.state is SlotState.FREE
        assert here.metrics.value("parked_engines") == 1
        assert here.metrics.value("parked_host_bytes") == status.parked_bytes

        second = await here.start(tiers=tuple(Tier))
        assert (second.tier, second.pid) == (Tier.PARKED, first.pid)
        assert second.incarnation != first.incarnation
        assert second.fell_through == ()
        after = await ask(second, "work")
        assert after["result"] == before["result"]
        assert after["random"] != before["random"]
        assert here.metrics.value("parked_engines") == 0
        assert here.metrics.value("engine_starts_total", tier="parked", outcome="ok") == 1
        assert here.metrics.value("engine_start_seconds_count", tier="parked") == 1
        (status, _) = await here.client.slots()
        assert (status.state, status.tier) == (SlotState.SERVING, "parked")


@asyncio_test
async def test_parked_engine_that_dies_is_forgotten(directory: Path) -> None:
    async with world(deployment(directory)) as here:
        engine = await here.start()
        await here.park(engine)
        os.kill(engine.pid, signal.SIGKILL)
        await until(lambda: here.evicted("died") == 1)
        assert await here.states() == [SlotState.FREE] * 2
        again = await here.start()
        assert again.tier is Tier.COLD
        assert again.fell_through == ("parked: no engine is parked in the slot",)
        assert here.metrics.value("fall_throughs_total", tier="parked", reason="absent") == 2


@asyncio_test
async def test_parked_engine_that_does_not_come_back_is_tried_once(directory: Path) -> None:
    async with world(deployment(directory), argv=standin_argv("--once")) as here:
        engine = await here.start()
        process = identify(engine.pid)
        await here.park(engine)
        with pytest.raises(EngineError, match="parked: the engine was not ready in time"):
            await here.start(tiers=(Tier.PARKED,), timeout_s=1.0)
        assert process is not None
        assert not alive(process)
        assert await here.states() == [SlotState.FREE] * 2
        assert here.metrics.value("engine_starts_total", tier="parked", outcome="failed") == 1
        assert here.metrics.value("fall_throughs_total", tier="parked", reason="failed") == 1
        assert here.evicted("failed") == 1
        assert (await here.start()).tier is Tier.COLD


@asyncio_test
async def test_engine_that_can_not_be_parked_is_ended(directory: Path) -> None:
    async with world(deployment(directory), argv=standin_argv("--clingy")) as here:
        engine = await here.start()
        process = identify(engine.pid)
        assert process is not None
        assert "not ready in time" in await here.park(engine, timeout_s=3.0)
        assert not alive(process)
        assert await here.states() == [SlotState.FREE] * 2
        assert here.metrics.value("parks_total", outcome="failed") == 1


@asyncio_test
async def test_engine_that_can_be_neither_parked_nor_ended_may_be_ended_later(
    directory: Path, failures: list[str]
) -> None:
    async with world(deployment(directory)) as here:
        first = await here.start()
        failures += ["agent.before_detach", "agent.before_end", "agent.before_end"]
        with pytest.raises(EngineError, match=r"agent\.before_end"):
            await here.park(first)
        with pytest.raises(EngineError, match=r"agent\.before_end"):
            await here.client.stop_engine(0, first.incarnation)
        assert await here.states() == [SlotState.ENDING, SlotState.FREE]
        await here.client.stop_engine(0, first.incarnation)
        assert await here.states() == [SlotState.FREE, SlotState.FREE]
        assert (await here.start()).tier is Tier.COLD


@asyncio_test
async def test_parked_engine_that_could_not_be_ended_is_in_nobodys_way(
    directory: Path, failures: list[str]
) -> None:
    async with world(deployment(directory)) as here:
        first = await here.start()
        assert await here.park(first) == ""
        failures += ["agent.before_end"]
        with pytest.raises(EngineError, match=r"agent\.before_end"):
            await here.client.evict(0)
        again = await here.start()
        assert again.tier is Tier.COLD
        assert not Path(f"/proc/{first.pid}").exists()


@asyncio_test
async def test_engine_of_another_world_is_not_taken(directory: Path) -> None:
    config = deployment(directory)
    async with world(config) as here:
        engine = await here.start()
        await here.park(engine)
        (config.model.path / "config.json").write_text("{}")
        again = await here.start()
        assert again.tier is Tier.COLD
        assert again.fell_through[0].startswith("parked: the parked engine does not fit: model:")
        assert identify(engine.pid) is None
        assert here.evicted("misfit") == 1
        # What was restarted in between keeps the fingerprint of its boot.
        await here.park(again)
        assert (await here.start()).tier is Tier.PARKED


@asyncio_test
async def test_full_pool_lets_the_one_go_that_was_parked_first(directory: Path) -> None:
    settings = {"catalog": str(directory / "images"), "parked": {"max_count": 1}}
    async with world(deployment(directory, snapshot=settings)) as here:
        zero, one = await here.start(0), await here.start(1)
        assert await here.park(one, 1) == ""
        assert await here.park(zero, 0) == ""
        assert await here.states() == [SlotState.PARKED, SlotState.FREE]
        assert identify(one.pid) is None
        assert here.evicted("count") == 1


@asyncio_test
async def test_pool_is_bounded_in_bytes_and_time(directory: Path) -> None:
    small = {"catalog": str(directory / "images"), "parked": {"max_bytes": 1 << 20}}
    async with world(deployment(directory, snapshot=small), keep=True) as here:
        await here.park(await here.start())
        assert await here.states() == [SlotState.FREE] * 2
        assert here.evicted("bytes") == 1
    roomy = {"catalog": str(directory / "images")}
    async with world(deployment(directory, snapshot=roomy), keep=True) as here:
        await here.park(await here.start())
    await asyncio.sleep(0.1)
    short = {"catalog": str(directory / "images"), "parked": {"ttl_s": 0.05}}
    async with world(deployment(directory, snapshot=short)) as here:
        assert here.evicted("ttl") == 1
        assert await here.states() == [SlotState.FREE] * 2


@asyncio_test
async def test_parking_can_be_off(directory: Path) -> None:
    settings = {"catalog": str(directory / "images"), "parked": {"enabled": False}}
    async with world(deployment(directory)) as here:
        engine = await here.start()
    async with world(deployment(directory, snapshot=settings)) as here:
        engine = await here.start()
        assert engine.fell_through == ("parked: parking is off (snapshot.parked.enabled)",)
        assert await here.park(engine) == "parking is off (snapshot.parked.enabled)"
        assert identify(engine.pid) is None


@asyncio_test
async def test_drain_ends_what_is_parked(directory: Path) -> None:
    async with world(deployment(directory)) as here:
        zero, one = await here.start(0), await here.start(1)
        await here.park(zero, 0)
        answer = await here.client.drain("driver upgrade")
        assert answer == {"draining": "driver upgrade", "serving": [1], "evicted": [0]}
        assert identify(zero.pid) is None
        assert await here.park(one, 1) == "this host drains (driver upgrade)"
        assert await here.states() == [SlotState.FREE] * 2


@asyncio_test
async def test_evict_by_hand(directory: Path) -> None:
    async with world(deployment(directory)) as here:
        zero, one = await here.start(0), await here.start(1)
        assert await here.client.evict(0) == ()
        for slot, engine in enumerate((zero, one)):
            await here.park(engine, slot)
        assert await here.client.evict(1) == (1,)
        assert await here.client.evict(None) == (0,)
        assert here.evicted("asked") == 2
        with pytest.raises(EngineError, match="this host has 0-1"):
            await here.client.evict(9)


@asyncio_test
async def test_parked_engine_outlives_its_agent(directory: Path) -> None:
    config = deployment(directory)
    async with world(config, keep=True) as here:
        engine = await here.start()
        await here.park(engine)
    async with world(config, keep=True) as here:
        assert await here.states() == [SlotState.PARKED, SlotState.FREE]
        again = await here.start()
        assert (again.tier, again.pid) == (Tier.PARKED, engine.pid)
    async with world(config) as here:
        assert await here.states() == [SlotState.SERVING, SlotState.FREE]


@asyncio_test
async def test_successor_does_not_take_what_is_stale_dead_or_half_done(directory: Path) -> None:
    config = deployment(directory, slots=3)
    async with world(config, keep=True) as here:
        engines = [await here.start(slot) for slot in range(3)]
        for slot, engine in enumerate(engines):
            assert await here.park(engine, slot) == ""
    # Slot 0 died, slot 1 is of another boot, slot 2 was between two states.
    os.kill(engines[0].pid, signal.SIGKILL)
    await until(lambda: identify(engines[0].pid) is None)
    path = config.control_dir(1) / PARKED_FILE
    record = json.loads(path.read_text())
    record["fingerprint"]["package"] = "0.0.1 of yesterday"
    path.write_text(json.dumps(record))
    (config.control_dir(2) / PARKED_FILE).with_name("engine.json").write_text(
        json.dumps(
            {
                "slot": 2,
                "lease": {"operation_id": "op", "worker_id": "slot2", "epoch": 9},
                "incarnation": "slot2-half",
                "tier": "parked",
                "process": record["report"]["process"],
                "fingerprint": record["fingerprint"],
            }
        )
    )
    async with world(config) as here:
        assert await here.states() == [SlotState.FREE] * 3
        assert all(identify(engine.pid) is None for engine in engines)
        tidied = "\n".join((await here.client.status())["tidied"])
        assert "slot 0: the parked engine is not adopted: it has ended" in tidied
        assert "slot 1: the parked engine is not adopted: the parked engine does not fit" in tidied
        assert "slot 2: engine slot2-half is not adopted: it was between two states" in tidied
        assert here.evicted("misfit") == 1
        assert here.evicted("died") == 2


@asyncio_test
async def test_image_of_a_parked_engine_is_held(directory: Path) -> None:
    config = deployment(directory)
    images = Images(config, FakeImager(), Catalog(config.snapshot.catalog), ARGV)
    manifest = await asyncio.to_thread(images.create, 0)
    async with world(config, images) as here:
        engine = await here.start(tiers=(Tier.IMAGE,))
        assert await here.park(engine) == ""
        with pytest.raises(SnapshotInUse):
            images.catalog.remove(manifest.image_id)
        again = await here.start()
        assert (again.tier, again.pid) == (Tier.PARKED, engine.pid)
        await here.park(again)
        await here.client.evict(0)
        images.catalog.remove(manifest.image_id)


@asyncio_test
async def test_boot_finds_what_an_earlier_one_compiled(directory: Path) -> None:
    tiers = (Tier.CACHED, Tier.COLD)
    async with world(deployment(directory), argv=standin_argv("--jit")) as here:
        first = await here.start(0, tiers)
        assert first.tier is Tier.COLD
        assert first.fell_through[0].startswith("cached: no caches of such an engine")
        # Another slot, and an engine that is to be cold whatever there is.
        second = await here.start(1, tiers)
        assert (second.tier, second.fell_through) == (Tier.CACHED, ())
        assert report(here.config, 1)["found_cache"]
        await here.client.stop_engine(1, second.incarnation)
        third = await here.start(1, (Tier.COLD,))
        assert third.tier is Tier.COLD
        assert not report(here.config, 1)["found_cache"]


@asyncio_test
async def test_cache_with_which_no_engine_boots_is_thrown_away(directory: Path) -> None:
    tiers = (Tier.CACHED, Tier.COLD)
    argv = standin_argv("--jit", "--stale-cache")
    async with world(deployment(directory), argv=argv) as here:
        await here.start(0, tiers)
        engine = await here.start(1, tiers)
        assert engine.tier is Tier.COLD
        assert "cached: the engine ended before it was ready" in engine.fell_through[0]
        assert "the cache is stale" in engine.fell_through[0]


def report(config: DeploymentConfig, slot: int) -> dict[str, Any]:
    """What the engine of `slot` wrote when it was ready, wherever that is now."""
    found: dict[str, Any] = json.loads((config.control_dir(slot) / "detached.json").read_text())
    return found
