"""Ranks that share experts, as Engines: what of vLLM happens in which step, and who ends where,
whatever goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_elastic.dynamo.vllm_group import GroupEngine
from dynamo_elastic.engine.base import Attach, EngineState
from dynamo_elastic.engine.vllm.group import STAGE_MOVES, Stage, Summons
from dynamo_elastic.engine.vllm.requests import Requests
from dynamo_elastic.errors import EngineError, RequestMoved
from dynamo_elastic.topology import Member, Topology
from dynamo_elastic.types import Epoch, Incarnation, Rank, WorkerId

POLL_S = 0.002
LEAVE_TIMEOUT_S = 0.3


@dataclass
class Operation:
    """What vLLM's store knows of one operation."""

    name: str
    before: int
    size: int
    ready: set[int] = field(default_factory=set)
    coming: set[int] = field(default_factory=set)
    verdict: str = ""
    error: str = ""

    def check(self) -> None:
        if self.error:
            raise EngineError(self.error)


class World:
    """The store, and the group of each rank."""

    def __init__(self, size: int, total: int) -> None:
        self.operation: Operation | None = None
        self.count = 0
        self.groups = [Group(self, r, size if r < size else 0) for r in range(total)]


class Group:
    """One rank's RankGroup, as vLLM's is: all waits are for what others put into the store."""

    def __init__(self, world: World, rank: int, size: int) -> None:
        self.world, self.rank, self.size = world, Rank(rank), size
        self.mine: Operation | None = None
        self.prepared: Operation | None = None
        """What can be committed here, also if it is over for all others."""
        self.stuck = False
        """Stands still instead of getting ready."""
        self.deaf = 0
        """How often the store will not answer."""
        self.said: list[str] = []
        self.holds = False
        """Does not let go of its memory."""
        self.late = False
        """Takes its time with what all have come to commit."""

    async def prepare(self, size: int) -> None:
        if self.size == size or (self.prepared is not None and self.prepared.size == size):
            return
        world = self.world
        if self.rank == 0:
            world.count += 1
            world.operation = Operation(f"op{world.count}", self.size, size)
        await self._until(lambda: world.operation is not None and world.operation.size == size)
        self.said.append(f"prepare {size}")
        await self._get_ready()

    async def attach(self, rank: Rank, size: int) -> dict[str, float]:
        self.rank = rank
        await self._until(lambda: self.world.operation is not None)
        self.said.append(f"attach {size}")
        await self._get_ready()
        return {"weights": 0.1}

    async def _get_ready(self) -> None:
        operation = self.mine = self.world.operation
        assert operation is not None
        try:
            await self._until(lambda: not self.stuck)
            if self.rank < operation.size:
                operation.ready.add(self.rank)
            await self._until(lambda: operation.ready == set(range(operation.size)))
            self.prepared = operation
        except asyncio.CancelledError:
            operation.error = "cancelled"
            raise

    async def commit(self) -> None:
        operation, self.prepared = self.prepared, None
        assert operation is not None
        operation.coming.add(self.rank)
        try:
            await self._until(lambda: operation.coming == set(range(operation.before)))
        except asyncio.CancelledError:
            operation.error = operation.error or "cancelled"
            raise
        operation.verdict = operation.verdict or "commit"
        operation.check()
        await self._until(lambda: not self.late)
        self._switch(operation)

    async def serving(self) -> None:
        operation, self.prepared = self.prepared, None
        assert operation is not None
        await self._until(lambda: operation.verdict == "commit")
        self._switch(operation)

    def _switch(self, operation: Operation) -> None:
        self.size = operation.size if self.rank < operation.size else 0
        self.said.append(f"in {self.size}")

    async def give_up(self, reason: str) -> None:
        self.prepared = None
        if self.mine is not None and self.mine.verdict != "commit":
            self.mine.error = self.mine.error or reason

    async def withdraw(self, reason: str) -> bool:
        operation = self.mine
        assert operation is not None
        operation.verdict = operation.verdict or "withdrawn"
        if operation.verdict == "commit":
            return False
        operation.error = reason
        return True

    def summons(self) -> Summons | None:
        if self.deaf:
            self.deaf -= 1
            raise EngineError("no store")
        operation = self.world.operation
        if operation is None or operation.error:
            return None
        return Summons(operation.name, operation.size, 0 in operation.coming)

    async def released(self) -> None:
        await self._until(lambda: not self.holds)
        self.said.append("released")

    async def digest(self) -> str:
        return "d1"

    async def _until(self, there: Callable[[], bool]) -> None:
        while not there():
            if self.mine is not None:
                self.mine.check()
            await asyncio.sleep(POLL_S)


