"""What every Engine keeps to: the fake, the fake behind a socket, and a real engine process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path

import pytest

from dynamo_elastic.engine.base import Engine, EngineState, Finish, Output, Request
from dynamo_elastic.engine.client import EngineClient
from dynamo_elastic.engine.reference.make_model import write_model
from dynamo_elastic.engine.rpc import OUTPUTS, handlers, lines
from dynamo_elastic.errors import EngineError, EngineGone
from dynamo_elastic.ipc import RpcServer
from dynamo_elastic.testing.engine import FakeEngine
from dynamo_elastic.testing.engine_process import SMALL_SHAPE, EngineProcess, engine_config
from dynamo_elastic.topology import Member, Topology
from dynamo_elastic.types import Epoch, Incarnation, Rank, WorkerId

ME = WorkerId("slot0")
TIMEOUT_S = 20.0


class Subject:
    """One attached engine and its outputs."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._outputs = engine.outputs()

    async def until_finish(self, request_id: str) -> Output:
        """All of one request's tokens in one output; those of others are dropped."""
        tokens: tuple[int, ...] = ()
        async with asyncio.timeout(TIMEOUT_S):
            async for output in self._outputs:
                if output.request_id != request_id:
                    continue
                tokens += output.tokens
                if output.finish:
                    return Output(request_id, tokens, output.finish, output.reason)
        raise AssertionError("the outputs ended")


Make = Callable[[Path], AbstractAsyncContextManager[Subject]]


@asynccontextmanager
async def _stepping(fake: FakeEngine) -> AsyncIterator[None]:
    async def step() -> None:
        while True:
            fake.step()
            await asyncio.sleep(0.001)

    task = asyncio.create_task(step())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def _fake(_: Path) -> AsyncIterator[Subject]:
    fake = FakeEngine(ME)
    async with _stepping(fake):
        yield Subject(fake)


@asynccontextmanager
async def _fake_behind_a_socket(directory: Path) -> AsyncIterator[Subject]:
    fake = FakeEngine(ME)

    async def steps() -> AsyncIterator[list[Output]]:
        async for output in fake.outputs():
            yield [output]

    path = directory / "fake.sock"
    server = RpcServer(path, handlers(fake), {OUTPUTS: lambda _: lines(steps())})
    await server.start()
    client = EngineClient(path)
    async with _stepping(fake):
        yield Subject(client)
    await client.close()
    fake.die()
    await server.close()


@asynccontextmanager
async def _process(directory: Path) -> AsyncIterator[Subject]:
    model = directory / "model"
    write_model(model, SMALL_SHAPE)
    config = engine_config(model, directory / "run", kv_blocks=32)
    engine = EngineProcess(config, 0)
    try:
        await engine.attach(read_outputs=False)
        yield Subject(engine.client)
    finally:
        await engine.stop()


@pytest.fixture(
    params=[
        pytest.param(_fake, id="fake"),
        pytest.param(_fake_behind_a_socket, id="socket"),
        pytest.param(_process, id="process", marks=pytest.mark.nixl),
    ]
)
def make(request: pytest.FixtureRequest) -> Make:
    chosen: Make = request.param
    return chosen


def run(make: Make, directory: Path, scenario: Callable[[Subject], Awaitable[None]]) -> None:
    async def main() -> None:
        async with make(directory) as subject:
            await scenario(subject)

    asyncio.run(main())


def alone(epoch: int) -> Topology:
    """A group of one, which holds all experts."""
    return Topology(Epoch(epoch), (Member(ME, Incarnation("x"), tuple(range(8))),))


async def bring_up(engine: Engine, epoch: int = 1) -> None:
    topology = alone(epoch)
    endpoint = await engine.open_epoch(topology.epoch, Rank(0), 1)
    await engine.connect_epoch(topology, {ME: endpoint}, timeout_s=TIMEOUT_S)
    await engine.load_weights(topology.members[0].experts)
    await engine.decide(topology.epoch)
    await engine.wait_switched(topology.epoch, timeout_s=TIMEOUT_S)


def test_detached_engine_is_gone_for_its_shell(make: Make, tmp_path: Path) -> None:
    async def scenario(subject: Subject) -> None:
        await subject.engine.detach()
        with pytest.raises(EngineGone):
            await subject.engine.status()

    run(make, tmp_path, scenario)


def test_member_of_a_group_is_not_detached(make: Make, tmp_path: Path) -> None:
    async def scenario(subject: Subject) -> None:
        await bring_up(subject.engine)
        with pytest.raises(EngineError, match="leave its group first"):
            await subject.engine.detach()
        assert (await subject.engine.status()).state is EngineState.SERVING

    run(make, tmp_path, scenario)


def test_life(make: Make, tmp_path: Path) -> None:
    async def scenario(subject: Subject) -> None:
        engine = subject.engine
        status = await engine.status()
        assert (status.state, status.epoch) == (EngineState.ATTACHED, 0)
        with pytest.raises(EngineError):
            await engine.submit(Request("early", (1,), 1))
        with pytest.raises(EngineError):
            await engine.decide(Epoch(1))
        await bring_up(engine)
        status = await engine.status()
        assert (status.state, status.epoch, status.world_size) == (EngineState.SERVING, 1, 1)
        assert await engine.canary() == await engine.canary()
        await engine.freeze(True)
        assert (await engine.status()).frozen
        await engine.disconnect(Epoch(1))

    run(make, tmp_path, scenario)


