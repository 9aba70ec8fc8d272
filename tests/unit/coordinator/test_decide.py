"""What the coordinator decides, from one view of what is stored."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynamo_elastic.coordinator.decide import Action, Answer, Idle, Operate, decide
from dynamo_elastic.coordinator.records import (
    MemberRecord,
    MemberState,
    OperationRecord,
    OutcomeStatus,
    TargetOutcome,
    TargetRecord,
)
from dynamo_elastic.coordinator.status import Status
from dynamo_elastic.phases import Kind, Phase
from dynamo_elastic.testing.coordination import CONFIG, SHAPE
from dynamo_elastic.topology import Member, Topology, place_experts
from dynamo_elastic.types import (
    NO_INCARNATION,
    Epoch,
    FencingToken,
    Incarnation,
    OperationId,
    WorkerId,
)

NOW_S = 101.0


def status(ranks: int, shells: int = 4) -> Status:
    """`ranks` of `shells` serve in epoch 1, the others stand by."""
    members = {}
    for slot in range(shells):
        serves = slot < ranks
        worker = WorkerId(f"slot{slot}")
        state = MemberState.SERVING if serves else MemberState.STANDBY
        incarnation = Incarnation(f"life{slot}") if serves else NO_INCARNATION
        members[worker] = MemberRecord(worker, slot, "host", 1, state, incarnation)
    ranked = [Member(w, m.incarnation) for w, m in list(members.items())[:ranks]]
    topology = Topology(Epoch(1), place_experts(ranked, SHAPE)) if ranks else None
    return Status(topology=topology, epoch=1 if ranks else 0, members=members)


def target(ranks: int, request_id: str = "r") -> TargetRecord:
    return TargetRecord(request_id, ranks, "cli", 100.0)


def act(given: Status) -> Action:
    return decide(given, SHAPE, CONFIG, NOW_S)


def without(given: Status, *slots: int) -> Status:
    gone = {f"slot{slot}" for slot in slots}
    return replace(given, members={w: m for w, m in given.members.items() if w not in gone})


def operation(action: Action) -> tuple[Kind, int, tuple[str, ...]]:
    assert isinstance(action, Operate), action
    plan = action.request.plan
    return plan.kind, plan.after.world_size, action.request.lost


def test_it_boots_what_is_not_there_and_waits_for_shells() -> None:
    assert operation(act(status(0))) == (Kind.BOOT, 2, ())
    waiting = act(status(0, shells=1))
    assert waiting == Idle("boot: 1 of 2 worker shells are on standby")


def test_it_rests_when_all_is_as_wanted() -> None:
    assert isinstance(act(status(2)), Idle)
    answered = TargetOutcome("r", 2, OutcomeStatus.REACHED)
    assert isinstance(act(replace(status(2), target=target(2), outcome=answered)), Idle)


@pytest.mark.parametrize(("ranks", "kind"), [(4, Kind.UP), (3, Kind.UP), (2, Kind.DOWN)])
def test_it_follows_a_legal_target(ranks: int, kind: Kind) -> None:
    width = 4 if kind is Kind.DOWN else 2
    action = act(replace(status(width), target=target(ranks)))
    assert operation(action) == (kind, ranks, ())
    assert isinstance(action, Operate)
    assert action.request.request_id == "r"


@pytest.mark.parametrize("ranks", [-1, 0, 1, 5])
def test_it_refuses_an_illegal_target_once(ranks: int) -> None:
    asked = replace(status(2), target=target(ranks))
    answer = act(asked)
    assert isinstance(answer, Answer)
    assert answer.outcome.status is OutcomeStatus.REFUSED
    assert answer.restore
    assert isinstance(act(replace(asked, outcome=answer.outcome)), Idle)


def test_more_ranks_than_slots_are_refused() -> None:
    answer = act(replace(status(2, shells=3), target=target(4)))
    assert isinstance(answer, Answer)
    assert "only 3 GPU slots" in answer.outcome.reason


def test_the_width_in_force_is_unchanged() -> None:
    answer = act(replace(status(2), target=target(2)))
    assert isinstance(answer, Answer)
    assert answer.outcome.status is OutcomeStatus.UNCHANGED


def test_the_lost_are_evicted_before_anything_else() -> None:
    given = replace(without(status(4), 1), target=target(4))
    assert operation(act(given)) == (Kind.DOWN, 3, ("slot1",))


@pytest.mark.parametrize("how", ["reason", "incarnation", "shell"])
def test_a_rank_is_lost_with_its_shell_its_engine_or_its_life(how: str) -> None:
    given = status(4)
    worker = WorkerId("slot1")
    member = given.members[worker]
    changed = {
        "reason": replace(member, lost_reason="engine died"),
        "incarnation": replace(member, incarnation=Incarnation("another life")),
    }
    if how == "shell":
        given = without(given, 1)
    else:
        given = replace(given, members=given.members | {worker: changed[how]})
    assert operation(act(given)) == (Kind.DOWN, 3, ("slot1",))


def masking(given: Status, masks: dict[int, tuple[int, ...]], epoch: int = 1) -> Status:
    """Engines of these slots step without those of the others."""
    members = dict(given.members)
    for slot, others in masks.items():
        worker, named = WorkerId(f"slot{slot}"), tuple(WorkerId(f"slot{k}") for k in others)
        members[worker] = replace(members[worker], masks=named, masks_in=Epoch(epoch))
    return replace(given, members=members)


@pytest.mark.parametrize(
    ("masks", "lost"),
    [
        ({0: (1,), 2: (1,), 3: (1,)}, ("slot1",)),
        # It woke, and masked those that had gone on without it.
        ({0: (1,), 1: (0, 2, 3), 2: (1,), 3: (1,)}, ("slot1",)),
        ({1: (0,), 2: (0,), 3: (0,), 0: (1, 2, 3)}, ("slot0",)),
    ],
)
def test_who_is_masked_by_the_others_is_lost(
    masks: dict[int, tuple[int, ...]], lost: tuple[str, ...]
) -> None:
    assert operation(act(masking(status(4), masks))) == (Kind.DOWN, 3, lost)


@pytest.mark.parametrize(("others", "epoch"), [({0: (1,)}, 1), ({0: (1,), 2: (1,), 3: (1,)}, 7)])
def test_masks_that_not_all_agree_on_or_of_another_epoch_cost_nobody_its_rank(
    others: dict[int, tuple[int, ...]], epoch: int
) -> None:
    reached = TargetOutcome("r", 4, OutcomeStatus.REACHED)
    given = replace(status(4), target=target(4), outcome=reached)
    assert isinstance(act(masking(given, others, epoch)), Idle)


def test_of_two_that_masked_each_other_one_stays() -> None:
    action = act(masking(status(2), {0: (1,), 1: (0,)}))
    assert operation(action) == (Kind.UP, 2, ("slot1",))


def test_after_an_eviction_the_wanted_width_is_taken_up_again() -> None:
    reached = TargetOutcome("r", 4, OutcomeStatus.REACHED)
    given = replace(status(3), target=target(4), outcome=reached)
    assert operation(act(given)) == (Kind.UP, 4, ())
    fewer = act(without(given, 3))
    assert isinstance(fewer, Idle), "there is no slot for it"


def test_when_too_few_live_free_shells_take_the_place_of_the_lost() -> None:
    action = act(without(status(3), 0, 1))
    assert operation(action) == (Kind.UP, 2, ("slot0", "slot1"))
    assert isinstance(action, Operate)
    plan = action.request.plan
    assert (plan.retained, plan.joiners, plan.loaders) == (("slot2",), ("slot3",), ("slot3",))
    assert plan.after.missing_experts(SHAPE.num_experts) == ()


def test_when_too_few_are_free_for_that_it_starts_anew_with_who_there_is() -> None:
    given = status(2, shells=2)
    worker = WorkerId("slot1")
    dead = replace(given.members[worker], lost_reason="engine died")
    action = act(replace(given, members=given.members | {worker: dead}))
    assert operation(action) == (Kind.BOOT, 2, ())
    assert isinstance(action, Operate)
    assert action.request.discarded == ("slot0", "slot1")


def test_when_too_few_shells_are_left_it_says_so() -> None:
    waiting = act(without(status(3), 0, 1, 3))
    assert isinstance(waiting, Idle)
    assert "slot0, slot1 lost: no width is legal" in waiting.reason


def test_when_all_are_lost_it_boots_with_a_new_epoch() -> None:
    given = status(2)
    dead = {w: replace(m, lost_reason="died") for w, m in given.members.items() if m.slot < 2}
    action = act(replace(given, members=given.members | dead))
    assert operation(action) == (Kind.BOOT, 2, ())
    assert isinstance(action, Operate)
    assert action.request.discarded == ("slot0", "slot1")
    assert action.request.plan.after.epoch == 2
    assert action.request.plan.after.worker_ids == ("slot2", "slot3")


def undone(given: Status, why: str) -> Status:
    """After a scale-down that was aborted, with slot1 recorded as lost."""
    wanted = replace(given, target=target(2, "down"))
    action = act(wanted)
    assert isinstance(action, Operate)
    last = OperationRecord(
        OperationId("down-2"),
        Kind.DOWN,
        action.request.plan,
        Phase.ABORTED,
        source="cli",
        request_id="down",
        token=FencingToken(1),
        topology_revision=1,
        opened_at_s=NOW_S,
        participants={WorkerId("slot1"): why},
        lost=(WorkerId("slot1"),),
    )
    return replace(wanted, last=last, epoch=2)


@pytest.mark.parametrize(
    ("why", "lost"),
    [
        ("lost in open: its lease ran out", ()),
        ("lost: its lease ran out", ()),
        ("lost in abort: EngineError: the step loop is stuck", ("slot1",)),
    ],
)
def test_who_had_only_lost_its_lease_and_is_back_is_not_evicted(
    why: str, lost: tuple[str, ...]
) -> None:
    """Run 997 of the fault matrix: its engine stepped with the others, was not told of the
    placements that its eviction needs, and so these were never in force."""
    given = undone(status(3), why)
    assert operation(act(given)) == (Kind.DOWN, 2, lost)
    assert operation(act(without(given, 1))) == (Kind.DOWN, 2, ("slot1",))