class Replica:
    def __init__(self, act: Callable[[], None] = lambda: None) -> None:
        """`act` happens when a probe makes its group step."""
        self._act = act

    async def probe(self) -> tuple[int, ...]:
        self._act()
        return (5, 6)

    async def abort_all(self) -> None:
        """Requests of these tests end by themselves."""


class Deployment:
    """Engines over one World, and the steps of a coordinator."""

    def __init__(self, size: int, total: int) -> None:
        self.world = World(size, total)
        self.detached: list[int] = []
        self.requests = [Requests() for _ in range(total)]
        self.engines = [
            GroupEngine(
                Attach(Incarnation(f"w{r}-1"), WorkerId(f"w{r}"), 1, "/dev/null"),
                self.world.groups[r],
                Replica(),
                self.requests[r],
                64,
                self._detach(r),
                leave_timeout_s=LEAVE_TIMEOUT_S,
            )
            for r in range(total)
        ]

    def _detach(self, rank: int) -> Callable[[], Awaitable[None]]:
        async def detach() -> None:
            self.detached.append(rank)

        return detach

    async def connect(self, epoch: int, size: int, timeout_s: float = 1.0) -> Any:
        return await on(
            self.engines[:size],
            lambda e: e.connect_epoch(topology(epoch, size), {}, timeout_s=timeout_s),
        )

    async def open(self, epoch: int, size: int) -> None:
        for rank, engine in enumerate(self.engines[:size]):
            await engine.open_epoch(Epoch(epoch), Rank(rank), size)

    async def decide(self, epoch: int, size: int, timeout_s: float = 1.0) -> Any:
        for engine in self.engines[:size]:
            await engine.decide(Epoch(epoch))
        return await on(
            self.engines[:size], lambda e: e.wait_switched(Epoch(epoch), timeout_s=timeout_s)
        )

    async def scale(self, epoch: int, size: int) -> None:
        await self.open(epoch, size)
        assert await self.connect(epoch, size) == [None] * size
        for report in await self.decide(epoch, size):
            assert report.epoch == epoch

    async def states(self) -> list[tuple[EngineState, int, int]]:
        said = [await engine.status() for engine in self.engines]
        return [(s.state, s.epoch, s.world_size) for s in said]


def topology(epoch: int, size: int) -> Topology:
    members = tuple(Member(WorkerId(f"w{r}"), Incarnation(f"w{r}-1")) for r in range(size))
    return Topology(Epoch(epoch), members)


async def on(engines: list[GroupEngine], call: Callable[[GroupEngine], Awaitable[Any]]) -> Any:
    return await asyncio.gather(*(call(engine) for engine in engines), return_exceptions=True)


@asynccontextmanager
async def deployment(size: int, total: int) -> AsyncIterator[Deployment]:
    made = Deployment(size, total)
    await made.scale(1, size)
    for group in made.world.groups:
        group.said.clear()
    yield made


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(10):
            await body()

    asyncio.run(within())


S = EngineState


def test_founders_are_in_force_at_their_first_decision() -> None:
    async def body() -> None:
        async with deployment(2, 3) as it:
            assert await it.states() == [(S.SERVING, 1, 2)] * 2 + [(S.ATTACHED, 0, 0)]
            assert it.world.count == 0

    run(body)


def test_up_prepares_in_connect_and_commits_at_the_decision() -> None:
    async def body() -> None:
        async with deployment(2, 3) as it:
            await it.open(2, 3)
            assert await it.connect(2, 3) == [None] * 3
            assert [g.said for g in it.world.groups] == [["prepare 3"]] * 2 + [["attach 3"]]
            assert await it.states() == [(S.SERVING, 1, 2)] * 2 + [(S.JOINING, 0, 0)]
            probes = [await e.check({}) for e in it.engines]
            assert probes == [{"probe": "d1"}] * 3
            assert [r.epoch for r in await it.decide(2, 3)] == [2] * 3
            assert await it.states() == [(S.SERVING, 2, 3)] * 3
            await it.decide(2, 3)  # once more: nothing happens
            await it.connect(2, 3)
            assert [g.said[1:] for g in it.world.groups] == [["in 3"]] * 3

    run(body)