def test_generation(make: Make, tmp_path: Path) -> None:
    async def scenario(subject: Subject) -> None:
        engine = subject.engine
        await bring_up(engine)
        request = Request("a", (1, 2, 3), 6, seed=4)
        await engine.submit(request)
        whole = await subject.until_finish("a")
        assert (whole.finish, len(whole.tokens)) == (Finish.LENGTH, 6)
        rest = Request("b", (1, 2, 3, *whole.tokens[:2]), 4, seed=4)
        await engine.submit(rest)
        assert (await subject.until_finish("b")).tokens == whole.tokens[2:]
        stop = (whole.tokens[3],)
        await engine.submit(Request("c", (1, 2, 3), 6, seed=4, stop_tokens=stop))
        stopped = await subject.until_finish("c")
        at = whole.tokens.index(stop[0])
        assert (stopped.finish, stopped.tokens) == (Finish.STOP, whole.tokens[: at + 1])

    run(make, tmp_path, scenario)


def test_requests_that_are_refused_or_cut_short(make: Make, tmp_path: Path) -> None:
    async def scenario(subject: Subject) -> None:
        engine = subject.engine
        await bring_up(engine)
        with pytest.raises(EngineError, match="max_context"):
            await engine.submit(Request("long", (1,) * 200, 100))
        await engine.submit(Request("a", (1,), 250))
        with pytest.raises(EngineError, match="in use"):
            await engine.submit(Request("a", (1,), 250))
        await engine.cancel("a")
        assert (await subject.until_finish("a")).finish is Finish.CANCELLED
        await engine.cancel("nobody")
        await engine.submit(Request("b", (1,), 250))
        assert await engine.drain(short_tokens=0, timeout_s=5.0) == 1
        assert (await subject.until_finish("b")).finish is Finish.MOVED
        with pytest.raises(EngineError, match="drains"):
            await engine.submit(Request("c", (1,), 1))
        await engine.readmit()
        await engine.submit(Request("c", (1,), 1))
        assert (await subject.until_finish("c")).finish is Finish.LENGTH

    run(make, tmp_path, scenario)


def test_epochs_end(make: Make, tmp_path: Path) -> None:
    async def scenario(subject: Subject) -> None:
        engine = subject.engine
        await bring_up(engine, 3)
        with pytest.raises(EngineError, match="over"):
            await engine.open_epoch(Epoch(2), Rank(0), 1)
        endpoint = await engine.open_epoch(Epoch(4), Rank(0), 1)
        await engine.connect_epoch(alone(4), {ME: endpoint}, timeout_s=TIMEOUT_S)
        await engine.abort_epoch(Epoch(4))
        await engine.abort_epoch(Epoch(4))
        with pytest.raises(EngineError):
            await engine.decide(Epoch(4))
        with pytest.raises(EngineError, match="over"):
            await engine.open_epoch(Epoch(4), Rank(0), 1)
        assert (await engine.status()).epoch == 3
        await engine.decide(Epoch(3))
        await bring_up(engine, 5)
        assert (await engine.status()).epoch == 5
        with pytest.raises(EngineError):
            await engine.wait_switched(Epoch(6), timeout_s=0.05)

    run(make, tmp_path, scenario)


def test_a_newer_epoch_supersedes_the_pending_one(make: Make, tmp_path: Path) -> None:
    async def scenario(subject: Subject) -> None:
        engine = subject.engine
        await bring_up(engine, 1)
        endpoint = await engine.open_epoch(Epoch(2), Rank(0), 1)
        await engine.connect_epoch(alone(2), {ME: endpoint}, timeout_s=TIMEOUT_S)
        await engine.open_epoch(Epoch(3), Rank(0), 1)
        with pytest.raises(EngineError, match="not connected"):
            await engine.decide(Epoch(2))
        with pytest.raises(EngineError, match="over"):
            await engine.open_epoch(Epoch(2), Rank(0), 1)
        await engine.push_experts(Epoch(1), ME, [])
        with pytest.raises(EngineError, match="in force"):
            await engine.abort_epoch(Epoch(1))
        await engine.push_experts(Epoch(1), ME, [])
        assert (await engine.status()).state is EngineState.SERVING

    run(make, tmp_path, scenario)


def test_digests(make: Make, tmp_path: Path) -> None:
    async def scenario(subject: Subject) -> None:
        engine = subject.engine
        with pytest.raises(EngineError):
            await engine.check({})  # a rank that serves nobody yet has to prove its weights
        await bring_up(engine)
        report = await engine.push_dense(Epoch(1), [ME], [])
        digests = (await engine.load_weights(range(8))).digests[ME]
        assert (await engine.check(digests))["probe"] == report.probe
        assert (await engine.check({}))["probe"] == report.probe
        with pytest.raises(EngineError):
            await engine.check({**digests, next(iter(digests)): "wrong"})
        await engine.install(alone(1), {})
        with pytest.raises(EngineError):
            await engine.install(alone(7), {})

    run(make, tmp_path, scenario)
