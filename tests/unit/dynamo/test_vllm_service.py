"""A replica as an Engine, over its socket: both ends of every call, the registrar's too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dynamo_elastic.dynamo.vllm_registrar import VllmRegistrar
from dynamo_elastic.dynamo.vllm_service import VllmEngine, all_handlers
from dynamo_elastic.engine.base import Attach, EngineState, Request
from dynamo_elastic.engine.client import EngineClient
from dynamo_elastic.engine.vllm.requests import Requests
from dynamo_elastic.errors import EngineError, RegistrationFailed, RequestMoved
from dynamo_elastic.ipc import RpcServer
from dynamo_elastic.topology import ExpertMove, Member, Topology
from dynamo_elastic.types import Epoch, Incarnation, Rank, WorkerId

ATTACH = Attach(Incarnation("slot0-1"), WorkerId("slot0"), 1, "/dev/null")
TOPOLOGY = Topology(Epoch(1), (Member(WorkerId("slot0"), ATTACH.incarnation),))
PROBE = (5, 6, 7)


class FakeReplica:
    """Answers the probe; ends requests by `abort`."""

    def __init__(self) -> None:
        self.abort = asyncio.Event()

    async def probe(self) -> tuple[int, ...]:
        return PROBE

    async def abort_all(self) -> None:
        self.abort.set()

    async def items(self) -> AsyncGenerator[dict[str, Any], None]:
        """A request that ends only if it is aborted."""
        await self.abort.wait()
        yield {"token_ids": [], "finish_reason": "abort"}


class FakeSeat:
    """Remembers what the shell asked for."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    async def take(self, runtime_data: dict[str, str]) -> int:
        self.said.append(runtime_data)
        if "bad" in runtime_data:
            raise RegistrationFailed("register: no etcd")
        return 9

    async def leave(self) -> None:
        self.said.append("leave")


class World:
    """One replica behind a socket."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "engine.sock"
        self.replica, self.requests, self.seat = FakeReplica(), Requests(), FakeSeat()
        engine = VllmEngine(ATTACH, self.replica, self.requests, kv_blocks=64)
        handlers = all_handlers(engine, self.seat)  # type: ignore[arg-type]
        self.server = RpcServer(self.path, handlers)
        self.client = EngineClient(self.path)


@asynccontextmanager
async def world(directory: Path) -> AsyncIterator[World]:
    it = World(directory)
    await it.server.start()
    try:
        yield it
    finally:
        await it.client.close()
        await it.server.close()


def test_a_scale_up_as_its_shell_drives_it(tmp_path: Path) -> None:
    async def body() -> None:
        async with world(tmp_path) as it:
            engine = it.client
            status = await engine.status()
            assert (status.state, status.incarnation) == (EngineState.ATTACHED, "slot0-1")
            assert status.kv_blocks_total == 64
            assert await engine.open_epoch(Epoch(1), Rank(0), 1) == {}
            await engine.connect_epoch(TOPOLOGY, {}, timeout_s=1.0)
            assert (await engine.status()).state is EngineState.JOINING
            assert (await engine.load_weights([])).size_bytes == 0
            assert (await engine.push_dense(Epoch(1), [], [])).digests == {}
            first, second = await engine.check({}), await engine.check({})
            assert first == second
            assert len(first["probe"]) == 64
            await engine.decide(Epoch(1))
            assert (await engine.wait_switched(Epoch(1), timeout_s=1.0)).gap_s == 0.0
            assert await engine.canary() == PROBE
            await engine.install(TOPOLOGY, {})
            await engine.freeze(True)
            status = await engine.status()
            assert (status.state, status.epoch, status.frozen) == (EngineState.SERVING, 1, True)
            await engine.disconnect(Epoch(1))

    asyncio.run(body())


def test_what_a_replica_can_not_do_is_refused(tmp_path: Path) -> None:
    async def body() -> None:
        async with world(tmp_path) as it:
            engine = it.client
            move = ExpertMove(0, WorkerId("a"), WorkerId("b"), 0)
            with pytest.raises(EngineError, match="no experts"):
                await engine.push_experts(Epoch(1), WorkerId("a"), [move])
            with pytest.raises(EngineError, match="through Dynamo alone"):
                await engine.submit(Request("1", (1,), 1))
            with pytest.raises(EngineError, match="restore an image"):
                await engine.detach()
            with pytest.raises(EngineError, match="not decided"):
                await engine.wait_switched(Epoch(1), timeout_s=1.0)

    asyncio.run(body())


def test_drain_waits_for_requests_and_moves_those_that_take_too_long(tmp_path: Path) -> None:
    async def body() -> None:
        async with world(tmp_path) as it:
            assert await it.client.drain(short_tokens=0, timeout_s=0.0) == 0
            await it.client.readmit()

            async def request() -> str:
                try:
                    async for _ in it.requests.run(it.replica.items()):
                        pass
                except RequestMoved:
                    return "moved"
                return "finished"

            running = [asyncio.create_task(request()) for _ in range(3)]
            await asyncio.sleep(0)
            assert (await it.client.status()).running == 3
            assert await it.client.drain(short_tokens=8, timeout_s=0.02) == 3
            assert await asyncio.gather(*running) == ["moved"] * 3
            assert (await it.client.status()).running == 0

    asyncio.run(body())


def test_the_registrar_asks_the_engine(tmp_path: Path) -> None:
    async def body() -> None:
        async with world(tmp_path) as it:
            registrar = VllmRegistrar(it.path)
            assert await registrar.register({"epoch": "1"}) == 9
            await registrar.unregister()
            assert it.seat.said == [{"epoch": "1"}, "leave"]
            with pytest.raises(RegistrationFailed, match="no etcd"):
                await registrar.register({"bad": ""})

    asyncio.run(body())


def test_the_registrar_without_an_engine(tmp_path: Path) -> None:
    async def body() -> None:
        registrar = VllmRegistrar(tmp_path / "engine.sock")
        await registrar.unregister()
        with pytest.raises(RegistrationFailed):
            await registrar.register({})

    asyncio.run(body())