def test_a_leaver_follows_rank_0_and_comes_back() -> None:
    async def body() -> None:
        async with deployment(3, 3) as it:
            assert await it.engines[2].drain(short_tokens=0, timeout_s=0.0) == 0
            await it.scale(2, 2)
            await it.engines[2].detach()
            assert it.detached == [2]
            assert it.world.groups[2].said == ["prepare 2", "in 0", "released"]
            assert (await it.states())[2] == (S.LEFT, 0, 0)
            it.engines[2] = GroupEngine(
                Attach(Incarnation("w2-2"), WorkerId("w2"), 1, "/dev/null"),
                it.world.groups[2],
                Replica(),
                Requests(),
                64,
                it._detach(2),
            )
            await it.scale(3, 3)
            assert await it.states() == [(S.SERVING, 3, 3)] * 3

    run(body)


def test_a_leaver_that_holds_on_to_its_memory_or_its_group_is_refused_by_name() -> None:
    async def body() -> None:
        async with deployment(2, 2) as it:
            await it.engines[1].drain(short_tokens=0, timeout_s=0.0)
            with pytest.raises(EngineError, match="rank 1 has not left its group within"):
                await it.engines[1].detach()
            it.world.groups[1].holds = True
            await it.scale(2, 1)
            with pytest.raises(EngineError, match="rank 1 has not let go of its memory within"):
                await it.engines[1].detach()
            assert it.detached == []
            it.world.groups[1].holds = False
            await it.engines[1].detach()
            assert it.detached == [1]

    run(body)


def test_a_rank_that_died_while_nobody_had_work_is_found_out_by_the_eviction() -> None:
    async def body() -> None:
        async with deployment(3, 3) as it:
            groups = it.world.groups[:2]
            for engine in it.engines[:2]:

                def narrows() -> None:
                    for group in groups:
                        group.size = 2

                engine._replica = Replica(narrows)
            await it.open(2, 2)
            assert await it.connect(2, 2) == [None] * 2
            assert [r.epoch for r in await it.decide(2, 2)] == [2] * 2
            assert (await it.states())[:2] == [(S.SERVING, 2, 2)] * 2
            assert it.world.count == 0, "nothing was left to be prepared"

    run(body)


def test_a_rank_that_the_group_has_gone_on_without_is_named_until_it_is_evicted() -> None:
    async def body() -> None:
        async with deployment(3, 3) as it:

            async def masks() -> list[tuple[Rank, ...]]:
                return [(await engine.status()).masked for engine in it.engines[:2]]

            assert await masks() == [(), ()]
            for group in it.world.groups[:2]:
                group.size = 2
            assert await masks() == [(2,), (2,)]
            await it.open(2, 2)
            assert await masks() == [(), ()], "the next epoch may be about to be in force"
            await it.connect(2, 2)
            await it.decide(2, 2)
            assert await masks() == [(), ()]

    run(body)


def test_a_leaver_asks_a_store_that_does_not_answer_again() -> None:
    async def body() -> None:
        async with deployment(2, 2) as it:
            it.world.groups[1].deaf = 3
            await it.engines[1].drain(short_tokens=0, timeout_s=0.0)
            await it.scale(2, 1)
            await it.engines[1].detach()
            assert (it.world.groups[1].deaf, it.detached) == (0, [1])

    run(body)


def test_who_is_in_no_group_joins_as_any_rank() -> None:
    async def body() -> None:
        async with deployment(1, 3) as it:
            it.engines = [it.engines[0], it.engines[2]]  # as where slot 1 is not there
            await it.scale(2, 2)
            assert await it.states() == [(S.SERVING, 2, 2)] * 2
            assert it.world.groups[2].rank == 1

    run(body)


def test_a_leaver_that_is_readmitted_admits_again() -> None:
    async def body() -> None:
        async with deployment(2, 2) as it:
            await it.engines[1].drain(short_tokens=0, timeout_s=0.0)

            async def items() -> Any:
                yield {"finish_reason": "stop"}

            with pytest.raises(RequestMoved):
                async for _ in it.requests[1].run(items()):
                    pass
            await it.engines[1].readmit()
            assert [i async for i in it.requests[1].run(items())] == [{"finish_reason": "stop"}]
            assert (await it.states())[1] == (S.SERVING, 1, 2)

    run(body)


def test_an_operation_that_is_given_up_while_the_leaver_is_ready_for_it() -> None:
    async def body() -> None:
        async with deployment(3, 3) as it:
            await it.engines[2].drain(short_tokens=0, timeout_s=0.0)
            await it.open(2, 2)
            await it.connect(2, 2)
            await on(it.engines, lambda e: e.abort_epoch(Epoch(2)))
            await it.engines[2].readmit()
            assert await it.states() == [(S.SERVING, 1, 3)] * 3
            await it.engines[2].drain(short_tokens=0, timeout_s=0.0)
            await it.scale(3, 2)
            await it.engines[2].detach()
            assert it.detached == [2]

    run(body)


