"""Who asks for a width: the newest wins, and every other one can see whose place it took."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from dynamo_elastic.coordinator.main_loop import Coordinator, Deployment
from dynamo_elastic.coordinator.records import (
    Keys,
    OutcomeStatus,
    TargetOutcome,
    TargetRecord,
    WarningRecord,
    decode,
    encode,
)
from dynamo_elastic.coordinator.status import read_status
from dynamo_elastic.coordinator.store import Guard, Op, Put
from dynamo_elastic.coordinator.targets import request_scale, succession, wait_outcome
from dynamo_elastic.coordinator.timeline import Timeline
from dynamo_elastic.errors import RequestIdTaken
from dynamo_elastic.testing import virtual_time
from dynamo_elastic.testing.coordination import CONFIG, SHAPE, world
from dynamo_elastic.testing.store import FakeStore
from dynamo_elastic.testing.virtual_time import wall_clock

KEYS = Keys("test")


async def target(store: FakeStore) -> TargetRecord:
    stored = await store.get(KEYS.target)
    assert stored is not None
    return decode(TargetRecord, stored.value)


async def answer(store: FakeStore, request_id: str, ranks: int, status: OutcomeStatus) -> None:
    outcome = TargetOutcome(request_id, ranks, status)
    await store.txn([], [Put(KEYS.outcome, encode(outcome))])


def test_a_target_says_whose_place_it_took() -> None:
    async def main() -> None:
        store = FakeStore()
        await request_scale(store, KEYS, 4, "cli")
        await request_scale(store, KEYS, 3, "planner", detail="decision 17")
        newest = await target(store)
        assert [(t.ranks, t.source) for t in newest.supersedes] == [(4, "cli")]
        text = succession(newest)
        assert text.startswith("target 3 by planner decision 17 at 2")
        assert "Z supersedes 4 by cli at 2" in text

    asyncio.run(main())


def test_memory_of_targets_is_bounded() -> None:
    async def main() -> None:
        store = FakeStore()
        for ranks in range(1, 30):
            await request_scale(store, KEYS, ranks, "cli")
        assert [t.ranks for t in (await target(store)).supersedes] == list(range(28, 20, -1))

    asyncio.run(main())


def test_asking_twice_is_asking_once() -> None:
    async def main() -> None:
        store = FakeStore()
        await request_scale(store, KEYS, 4, "api", request_id="a")
        first = await store.get(KEYS.target)
        assert await request_scale(store, KEYS, 4, "api", request_id="a") == "a"
        assert await store.get(KEYS.target) == first
        with pytest.raises(RequestIdTaken, match="asked for 4 ranks, not 3"):
            await request_scale(store, KEYS, 3, "api", request_id="a")
        await request_scale(store, KEYS, 2, "cli")
        newest = await store.get(KEYS.target)
        await request_scale(store, KEYS, 4, "api", request_id="a")
        assert await store.get(KEYS.target) == newest, "it was superseded, and stays so"

    asyncio.run(main())


def test_a_refused_request_sent_again_keeps_its_answer() -> None:
    """The coordinator puts the width in force back under the refused request's id."""

    async def main() -> None:
        store = FakeStore()
        await request_scale(store, KEYS, 99, "api", request_id="a")
        await answer(store, "a", 99, OutcomeStatus.REFUSED)
        restored = TargetRecord("a", 2, "api", 0.0)
        await store.txn([], [Put(KEYS.target, encode(restored))])
        await request_scale(store, KEYS, 99, "api", request_id="a")
        assert (await target(store)).ranks == 2
        outcome = await wait_outcome(store, KEYS, "a", timeout_s=1)
        assert (outcome.status, outcome.ranks) == (OutcomeStatus.REFUSED, 99)

    asyncio.run(main())


def test_a_writer_that_was_overtaken_takes_the_place_of_the_faster_one() -> None:
    overtakers = [5, 6]

    class Overtaken(FakeStore):
        async def txn(self, guards: Sequence[Guard], ops: Sequence[Op]) -> int:
            if overtakers:
                faster = TargetRecord("x", overtakers.pop(), "planner", 0.0)
                await super().txn([], [Put(KEYS.target, encode(faster))])
            return await super().txn(guards, ops)

    async def main() -> None:
        store = Overtaken()
        await request_scale(store, KEYS, 4, "cli")
        newest = await target(store)
        assert (newest.ranks, newest.supersedes[0].ranks) == (4, 5)

    asyncio.run(main())


def test_an_answer_that_the_next_one_overwrites_at_once_is_seen() -> None:
    async def main() -> None:
        store = FakeStore()
        await request_scale(store, KEYS, 4, "cli", request_id="a")
        waiting = asyncio.create_task(wait_outcome(store, KEYS, "a", timeout_s=5))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await answer(store, "a", 4, OutcomeStatus.REACHED)
        await request_scale(store, KEYS, 2, "planner")
        await answer(store, "b", 2, OutcomeStatus.REACHED)
        assert (await waiting).status is OutcomeStatus.REACHED

    virtual_time.run(main())


def test_the_superseded_see_by_whom() -> None:
    async def main() -> None:
        store = FakeStore()
        await request_scale(store, KEYS, 4, "cli", request_id="a")
        await request_scale(store, KEYS, 3, "planner", detail="decision 17")
        await request_scale(store, KEYS, 2, "api")
        outcome = await wait_outcome(store, KEYS, "a", timeout_s=1)
        assert outcome.status is OutcomeStatus.SUPERSEDED
        assert outcome.reason.startswith("target 2 by api at ")
        assert " supersedes 4 by cli at " in outcome.reason

    asyncio.run(main())


def test_warnings_are_part_of_the_status() -> None:
    async def main() -> None:
        store = FakeStore()
        record = WarningRecord("two planners", 1.0)
        await store.txn([], [Put(KEYS.warning("planner"), encode(record))])
        assert (await read_status(store, KEYS)).warnings == {"planner": record}

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(5))
def test_two_coordinators_and_two_writers_end_at_the_newest_width(seed: int) -> None:
    """Whoever leads and whoever writes: each request is answered once, or superseded by name."""
    rng = random.Random(seed)

    async def main() -> None:
        async with world(FakeStore()) as here:
            deployment = Deployment(here.keys, CONFIG, SHAPE, Timeline(None), wall_clock)
            coordinators = [
                asyncio.create_task(Coordinator(here.store, deployment, name).run())
                for name in ("one", "two")
            ]
            await here.until(2, timeout_s=300)
            outcomes: list[TargetOutcome] = []

            async def write(source: str) -> None:
                for _ in range(6):
                    ranks = rng.choice([2, 3, 4])
                    name = await request_scale(here.store, here.keys, ranks, source)
                    outcomes.append(await wait_outcome(here.store, here.keys, name, timeout_s=300))
                    await asyncio.sleep(rng.random())

            await asyncio.gather(write("cli"), write("planner"))
            newest = (await here.status()).target
            assert newest is not None
            await here.until(newest.ranks, timeout_s=300)
            assert await here.faults() == []
            for outcome in outcomes:
                superseded = outcome.status is OutcomeStatus.SUPERSEDED
                assert superseded == (" supersedes " in outcome.reason)
            for task in coordinators:
                task.cancel()
            await asyncio.wait(coordinators)

    virtual_time.run(main())
