"""The planner's decisions, on a store in memory and a coordinator that is a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from dynamo_elastic.coordinator.records import (
    Keys,
    OutcomeStatus,
    TargetOutcome,
    TargetRecord,
    WarningRecord,
    decode,
    encode,
)
from dynamo_elastic.coordinator.store import Delete, Put
from dynamo_elastic.coordinator.targets import request_scale
from dynamo_elastic.dynamo.decisions import PlannerKeys
from dynamo_elastic.dynamo.watcher import PlannerWatcher, Widths
from dynamo_elastic.errors import StoreUnavailable
from dynamo_elastic.testing.store import FakeStore
from dynamo_elastic.testing.virtual_time import run
from dynamo_elastic.topology import EngineShape, ScaleLimits

KEYS, PLANNER = Keys("test"), PlannerKeys("dynamo")
WIDTHS = Widths(EngineShape(8, 8), ScaleLimits(1, 4, multiple_of=2), slots=4)


class Bench:
    """A planner's hand, and a coordinator that answers every target with `status`."""

    def __init__(self) -> None:
        self.store = FakeStore()
        self.status = OutcomeStatus.REACHED
        self.answering = True
        self.targets: list[TargetRecord] = []
        self.unreached: list[str] = []
        self.gone: list[str] = []

    async def on_unreached(self, reason: str) -> None:
        self.unreached.append(reason)

    async def on_gone(self, reason: str) -> None:
        self.gone.append(reason)

    async def decide(self, decision_id: int, ranks: int) -> None:
        await self.store.txn([], [Put(PLANNER.ranks, b"%d" % ranks)])
        await self.store.txn([], [Put(PLANNER.decision, b"%d" % decision_id)])
        await asyncio.sleep(1.0)

    @property
    def acknowledged(self) -> str:
        stored = self.store.data.get(PLANNER.acknowledged)
        return "" if stored is None else stored.value.decode()

    @property
    def warnings(self) -> list[str]:
        stored = [v for k, v in self.store.data.items() if k.startswith(KEYS.warnings)]
        return [decode(WarningRecord, v.value).text for v in stored]

    async def coordinate(self) -> None:
        while True:
            with suppress(StoreUnavailable):
                async with self.store.watch(KEYS.target) as watch:
                    async for change in watch:
                        if change.value is not None:
                            self.targets.append(decode(TargetRecord, change.value))
                            if self.answering:
                                await self.answer()

    async def answer(self) -> None:
        target = self.targets[-1]
        outcome = TargetOutcome(target.request_id, target.ranks, self.status, "why not")
        await self.store.txn([], [Put(KEYS.outcome, encode(outcome))])
        await asyncio.sleep(0.5)

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        watcher = PlannerWatcher(
            self.store,
            KEYS,
            PLANNER,
            WIDTHS,
            self.on_unreached,
            self.on_gone,
            look_every_s=10.0,
            rivals_after_s=15.0,
        )
        tasks = [asyncio.create_task(c) for c in (self.coordinate(), watcher.run())]
        await asyncio.sleep(0.1)
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def test_a_decision_becomes_a_target_and_is_acknowledged() -> None:
    async def main() -> None:
        bench = Bench()
        async with bench.watching():
            await bench.decide(0, 4)
            await bench.decide(1, 2)
        assert [(t.ranks, t.source) for t in bench.targets] == [(4, "planner"), (2, "planner")]
        assert (bench.acknowledged, bench.unreached) == ("1", [])

    run(main())


def test_no_acknowledgement_before_the_operation_has_ended() -> None:
    async def main() -> None:
        bench = Bench()
        bench.answering = False
        async with bench.watching():
            await bench.decide(0, 4)
            assert bench.acknowledged == ""
            await bench.answer()
            assert bench.acknowledged == "0"

    run(main())


@pytest.mark.parametrize(
    ("wanted", "status", "asked", "reason"),
    [
        (3, OutcomeStatus.REACHED, 2, "multiples of 2"),
        (9, OutcomeStatus.REACHED, 4, "max_ranks is 4"),
        (4, OutcomeStatus.FAILED, 4, "4 ranks were not reached: why not"),
        (4, OutcomeStatus.REFUSED, 4, "4 ranks were not reached: why not"),
    ],
)
def test_what_is_not_had_is_acknowledged_with_its_reason(
    wanted: int, status: OutcomeStatus, asked: int, reason: str
) -> None:
    async def main() -> None:
        bench = Bench()
        bench.status = status
        async with bench.watching():
            await bench.decide(0, wanted)
            assert [t.ranks for t in bench.targets] == [asked]
            assert bench.acknowledged == "0"
            assert reason in bench.unreached[0]
            # The status says so, until a decision is met.
            assert f"planner decision 0 wanted {wanted} ranks: " in bench.warnings[0]
            assert reason in bench.warnings[0]
            bench.status = OutcomeStatus.REACHED
            await bench.decide(1, 4)
            assert bench.warnings == []

    run(main())


def test_no_legal_width_at_all_asks_for_nothing() -> None:
    async def main() -> None:
        bench = Bench()
        none = Widths(EngineShape(8, 1), ScaleLimits(1, 4), slots=4)
        watcher = PlannerWatcher(
            bench.store,
            KEYS,
            PLANNER,
            none,
            bench.on_unreached,
            bench.on_gone,
            look_every_s=10.0,
            rivals_after_s=15.0,
        )
        task = asyncio.create_task(watcher.run())
        await bench.decide(0, 4)
        task.cancel()
        assert (bench.targets, bench.acknowledged) == ([], "0")
        assert "no width is legal" in bench.unreached[0]

    run(main())