async def ready_to_leave(it: Deployment, epoch: int) -> None:
    """Of three ranks the last is to leave; all are ready for that, and know it."""
    await it.engines[2].drain(short_tokens=0, timeout_s=0.0)
    await it.open(epoch, 2)
    await it.connect(epoch, 2)
    while it.world.groups[2].prepared is None:
        await asyncio.sleep(POLL_S)


def test_a_leaver_that_is_readmitted_at_once_has_nothing_left_of_its_leave() -> None:
    """It committed what was over when it was to leave again, and the others waited for it."""

    async def body() -> None:
        async with deployment(3, 3) as it:
            await ready_to_leave(it, 2)
            await on(it.engines[:2], lambda e: e.abort_epoch(Epoch(2)))
            await it.engines[2].readmit()
            assert it.world.groups[2].prepared is None
            await ready_to_leave(it, 3)
            assert [r.epoch for r in await it.decide(3, 2)] == [3, 3]
            await it.engines[2].detach()
            assert it.detached == [2]

    run(body)


def test_a_leaver_that_is_readmitted_before_all_have_come_to_commit_stays() -> None:
    async def body() -> None:
        async with deployment(3, 3) as it:
            await ready_to_leave(it, 2)
            await it.engines[0].decide(Epoch(2))
            operation = it.world.operation
            assert operation is not None
            while 2 not in operation.coming:
                await asyncio.sleep(POLL_S)
            await it.engines[2].readmit()
            with pytest.raises(EngineError):
                await it.engines[0].wait_switched(Epoch(2), timeout_s=1.0)
            assert await it.states() == [(S.SERVING, 1, 3)] * 3

    run(body)


def test_a_leaver_that_is_readmitted_when_all_have_come_to_commit_leaves() -> None:
    async def body() -> None:
        async with deployment(3, 3) as it:
            await ready_to_leave(it, 2)
            it.world.groups[2].late = True
            assert [r.epoch for r in await it.decide(2, 2)] == [2, 2]
            readmitted = asyncio.create_task(it.engines[2].readmit())
            await asyncio.sleep(10 * POLL_S)
            it.world.groups[2].late = False
            with pytest.raises(EngineError, match="has left"):
                await readmitted
            assert await it.states() == [(S.SERVING, 2, 2)] * 2 + [(S.LEFT, 0, 0)]
            await it.engines[2].detach()
            assert it.detached == [2]

    run(body)


def test_a_joiner_that_does_not_come_to_be_ready_is_an_abort() -> None:
    async def body() -> None:
        async with deployment(2, 3) as it:
            it.world.groups[2].stuck = True
            await it.open(2, 3)
            failures = await it.connect(2, 3, timeout_s=0.05)
            assert all(isinstance(f, EngineError) for f in failures)
            await on(it.engines[:2], lambda e: e.abort_epoch(Epoch(2)))
            assert (await it.states())[:2] == [(S.SERVING, 1, 2)] * 2
            with pytest.raises(EngineError, match="not open"):
                await it.engines[0].decide(Epoch(2))

    run(body)


def test_the_next_operation_goes_on_at_once_after_an_abort() -> None:
    async def body() -> None:
        async with deployment(2, 3) as it:
            it.world.groups[2].stuck = True
            await it.open(2, 3)
            waiting = asyncio.create_task(it.connect(2, 3, timeout_s=5.0))
            await asyncio.sleep(0.02)
            await on(it.engines, lambda e: e.abort_epoch(Epoch(2)))
            assert [isinstance(f, BaseException) for f in await waiting] == [True] * 3
            it.world.groups[2].stuck = False
            it.world.groups[2].mine = None
            await it.scale(3, 3)
            assert await it.states() == [(S.SERVING, 3, 3)] * 3

    run(body)


def test_a_decision_that_one_rank_missed_can_be_withdrawn_from_all() -> None:
    async def body() -> None:
        async with deployment(2, 3) as it:
            await it.open(2, 3)
            await it.connect(2, 3)
            for rank in (0, 2):
                await it.engines[rank].decide(Epoch(2))
            with pytest.raises(EngineError, match="no switch"):
                await it.engines[0].wait_switched(Epoch(2), timeout_s=0.05)
            await it.engines[0].abort_epoch(Epoch(2))
            await it.engines[1].abort_epoch(Epoch(2))
            assert (await it.states())[:2] == [(S.SERVING, 1, 2)] * 2
            with pytest.raises(EngineError, match="not open"):
                await it.engines[1].decide(Epoch(2))

    run(body)


