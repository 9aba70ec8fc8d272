"""Real engine processes, no agent and no coordinator: the test itself drives every call."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from dynamo_elastic.engine.base import EngineState, EngineStatus, Finish, PushReport, Request
from dynamo_elastic.engine.reference.make_model import write_model
from dynamo_elastic.engine.reference.model import TileSize
from dynamo_elastic.engine.reference.oracle import Oracle
from dynamo_elastic.errors import EngineError, EngineGone
from dynamo_elastic.testing.engine_process import SMALL_SHAPE, EngineProcess, engine_config
from dynamo_elastic.topology import (
    EngineShape,
    MoveRound,
    PlanInput,
    ScalePlan,
    Topology,
    move_rounds,
    plan_scale,
)
from dynamo_elastic.types import Epoch, Rank, WorkerId

T = TypeVar("T")

pytestmark = pytest.mark.nixl

TILE = TileSize(batch_tokens=4, max_context=64)
SHAPE = EngineShape(num_experts=8, slots_per_rank=4)
TIMEOUT_S = 20.0
NONE = Topology(Epoch(0))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_model(directory, SMALL_SHAPE, seed=5)
    return directory


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return Oracle(model, TILE)


class Fleet:
    """Engines by worker id, and what a coordinator would have them do."""

    def __init__(self, engines: Sequence[EngineProcess]) -> None:
        self.all = {e.worker_id: e for e in engines}
        self.in_force = NONE

    def of(self, topology: Topology) -> list[EngineProcess]:
        return [self.all[w] for w in topology.worker_ids]

    def plan(self, target: int) -> ScalePlan:
        epoch = Epoch(self.in_force.epoch + 1)
        return plan_scale(PlanInput(self.in_force, target, epoch, SHAPE, list(self.all)))

    async def connect(self, after: Topology) -> None:
        members = self.of(after)
        opened = await each(
            members,
            lambda e: e.client.open_epoch(after.epoch, _rank(after, e), after.world_size),
        )
        endpoints = {e.worker_id: endpoint for e, endpoint in zip(members, opened, strict=True)}
        await each(members, lambda e: e.client.connect_epoch(after, endpoints, timeout_s=TIMEOUT_S))

    async def switch(self, after: Topology) -> None:
        members = self.of(after)
        await each(members, lambda e: e.client.decide(after.epoch))
        await each(members, lambda e: e.client.wait_switched(after.epoch, timeout_s=TIMEOUT_S))
        self.in_force = after

    async def boot(self, ranks: int) -> None:
        after = self.plan(ranks).after
        await self.connect(after)
        members = zip(self.of(after), after.members, strict=True)
        await asyncio.gather(*(e.client.load_weights(m.experts) for e, m in members))
        await self.switch(after)

    async def join(self, plan: ScalePlan) -> None:
        """Up to the decision: joiners connected, with proven dense weights."""
        await self.connect(plan.after)
        sources = [self.all[w] for w in plan.retained]
        reports = await each(
            sources,
            lambda e: e.client.push_dense(plan.after.epoch, plan.retained, plan.joiners),
        )
        for worker in plan.joiners:
            answer = await self.all[worker].client.check(reports[0].digests[worker])
            assert {r.probe for r in reports} == {answer["probe"]}

    async def rebalance(self, before: Topology, after: Topology) -> None:
        for step in move_rounds(before, after):
            await self._round(step)
            self.in_force = step.result

    async def _round(self, step: MoveRound) -> None:
        members = self.of(step.routing)
        await each(members, lambda e: e.client.install(step.routing, {}))
        reports = await each(
            members,
            lambda e: e.client.push_experts(step.routing.epoch, e.worker_id, step.moves),
        )
        digests = _digests(reports)
        await each(members, lambda e: e.client.install(step.result, digests.get(e.worker_id, {})))

    async def scale_up(self, target: int) -> ScalePlan:
        plan = self.plan(target)
        await self.join(plan)
        await self.switch(plan.after)
        canaries = await each(self.of(plan.after), lambda e: e.client.canary())
        assert len(set(canaries)) == 1
        await self.rebalance(plan.after, plan.settled)
        return plan

    async def scale_down(self, target: int) -> ScalePlan:
        plan = self.plan(target)
        leavers = [self.all[w] for w in plan.leavers]
        await each(leavers, lambda e: e.client.drain(short_tokens=2, timeout_s=TIMEOUT_S))
        await self.rebalance(self.in_force, plan.settled)
        await self.connect(plan.after)
        await self.switch(plan.after)
        await each(self.of(plan.after), lambda e: e.client.disconnect(plan.after.epoch))
        return plan


def _rank(topology: Topology, engine: EngineProcess) -> Rank:
    return Rank(topology.worker_ids.index(engine.worker_id))


def _digests(reports: Sequence[PushReport]) -> dict[WorkerId, dict[str, str]]:
    merged: dict[WorkerId, dict[str, str]] = {}
    for report in reports:
        for worker, digests in report.digests.items():
            merged.setdefault(worker, {}).update(digests)
    return merged


async def each(
    engines: Sequence[EngineProcess], act: Callable[[EngineProcess], Awaitable[T]]
) -> list[T]:
    return list(await asyncio.gather(*(act(e) for e in engines)))


@asynccontextmanager
async def fleet(model: Path, run_dir: Path, count: int, **environment: str) -> AsyncIterator[Fleet]:
    """`count` attached engines; `environment` is that of the last."""
    config = engine_config(
        model,
        run_dir,
        slots_per_rank=SHAPE.slots_per_rank,
        batch_tokens=TILE.batch_tokens,
        max_context=TILE.max_context,
        kv_blocks=16,
        peer_timeout_s=3.0,
    )
    engines = [EngineProcess(config, slot) for slot in range(count)]
    try:
        for engine in engines:
            await engine.attach(environment if engine is engines[-1] else None)
        yield Fleet(engines)
    except BaseException as exc:
        for engine in engines:
            exc.add_note(f"{engine.worker_id}: {engine.log()}")
        raise
    finally:
        for engine in engines:
            await engine.stop()


class Load:
    """Requests that keep coming, each to one of `workers`; what moves goes on with the first."""

    def __init__(self, fleet: Fleet, workers: Sequence[WorkerId]) -> None:
        self._fleet = fleet
        self._workers = workers
        self._stop = False
        self.told: list[tuple[Request, tuple[int, ...]]] = []
        self.moved = 0

    @asynccontextmanager
    async def running(self, streams: int = 3) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._stream(i)) for i in range(streams)]
        try:
            yield
        finally:
            self._stop = True
            await asyncio.gather(*tasks)

    async def _stream(self, stream: int) -> None:
        number = 0
        while not self._stop:
            number += 1
            prompt = tuple(1 + (stream * 7 + number + i) % 60 for i in range(3 + number % 9))
            request = Request(f"{stream}/{number}", prompt, 24, seed=number, temperature=1.0)
            self.told.append((request, await self._generate(request, stream)))

    async def _generate(self, request: Request, stream: int) -> tuple[int, ...]:
        worker = self._workers[stream % len(self._workers)]
        tokens: tuple[int, ...] = ()
        try:
            output = await self._fleet.all[worker].generate(request)
        except EngineError as exc:
            if "drains" not in str(exc):
                raise
        else:
            tokens = output.tokens
            if output.finish is Finish.LENGTH:
                return tokens
            assert output.finish is Finish.MOVED, output
        self.moved += 1
        rest = Request(
            request.request_id,
            request.prompt + tokens,
            request.max_tokens - len(tokens),
            request.seed,
            request.temperature,
        )
        output = await self._fleet.all[self._workers[0]].generate(rest)
        assert output.finish is Finish.LENGTH, output
        return tokens + output.tokens

    def check(self, oracle: Oracle) -> None:
        assert self.told
        for request, tokens in self.told:
            assert tokens == oracle.generate(request), request


def test_two_ranks_say_what_one_says(model: Path, oracle: Oracle, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(model, tmp_path, 2) as ranks:
            await ranks.boot(2)
            load = Load(ranks, list(ranks.all))
            async with load.running(streams=5):
                await asyncio.sleep(0.5)
            load.check(oracle)
            status = await ranks.all[WorkerId("slot1")].client.status()
            assert (status.state, status.rank, status.world_size) == (EngineState.SERVING, 1, 2)

    asyncio.run(scenario())


def test_up_and_down_under_load(model: Path, oracle: Oracle, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(model, tmp_path, 4) as ranks:
            await ranks.boot(2)
            load = Load(ranks, [WorkerId("slot0"), WorkerId("slot1")])
            async with load.running():
                await ranks.scale_up(4)
            load.check(oracle)
            load = Load(ranks, list(ranks.all))
            async with load.running(streams=4):
                await asyncio.sleep(0.2)
                down = await ranks.scale_down(2)
                await asyncio.sleep(0.2)
            assert load.moved > 0
            load.check(oracle)
            for worker in down.leavers:
                assert (await ranks.all[worker].client.status()).state is EngineState.LEFT
            statuses = await each(ranks.of(down.after), lambda e: e.client.status())
            assert [s.world_size for s in statuses] == [2, 2]

    asyncio.run(scenario())


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_joiner_lost_after_the_switch(
    sign: signal.Signals, model: Path, oracle: Oracle, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with fleet(model, tmp_path, 3) as ranks:
            await ranks.boot(2)
            load = Load(ranks, [WorkerId("slot0"), WorkerId("slot1")])
            async with load.running():
                plan = ranks.plan(3)
                await ranks.join(plan)
                await ranks.switch(plan.after)
                ranks.all[WorkerId("slot2")].process.send_signal(sign)
                status = await masked(ranks.all[WorkerId("slot0")])
            load.check(oracle)
            assert (status.masked, status.lost_experts) == ((2,), ())

    asyncio.run(scenario())


def test_replicas_stand_in_for_a_lost_rank(model: Path, oracle: Oracle, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(model, tmp_path, 4) as ranks:
            await ranks.boot(2)
            plan = await ranks.scale_up(4)
            load = Load(ranks, plan.retained)
            async with load.running():
                await asyncio.sleep(0.2)
                ranks.all[WorkerId("slot3")].kill()
                status = await masked(ranks.all[WorkerId("slot0")])
                assert (status.masked, status.lost_experts) == ((3,), ())
                down = ranks.plan(3)
                assert down.leavers == ("slot3",)
                await ranks.connect(down.after)
            load.check(oracle)

    asyncio.run(scenario())


async def masked(engine: EngineProcess) -> EngineStatus:
    """The status of `engine` once it has masked a peer."""
    async with asyncio.timeout(TIMEOUT_S):
        while not (status := await engine.client.status()).masked:
            await asyncio.sleep(0.05)
    return status


@pytest.mark.parametrize("failpoint", ["engine.before_first_step", "engine.after_connect"])
def test_joiner_dies_on_the_way(
    failpoint: str, model: Path, oracle: Oracle, tmp_path: Path
) -> None:
    async def scenario() -> None:
        environment = {"DYNAMO_ELASTIC_FAILPOINT": failpoint}
        async with fleet(model, tmp_path, 3, **environment) as ranks:
            await ranks.boot(2)
            retained = list(ranks.all)[:2]
            load = Load(ranks, retained)
            async with load.running():
                plan = ranks.plan(3)
                if failpoint == "engine.after_connect":
                    with pytest.raises(EngineGone):
                        await ranks.join(plan)
                    for worker in retained:
                        await ranks.all[worker].client.abort_epoch(plan.after.epoch)
                else:
                    await ranks.join(plan)
                    for worker in plan.after.worker_ids:
                        await ranks.all[worker].client.decide(plan.after.epoch)
                    for worker in retained:
                        await ranks.all[worker].client.wait_switched(
                            plan.after.epoch, timeout_s=TIMEOUT_S
                        )
                await asyncio.sleep(0.2)
            load.check(oracle)

    asyncio.run(scenario())


def test_lost_experts_fail_requests_and_say_so(model: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(model, tmp_path, 2) as ranks:
            await ranks.boot(2)
            survivor, victim = ranks.all.values()
            await survivor.client.submit(Request("r", (1, 2, 3), 60))
            victim.kill()
            output = await survivor.finished("r")
            assert output.finish is Finish.FAILED
            assert "retry" in output.reason
            status = await survivor.client.status()
            assert (status.masked, len(status.lost_experts)) == ((1,), 4)
            with pytest.raises(EngineError, match="lost"):
                await survivor.client.submit(Request("s", (1,), 1))

    asyncio.run(scenario())


def test_a_detached_engine_holds_nothing(model: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = EngineProcess(engine_config(model, tmp_path, slots_per_rank=8), 0)
        try:
            report = await engine.detached()
            proc = Path(f"/proc/{engine.process.pid}")
            links = {f.name: str(f.readlink()) for f in (proc / "fd").iterdir()}
            assert links == dict.fromkeys("012", "/dev/null")
            assert len(list((proc / "task").iterdir())) == report["threads"] == 1
        finally:
            await engine.stop()

    asyncio.run(scenario())