def test_ids_that_start_again_at_0_are_new_decisions() -> None:
    async def main() -> None:
        bench = Bench()
        async with bench.watching():
            await bench.decide(5, 4)
            gone = [Delete(PLANNER.ranks), Delete(PLANNER.decision)]
            await bench.store.txn([], gone)
            await bench.decide(0, 2)
        assert [t.ranks for t in bench.targets] == [4, 2]
        assert bench.acknowledged == "0"

    run(main())


def test_after_a_restart_only_what_was_not_acknowledged_is_done() -> None:
    async def main() -> None:
        bench = Bench()
        async with bench.watching():
            await bench.decide(0, 4)
        async with bench.watching():
            await asyncio.sleep(1.0)
        assert len(bench.targets) == 1
        await bench.decide(1, 2)
        async with bench.watching():
            await asyncio.sleep(1.0)
        assert [t.ranks for t in bench.targets] == [4, 2]

    run(main())


def test_a_restart_in_the_middle_does_not_ask_twice() -> None:
    async def main() -> None:
        bench = Bench()
        bench.answering = False
        async with bench.watching():
            await bench.decide(0, 4)
        async with bench.watching():
            await asyncio.sleep(1.0)
            assert len(bench.targets) == 1
            await bench.answer()
        assert bench.acknowledged == "0"

    run(main())


def test_a_newer_decision_takes_the_place_of_one_under_way() -> None:
    async def main() -> None:
        bench = Bench()
        bench.answering = False
        async with bench.watching():
            await bench.decide(0, 4)
            bench.answering = True
            await bench.decide(1, 2)
        assert (bench.acknowledged, bench.unreached) == ("1", [])

    run(main())


def test_a_user_who_scales_meanwhile_wins_and_the_planner_sees_why() -> None:
    async def main() -> None:
        bench = Bench()
        bench.answering = False
        async with bench.watching():
            await bench.decide(0, 4)
            await request_scale(bench.store, KEYS, 2, "cli")
            await asyncio.sleep(1.0)
        assert [(t.ranks, t.source) for t in bench.targets] == [(4, "planner"), (2, "cli")]
        assert bench.acknowledged == "0"
        assert "target 2 by cli" in bench.unreached[0]
        assert "supersedes 4 by planner decision 0" in bench.unreached[0]
        assert bench.unreached[0] in bench.warnings[0]

    run(main())


def test_a_store_that_goes_away_is_waited_for() -> None:
    async def main() -> None:
        bench = Bench()
        async with bench.watching():
            bench.store.break_watches()
            await bench.decide(0, 4)
        assert ([t.ranks for t in bench.targets], bench.acknowledged) == ([4], "0")

    run(main())


def test_an_acknowledgement_that_is_taken_away_comes_back_without_a_new_target() -> None:
    async def main() -> None:
        bench = Bench()
        async with bench.watching():
            await bench.decide(0, 4)
            await bench.store.txn([], [Delete(PLANNER.acknowledged)])
            await asyncio.sleep(1.0)
        assert ([t.ranks for t in bench.targets], bench.acknowledged) == ([4], "0")

    run(main())


def test_a_planner_that_has_lost_its_lease_is_told_of_once() -> None:
    async def main() -> None:
        bench = Bench()
        async with bench.watching():
            await asyncio.sleep(25.0)
            assert bench.gone == [], "it has not come up yet"
            await bench.store.txn([], [Put(f"{PLANNER.instances}generate/a", b"{}")])
            await asyncio.sleep(15.0)
            bench.store.down = True
            await asyncio.sleep(25.0)
            bench.store.down = False
            await asyncio.sleep(15.0)
            assert bench.gone == [], "the store was away, not the planner"
            # Its successor may take its time.
            await bench.store.txn([], [Delete(f"{PLANNER.instances}generate/a")])
            await asyncio.sleep(12.0)
            await bench.store.txn([], [Put(f"{PLANNER.instances}generate/b", b"{}")])
            await asyncio.sleep(15.0)
            assert bench.gone == []
            await bench.store.txn([], [Delete(f"{PLANNER.instances}generate/b")])
            await asyncio.sleep(45.0)
            assert bench.gone == ["the planner has lost its lease"]

    run(main())


def test_a_planner_that_was_killed_is_no_second_one() -> None:
    async def main() -> None:
        bench = Bench()
        async with bench.watching():
            await bench.store.txn([], [Put(f"{PLANNER.instances}generate/a", b"{}")])
            await asyncio.sleep(15.0)
            # Its successor is there before its lease has run out.
            await bench.store.txn([], [Put(f"{PLANNER.instances}generate/b", b"{}")])
            await asyncio.sleep(13.0)
            await bench.store.txn([], [Delete(f"{PLANNER.instances}generate/a")])
            await asyncio.sleep(30.0)
            assert bench.warnings == []
            await bench.store.txn([], [Put(f"{PLANNER.instances}generate/c", b"{}")])
            await asyncio.sleep(40.0)
            assert "(instances b, c); keep one" in bench.warnings[0]
            await bench.store.txn([], [Delete(f"{PLANNER.instances}generate/b")])
            await asyncio.sleep(15.0)
            assert bench.warnings == []

    run(main())


@pytest.mark.parametrize("ranks", [b"many", b""])
def test_a_decision_that_cannot_be_read_is_ignored(ranks: bytes) -> None:
    async def main() -> None:
        bench = Bench()
        async with bench.watching():
            await bench.store.txn([], [Put(PLANNER.ranks, ranks), Put(PLANNER.decision, b"0")])
            await asyncio.sleep(1.0)
        assert (bench.targets, bench.acknowledged) == ([], "")

    run(main())