def test_a_commit_that_fails_while_it_is_withdrawn_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank dies in it: the others go on without that one before they are asked again."""

    async def body() -> None:
        async with deployment(2, 3) as it:
            await it.open(2, 3)
            await it.connect(2, 3)
            await it.engines[0].decide(Epoch(2))
            group = it.world.groups[0]

            async def withdraw(_: str) -> bool:
                assert group.mine is not None
                group.mine.coming.update((0, 1))
                group.mine.error = "a step failed"
                with pytest.raises(EngineError, match="step failed"):
                    await it.engines[0].wait_switched(Epoch(2), timeout_s=1)
                return False

            monkeypatch.setattr(group, "withdraw", withdraw)
            await it.engines[0].abort_epoch(Epoch(2))
            with pytest.raises(EngineError, match="not open"):
                await it.engines[0].decide(Epoch(2))

    run(body)


def test_an_epoch_that_all_have_switched_to_is_not_aborted() -> None:
    async def body() -> None:
        async with deployment(2, 3) as it:
            await it.scale(2, 3)
            for engine in it.engines:
                with pytest.raises(EngineError, match="in force"):
                    await engine.abort_epoch(Epoch(2))
            with pytest.raises(EngineError, match="in force"):
                await it.engines[0].open_epoch(Epoch(1), Rank(0), 2)

    run(body)


def test_a_newer_epoch_supersedes_one_that_is_ready() -> None:
    async def body() -> None:
        async with deployment(2, 3) as it:
            await it.open(2, 3)
            await it.connect(2, 3)
            it.world.groups[2].mine = None  # another process
            for rank in (0, 1):
                await it.engines[rank].open_epoch(Epoch(3), Rank(rank), 2)
            await it.connect(3, 2)
            await it.decide(3, 2)
            assert (await it.states())[:2] == [(S.SERVING, 3, 2)] * 2

    run(body)


def test_who_may_not_leave_and_what_no_rank_can_be() -> None:
    async def body() -> None:
        async with deployment(2, 3) as it:
            with pytest.raises(EngineError, match="rank 0 keeps the group"):
                await it.engines[0].drain(short_tokens=0, timeout_s=0.0)
            with pytest.raises(EngineError, match="can't be 0"):
                await it.engines[1].open_epoch(Epoch(2), Rank(0), 2)
            with pytest.raises(EngineError, match="has to leave first"):
                await it.engines[1].detach()
            await it.engines[2].detach()  # it was never in a group
            assert it.detached == [2]

    run(body)


@given(st.lists(st.sampled_from(list(Stage)), max_size=6))
def test_an_epoch_that_is_over_or_in_force_stays_so(path: list[Stage]) -> None:
    stage = Stage.OPEN
    for after in path:
        if after in STAGE_MOVES[stage]:
            assert stage not in (Stage.OVER, Stage.IN_FORCE)
            stage = after


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=5))
def test_any_run_of_operations_leaves_all_ranks_in_one_group(
    wanted: list[tuple[int, bool]],
) -> None:
    async def body() -> None:
        it = Deployment(2, 4)
        await it.scale(1, 2)
        size = 2
        for epoch, (target, aborts) in enumerate(wanted, 2):
            for rank in range(target, size):
                await it.engines[rank].drain(short_tokens=0, timeout_s=0.0)
            await it.open(epoch, target)
            await it.connect(epoch, target)
            if aborts:
                await on(it.engines, partial(GroupEngine.abort_epoch, epoch=Epoch(epoch)))
                for rank in range(target, size):
                    await it.engines[rank].readmit()
            else:
                await it.decide(epoch, target)
                for rank in range(target, size):
                    await it.engines[rank].detach()
                size = target
            for rank in range(size, 4):
                fresh = Attach(Incarnation(f"w{rank}-{epoch}"), WorkerId(f"w{rank}"), 1, "")
                group = it.world.groups[rank]
                group.mine, group.size = None, 0
                it.engines[rank] = GroupEngine(
                    fresh, group, Replica(), Requests(), 64, it._detach(rank)
                )
            serving = [s for s in await it.states() if s[0] is S.SERVING]
            assert [s[2] for s in serving] == [size] * size
            assert len({s[1] for s in serving}) == 1

    run(body)
