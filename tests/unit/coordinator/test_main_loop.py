"""The coordinator boots, follows targets, evicts the lost and says no with a reason."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dynamo_elastic.coordinator.main_loop import Coordinator, Deployment
from dynamo_elastic.coordinator.quarantine import MAX_STRIKES
from dynamo_elastic.coordinator.records import Keys, OutcomeStatus, TargetOutcome
from dynamo_elastic.coordinator.status import Status
from dynamo_elastic.coordinator.targets import request_scale, wait_outcome
from dynamo_elastic.coordinator.timeline import Timeline
from dynamo_elastic.errors import OutcomeUnknown
from dynamo_elastic.phases import Kind, Phase, Step, phases_of
from dynamo_elastic.testing import virtual_time
from dynamo_elastic.testing.coordination import CONFIG, SHAPE, World, world
from dynamo_elastic.testing.participants import FakeShell, Misbehaviour, Script, running
from dynamo_elastic.testing.store import FakeStore
from dynamo_elastic.testing.virtual_time import wall_clock

TIMEOUT_S = 300.0


@asynccontextmanager
async def coordinated(shells: int = 4, *, timeline: Path | None = None) -> AsyncIterator[World]:
    """A world with one coordinator, booted."""
    async with world(FakeStore(), shells) as here, coordinator(here, timeline):
        await until(here, CONFIG.initial_ranks)
        yield here


@asynccontextmanager
async def coordinator(here: World, timeline: Path | None = None) -> AsyncIterator[None]:
    deployment = Deployment(Keys("test"), CONFIG, SHAPE, Timeline(timeline), wall_clock)
    task = asyncio.create_task(Coordinator(here.store, deployment, "c").run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def until(here: World, width: int) -> Status:
    return await here.until(width, timeout_s=TIMEOUT_S)


async def scale(here: World, ranks: int) -> TargetOutcome:
    request_id = await request_scale(here.store, here.keys, ranks, "test")
    return await wait_outcome(here.store, here.keys, request_id, timeout_s=TIMEOUT_S)


def test_it_boots_and_follows_targets() -> None:
    async def main() -> None:
        async with coordinated() as here:
            for ranks in (4, 2, 3):
                outcome = await scale(here, ranks)
                assert (outcome.status, outcome.ranks) == (OutcomeStatus.REACHED, ranks)
                assert (await here.status()).width == ranks
                assert await here.faults() == []

    virtual_time.run(main())


def test_it_boots_only_when_enough_shells_are_there() -> None:
    async def main() -> None:
        async with world(FakeStore(), 1) as here, coordinator(here):
            await asyncio.sleep(60)
            assert (await here.status()).topology is None
            async with running([FakeShell(here.store, here.keys, 1)]):
                await until(here, 2)

    virtual_time.run(main())


@pytest.mark.parametrize(
    ("ranks", "why"),
    [(0, "at least 1 rank"), (1, "at least 2"), (5, "scale.max_ranks"), (-1, "at least 1")],
)
def test_an_illegal_target_is_refused_with_the_reason_and_changes_nothing(
    ranks: int, why: str
) -> None:
    async def main() -> None:
        async with coordinated() as here:
            before = await here.status()
            outcome = await scale(here, ranks)
            assert outcome.status is OutcomeStatus.REFUSED
            assert why in outcome.reason
            after = await here.status()
            assert (after.topology, after.last) == (before.topology, before.last)
            assert after.target is not None
            assert after.target.ranks == 2, "what is wanted is what is there"

    virtual_time.run(main())


def test_the_width_in_force_is_no_operation() -> None:
    async def main() -> None:
        async with coordinated() as here:
            before = await here.status()
            outcome = await scale(here, 2)
            assert outcome.status is OutcomeStatus.UNCHANGED
            assert (await here.status()).last == before.last

    virtual_time.run(main())


def test_the_same_target_twice_is_one_operation() -> None:
    async def main() -> None:
        async with coordinated() as here:
            here[2].script = Script({Step.RESTORE: Misbehaviour.LATE})
            one = asyncio.create_task(scale(here, 4))
            await asyncio.sleep(0.5)
            second = await scale(here, 4)
            assert (await one).status is OutcomeStatus.SUPERSEDED
            assert (await here.status()).epoch == 2

            assert second.ranks == 4

    virtual_time.run(main())


def test_of_targets_that_come_meanwhile_the_newest_wins() -> None:
    async def main() -> None:
        async with coordinated() as here:
            here[2].script = Script({Step.RESTORE: Misbehaviour.LATE})
            first = asyncio.create_task(scale(here, 4))
            await asyncio.sleep(0.5)
            skipped = asyncio.create_task(scale(here, 9))
            await asyncio.sleep(0.1)
            newest = asyncio.create_task(scale(here, 3))
            assert (await newest).status is OutcomeStatus.REACHED
            assert (await skipped).status is OutcomeStatus.SUPERSEDED
            assert (await first).status is OutcomeStatus.SUPERSEDED
            status = await until(here, 3)
            assert status.epoch == 3, "boot, 4, 3 and nothing else"

    virtual_time.run(main())


def test_a_lost_rank_is_evicted_and_its_slot_used_again() -> None:
    async def main() -> None:
        async with coordinated() as here:
            await scale(here, 4)
            await here[2].lose_engine("killed")
            status = await until(here, 4)
            assert status.topology is not None
            assert sorted(status.topology.worker_ids) == ["slot0", "slot1", "slot2", "slot3"]
            assert status.epoch == 4, "boot, up, eviction, up"
            assert await here.faults() == []

    virtual_time.run(main())


def test_a_shell_that_is_gone_is_evicted_and_the_rest_serves_on() -> None:
    async def main() -> None:
        async with coordinated() as here:
            await scale(here, 4)
            here[1].script = Script({Step.FREEZE: Misbehaviour.DIE})
            outcome = asyncio.create_task(scale(here, 3))
            status = await until(here, 3)
            assert status.topology is not None
            assert status.topology.worker_ids == ("slot0", "slot2", "slot3")
            assert (await outcome).status is not OutcomeStatus.REFUSED
            assert await here.faults() == []

    virtual_time.run(main())


def test_a_joiner_that_dies_after_the_commit_is_replaced() -> None:
    async def main() -> None:
        async with coordinated() as here:
            here[3].script = Script({Step.CANARY: Misbehaviour.ENGINE_DIES})
            outcome = await scale(here, 4)
            assert outcome.status is OutcomeStatus.REACHED
            assert (await here.status()).epoch == 4, "boot, up, eviction, up"
            assert await here.faults() == []

    virtual_time.run(main())


def test_a_target_that_fails_for_ever_is_lowered_with_the_reason() -> None:
    async def main() -> None:
        async with coordinated() as here:

            async def spoil() -> None:
                while True:
                    here[3].script = Script({Step.CHECK: Misbehaviour.FAIL})
                    await asyncio.sleep(0.1)

            spoiler = asyncio.create_task(spoil())
            outcome = await scale(here, 4)
            spoiler.cancel()
            assert outcome.status is OutcomeStatus.FAILED
            assert "slot3 is in quarantine: scripted" in outcome.reason
            status = await until(here, 2)
            assert status.target is not None
            assert status.target.ranks == 2
            assert status.epoch == 1 + MAX_STRIKES
            here[3].script = Script({})
            assert (await scale(here, 3)).status is OutcomeStatus.REACHED, "there is slot 2"
            await asyncio.sleep(CONFIG.quarantine_s)
            assert (await scale(here, 4)).status is OutcomeStatus.REACHED

    virtual_time.run(main())


def test_one_failure_is_tried_again() -> None:
    async def main() -> None:
        async with coordinated() as here:
            here[3].script = Script({Step.STREAM: Misbehaviour.FAIL, Step.OPEN: Misbehaviour.FAIL})
            assert (await scale(here, 4)).status is OutcomeStatus.REACHED
            assert (await here.status()).epoch == 3

    virtual_time.run(main())


def test_when_everybody_is_gone_it_boots_again() -> None:
    async def main() -> None:
        async with coordinated(shells=2) as here:
            await here[0].die()
            await here[1].die()
            async with running(FakeShell(here.store, here.keys, slot) for slot in range(3)):
                status = await until(here, 2)
                assert status.topology is not None
                assert status.topology.epoch == 2

    virtual_time.run(main())


def test_a_second_coordinator_takes_over_and_nothing_happens_twice() -> None:
    async def main() -> None:
        async with coordinated() as here, coordinator(here):
            await scale(here, 4)
            leader = await here.store.get(here.keys.leader)
            assert leader is not None
            here[3].script = Script({Step.DRAIN: Misbehaviour.LATE})
            request = asyncio.create_task(scale(here, 3))
            await asyncio.sleep(0.2)
            assert (await here.status()).operation is not None
            lease = next(
                n
                for n, held in here.store._leases.items()  # type: ignore[attr-defined]
                if here.keys.leader in held.keys
            )
            here.store.expire(lease)  # type: ignore[attr-defined]
            assert (await request).status is OutcomeStatus.REACHED
            await asyncio.sleep(1)
            taken = await here.store.get(here.keys.leader)
            assert taken is not None
            assert taken.create_revision > leader.create_revision
            await until(here, 3)
            assert await here.faults() == []

    virtual_time.run(main())


def test_a_store_that_is_away_for_a_while_changes_nothing() -> None:
    async def main() -> None:
        async with coordinated() as here:
            store = here.store
            assert isinstance(store, FakeStore)
            request = asyncio.create_task(scale(here, 4))
            await asyncio.sleep(0.01)
            store.down = True
            store.break_watches()
            await asyncio.sleep(2)
            store.down = False
            assert (await request).status is OutcomeStatus.REACHED
            assert await here.faults() == []

    virtual_time.run(main())


def test_a_request_that_nobody_answers_ends_at_its_deadline() -> None:
    async def main() -> None:
        async with world(FakeStore()) as here:
            with pytest.raises(OutcomeUnknown, match="no answer in 300 s"):
                await scale(here, 4)

    virtual_time.run(main())


def test_the_timeline_tells_every_phase(tmp_path: Path) -> None:
    async def main() -> None:
        async with coordinated(timeline=tmp_path / "timeline.jsonl") as here:
            await scale(here, 4)

    virtual_time.run(main())
    lines = [json.loads(line) for line in (tmp_path / "timeline.jsonl").read_text().splitlines()]
    up = [line for line in lines if line["kind"] == Kind.UP]
    told = [line["phase"] for line in up if line["event"] == "done"]
    assert told == list(phases_of(Kind.UP))
    assert up[-1]["phase"] == Phase.DONE
    restore = next(line for line in up if line["phase"] == "restore" and line["event"] == "done")
    assert restore["detail"]["restore"]["slot2"]["tier"] == "cold"
