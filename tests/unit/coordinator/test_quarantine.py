"""Slots and images that fail twice in a row are left out for a while."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from dynamo_elastic.coordinator import quarantine
from dynamo_elastic.coordinator.decide import Answer, Idle, Operate, decide
from dynamo_elastic.coordinator.records import (
    MemberRecord,
    MemberState,
    OperationRecord,
    OutcomeStatus,
    PhaseRecord,
    Strike,
    TargetRecord,
)
from dynamo_elastic.coordinator.status import Status
from dynamo_elastic.phases import Kind, Phase, Step
from dynamo_elastic.testing import virtual_time
from dynamo_elastic.testing.coordination import CONFIG, SHAPE, world
from dynamo_elastic.testing.participants import Misbehaviour, Script
from dynamo_elastic.testing.store import FakeStore
from dynamo_elastic.topology import Member, PlanInput, Topology, place_experts, plan_scale
from dynamo_elastic.types import Epoch, FencingToken, Incarnation, OperationId, WorkerId

NOW_S = 1000.0
SLOT2 = WorkerId("slot2")


def record(tier: str = "", **changes: object) -> OperationRecord:
    """A scale-up from slots 0, 1 to slot 2, restored from `tier`."""
    members = place_experts([Member(WorkerId(f"slot{k}"), Incarnation("i")) for k in (0, 1)], SHAPE)
    before = Topology(Epoch(1), members)
    plan = plan_scale(PlanInput(before, 3, Epoch(2), SHAPE, (SLOT2,)))
    detail: dict[str, Any] = {Step.RESTORE: {SLOT2: {"tier": tier}}} if tier else {}
    made = OperationRecord(
        operation_id=OperationId("op"),
        kind=Kind.UP,
        plan=plan,
        phase=Phase.ABORTED,
        source="test",
        request_id="",
        token=FencingToken(1),
        topology_revision=1,
        opened_at_s=NOW_S,
        phases=(PhaseRecord(Phase.RESTORE, NOW_S, detail=detail),),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tier", "suspect"), [("", "slot2"), ("cold", "slot2"), ("image", "slot2/image")]
)
def test_what_brought_the_engine_up_is_suspected(tier: str, suspect: str) -> None:
    once = record(tier)
    strikes = quarantine.struck(once, SLOT2, "bad bytes", NOW_S)
    assert quarantine.quarantined(strikes, NOW_S, 10) == {}
    twice = replace(once, strikes=strikes)
    strikes = quarantine.struck(twice, SLOT2, "worse bytes", NOW_S)
    assert quarantine.quarantined(strikes, NOW_S, 10) == {suspect: "worse bytes"}


def test_time_or_success_ends_it() -> None:
    strikes = {"slot2": Strike(2, "why", NOW_S), "slot3/image": Strike(2, "why", NOW_S + 5)}
    assert quarantine.released_s(strikes, strikes, 10) == NOW_S + 10
    assert set(quarantine.quarantined(strikes, NOW_S + 10, 10)) == {"slot3/image"}
    assert quarantine.remembered(strikes, NOW_S + 15, 10) == {}
    assert set(quarantine.cleared(strikes, [WorkerId("slot3")])) == {"slot2"}


def status(strikes: dict[str, Strike]) -> Status:
    """Two ranks serve, slots 2 and 3 are free, and a third rank is wanted."""
    last = record(strikes=strikes)
    members = {}
    for slot in range(4):
        state = MemberState.SERVING if slot < 2 else MemberState.STANDBY
        life = Incarnation("i" if slot < 2 else "")
        worker = WorkerId(f"slot{slot}")
        members[worker] = MemberRecord(worker, slot, "host", 1, state, life)
    return Status(
        topology=last.plan.before,
        epoch=2,
        members=members,
        last=last,
        target=TargetRecord("r", 3, "cli", NOW_S),
    )


def test_a_slot_in_quarantine_does_not_join() -> None:
    action = decide(status({"slot2": Strike(2, "why", NOW_S)}), SHAPE, CONFIG, NOW_S)
    assert isinstance(action, Operate)
    assert action.request.plan.joiners == ("slot3",)
    later = decide(
        status({"slot2": Strike(2, "why", NOW_S)}), SHAPE, CONFIG, NOW_S + CONFIG.quarantine_s
    )
    assert isinstance(later, Operate)
    assert later.request.plan.joiners == ("slot2",)


def test_a_slot_whose_image_is_in_quarantine_boots_cold() -> None:
    action = decide(status({"slot2/image": Strike(2, "why", NOW_S)}), SHAPE, CONFIG, NOW_S)
    assert isinstance(action, Operate)
    assert action.request.plan.joiners == ("slot2",)
    assert action.request.cold == {"slot2"}


def test_a_target_that_waits_for_slots_is_given_up_with_the_reason() -> None:
    both = {w: Strike(2, "bad bytes", NOW_S) for w in ("slot2", "slot3")}
    waiting = decide(status(both), SHAPE, CONFIG, NOW_S + 1)
    assert isinstance(waiting, Idle)
    assert waiting.until_s == NOW_S + CONFIG.slots_timeout_s
    assert "slot2 is in quarantine: bad bytes" in waiting.reason
    answer = decide(status(both), SHAPE, CONFIG, NOW_S + CONFIG.slots_timeout_s)
    assert isinstance(answer, Answer)
    assert answer.restore
    assert answer.outcome.status is OutcomeStatus.FAILED
    assert "scale.slots_timeout_s" in answer.outcome.reason
    assert "slot3 is in quarantine: bad bytes" in answer.outcome.reason


def test_strikes_are_durable_and_success_clears_them() -> None:
    async def main() -> None:
        async with world(FakeStore()) as here:
            scaler = await here.lead()
            await here.scale(scaler, 2)
            here[2].script = Script({Step.CANARY: Misbehaviour.WRONG})
            await here.scale(scaler, 3)
            last = (await here.status()).last
            assert last is not None
            assert list(last.strikes) == ["slot2"]
            request, now = await here.request(2)
            await scaler.scale(request, now)
            last = (await here.status()).last
            assert last is not None
            assert list(last.strikes) == ["slot2"], "another operation says nothing about it"
            await here[2].stand_by()
            await asyncio.sleep(0.1)
            await here.scale(scaler, 3)
            last = (await here.status()).last
            assert last is not None
            assert last.strikes == {}

    virtual_time.run(main())
