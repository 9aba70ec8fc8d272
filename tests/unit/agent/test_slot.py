"""The state machine of a slot, and who holds it."""

from __future__ import annotations

import asyncio
import os
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_elastic.agent.base import SLOT_MOVES, Lease, SlotState, Tier
from dynamo_elastic.agent.records import EngineRecord
from dynamo_elastic.agent.slot import Slot
from dynamo_elastic.errors import IllegalTransition, SlotLeased
from dynamo_elastic.snapshot.process import ProcessRef, identify
from dynamo_elastic.testing.snapshots import FINGERPRINT
from dynamo_elastic.types import Epoch, Incarnation, OperationId, WorkerId

STATES = st.sampled_from(list(SlotState))


def lease(operation: str, epoch: int, worker: str = "slot0") -> Lease:
    return Lease(OperationId(operation), WorkerId(worker), Epoch(epoch))


@given(st.lists(STATES, max_size=30))
def test_only_moves_of_the_table(wanted: list[SlotState]) -> None:
    slot = Slot(0)
    for state in wanted:
        before = slot.state
        if state in SLOT_MOVES[before]:
            slot.move(state)
            assert slot.state is state
        else:
            with pytest.raises(IllegalTransition, match=f"slot 0 cannot go from {before}"):
                slot.move(state)
            assert slot.state is before


def test_every_state_can_be_reached_and_left() -> None:
    reached, todo = set(), [SlotState.FREE]
    while todo:
        state = todo.pop()
        if state not in reached:
            reached.add(state)
            todo += SLOT_MOVES[state]
    assert reached == set(SlotState)
    # Serving and parked exclude each other: between them the engine starts or is being parked.
    assert SlotState.PARKED not in SLOT_MOVES[SlotState.SERVING]
    assert SlotState.SERVING not in SLOT_MOVES[SlotState.PARKED]


def test_lease_is_idempotent_by_operation_worker_and_epoch() -> None:
    slot = Slot(3)
    slot.claim(lease("a", 5))
    slot.claim(lease("a", 5))
    for other in (lease("b", 5), lease("a", 6), lease("a", 5, "slot1")):
        with pytest.raises(SlotLeased, match=r"slot 3 is leased to slot0 of operation a at epoch"):
            slot.claim(other)
    assert slot.lease == lease("a", 5)


def test_epoch_that_is_over_is_refused_even_by_a_free_slot() -> None:
    slot = Slot(0)
    slot.claim(lease("a", 5))
    slot.lease = None
    with pytest.raises(SlotLeased, match="was leased at epoch 5, epoch 4 is over"):
        slot.claim(lease("late", 4))
    slot.claim(lease("b", 5))
    slot.lease = None
    slot.claim(lease("c", 6))


def test_epoch_of_an_earlier_deployment_is_no_fence() -> None:
    slot = Slot(0)
    process = ProcessRef(1, 1)
    slot.adopt(
        EngineRecord(0, lease("old", 7), Incarnation("x"), Tier.COLD, process, FINGERPRINT, True)
    )
    with pytest.raises(SlotLeased, match="is leased to slot0 of operation old"):
        slot.claim(lease("new", 1))
    slot.lease = None
    slot.claim(lease("new", 1))


def test_process_that_ends_is_noticed_once() -> None:
    process = subprocess.Popen(["sleep", "600"])

    async def body() -> None:
        slot, ended = Slot(0), asyncio.Event()
        reference = identify(process.pid)
        assert reference is not None
        slot.watch(reference, ended.set)
        await asyncio.sleep(0.05)
        assert not ended.is_set()
        process.kill()
        await asyncio.wait_for(ended.wait(), 10)
        slot.unwatch()
        slot.unwatch()
        process.wait()
        ended.clear()
        slot.watch(reference, ended.set)
        assert ended.is_set()

    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(body())
    assert len(os.listdir("/proc/self/fd")) == before
