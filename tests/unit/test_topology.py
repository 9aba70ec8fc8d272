"""Plans and placements: every expert held, evenly, few bytes moved, never a broken round."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_elastic.errors import TargetRefused
from dynamo_elastic.phases import Kind
from dynamo_elastic.topology import (
    DISK,
    EMPTY,
    EngineShape,
    Member,
    PlanInput,
    ScaleLimits,
    Topology,
    check_target,
    legal_width,
    move_rounds,
    place_experts,
    plan_replacement,
    plan_scale,
    refusal,
)
from dynamo_elastic.types import NO_INCARNATION, Epoch, WorkerId

SHAPE = EngineShape(num_experts=16, slots_per_rank=8)
LIMITS = ScaleLimits(min_ranks=2, max_ranks=6, multiple_of=2)
WORKERS = tuple(WorkerId(f"slot{i}") for i in range(6))


def blank(count: int, slots: int) -> tuple[Member, ...]:
    return tuple(Member(w, NO_INCARNATION, (EMPTY,) * slots) for w in WORKERS[:count])


def grown(ranks: int) -> Topology:
    return Topology(Epoch(1), place_experts(blank(ranks, SHAPE.slots_per_rank), SHAPE))


@pytest.mark.parametrize(
    ("target", "limits", "slots", "says"),
    [
        (0, LIMITS, 6, "at least 1 rank"),
        (-1, LIMITS, 6, "at least 1 rank"),
        (1, LIMITS, 6, "hold 8 of 16 experts; ask for at least 2"),
        (3, LIMITS, 6, "multiples of 2"),
        (8, LIMITS, 8, "max_ranks is 6"),
        (6, LIMITS, 4, "only 4 GPU slots exist"),
        (2, ScaleLimits(4, 6), 6, "min_ranks is 4"),
    ],
)
def test_an_illegal_target_is_refused_with_its_reason(
    target: int, limits: ScaleLimits, slots: int, says: str
) -> None:
    assert says in (refusal(target, SHAPE, limits, slots) or "")
    with pytest.raises(TargetRefused, match="target"):
        check_target(target, SHAPE, limits, slots)


@pytest.mark.parametrize(("wanted", "got"), [(0, 2), (2, 2), (3, 2), (5, 4), (6, 6), (99, 6)])
def test_the_planners_wish_is_rounded_down_to_a_legal_width(wanted: int, got: int) -> None:
    assert legal_width(wanted, SHAPE, LIMITS, 6) == got


def test_no_legal_width_at_all_is_an_error() -> None:
    with pytest.raises(TargetRefused, match="no width is legal"):
        legal_width(4, SHAPE, LIMITS, 1)


@pytest.mark.parametrize(
    ("leaving", "stay"),
    [(None, "slot0 slot1"), ("slot0", "slot1 slot2"), ("slot2", "slot0 slot1")],
)
def test_who_is_named_leaves_first(leaving: str | None, stay: str) -> None:
    named = WorkerId(leaving) if leaving is not None else None
    plan = plan_scale(PlanInput(grown(4), 2, Epoch(2), SHAPE, leaving=named))
    assert " ".join(plan.after.worker_ids) == stay
    assert plan.after.missing_experts(SHAPE.num_experts) == ()


def test_who_is_named_stays_where_nobody_leaves() -> None:
    plan = plan_scale(PlanInput(grown(2), 4, Epoch(2), SHAPE, WORKERS, leaving=WORKERS[0]))
    assert plan.leavers == ()


def test_boot_places_every_expert() -> None:
    plan = plan_scale(PlanInput(Topology(Epoch(0)), 2, Epoch(1), SHAPE, WORKERS))
    assert plan.kind is Kind.BOOT
    assert plan.joiners == WORKERS[:2]
    assert plan.after.missing_experts(16) == ()


def test_up_leaves_experts_where_they_are_until_rebalance() -> None:
    before = grown(2)
    plan = plan_scale(PlanInput(before, 4, Epoch(2), SHAPE, WORKERS))
    assert plan.kind is Kind.UP
    assert plan.retained == WORKERS[:2]
    assert [m.experts for m in plan.after.members[:2]] == [m.experts for m in before.members]
    assert all(set(m.experts) == {EMPTY} for m in plan.after.members[2:])
    assert all(len(plan.settled.holders(e)) == 2 for e in range(16))


def test_down_takes_the_highest_ranks_and_keeps_every_expert() -> None:
    plan = plan_scale(PlanInput(grown(4), 2, Epoch(3), SHAPE))
    assert plan.kind is Kind.DOWN
    assert plan.leavers == WORKERS[2:4]
    assert plan.after.missing_experts(16) == ()
    assert plan.settled == plan.after


def test_lost_ranks_always_leave_and_the_others_close_up() -> None:
    lost = frozenset({WORKERS[1]})
    plan = plan_scale(PlanInput(grown(4), 2, Epoch(3), SHAPE, lost=lost))
    assert plan.after.worker_ids == (WORKERS[0], WORKERS[2])
    assert set(plan.leavers) == {WORKERS[1], WORKERS[3]}


def test_experts_lost_with_their_only_holder_come_from_disk() -> None:
    lost = frozenset({WORKERS[0], WORKERS[1]})
    before = grown(4)
    plan = plan_scale(PlanInput(before, 2, Epoch(2), SHAPE, lost=lost))
    assert plan.after.missing_experts(16) == ()
    living = replace(
        before,
        members=tuple(
            replace(m, experts=(EMPTY,) * 8) if m.worker_id in lost else m for m in before.members
        ),
    )
    unheld = living.missing_experts(16)
    moves = [move for step in move_rounds(living, plan.settled) for move in step.moves]
    assert unheld
    assert {m.expert for m in moves if m.from_worker == DISK} == set(unheld)


def test_joiners_take_the_place_of_lost_ranks_with_what_nobody_holds() -> None:
    before = grown(2)
    given = PlanInput(before, 2, Epoch(2), SHAPE, WORKERS, lost=frozenset({WORKERS[0]}))
    plan = plan_replacement(given)
    assert (plan.retained, plan.joiners, plan.loaders) == (WORKERS[1:2], WORKERS[2:3], WORKERS[2:3])
    assert plan.after.members[0] == before.members[1]
    assert plan.after.missing_experts(16) == ()


def test_too_few_candidates_take_nobodys_place() -> None:
    given = PlanInput(grown(2), 2, Epoch(2), SHAPE, WORKERS[:2], lost=frozenset({WORKERS[0]}))
    with pytest.raises(TargetRefused, match="1 ranks are lost and can't be spared, 0 slots"):
        plan_replacement(given)


@pytest.mark.parametrize(("target", "says"), [(4, "nothing to do"), (6, "2 joiners are needed")])
def test_plans_that_cannot_be_had(target: int, says: str) -> None:
    with pytest.raises(TargetRefused, match=says):
        plan_scale(PlanInput(grown(4), target, Epoch(2), SHAPE, WORKERS[:4]))


def test_a_worker_holds_one_rank() -> None:
    with pytest.raises(ValueError, match="two ranks"):
        Topology(Epoch(1), (Member(WORKERS[0], NO_INCARNATION), Member(WORKERS[0], NO_INCARNATION)))


widths = st.lists(st.integers(1, 6), min_size=1, max_size=6)


@given(st.integers(1, 20), st.integers(1, 12), widths)
def test_any_walk_of_widths_places_evenly_and_moves_safely(
    experts: int, slots: int, walk: list[int]
) -> None:
    shape = EngineShape(experts, slots)
    members: tuple[Member, ...] = ()
    for n in walk:
        if n * slots < experts:
            continue
        grown_to = members[:n] + blank(n, slots)[len(members[:n]) :]
        placed = place_experts(grown_to, shape)
        replicas = Counter(e for m in placed for e in m.experts if e != EMPTY)
        assert set(replicas) == set(range(experts))
        assert max(replicas.values()) - min(replicas.values()) <= 1
        assert sum(replicas.values()) == n * min(slots, experts)
        for m in placed:
            held = [e for e in m.experts if e != EMPTY]
            assert len(held) == len(set(held))
        assert place_experts(placed, shape) == placed
        if members:
            before = members if len(members) > n else grown_to
            check_rounds(Topology(Epoch(1), before), Topology(Epoch(1), placed), experts)
        members = placed


def check_rounds(before: Topology, after: Topology, num_experts: int) -> None:
    """Every round leaves each expert a holder that is not written, and the last one ends right."""
    current = before
    for step in move_rounds(before, after):
        assert step.routing.missing_experts(num_experts) == ()
        routed = {m.worker_id: m.experts for m in step.routing.members}
        for move in step.moves:
            assert move.expert in routed[move.from_worker]
            assert routed[move.to_worker][move.to_slot] == EMPTY
        current = step.result
    held = {m.worker_id: m.experts for m in current.members}
    assert all(held[m.worker_id] == m.experts for m in after.members)


def test_a_thousand_ranks_are_planned_and_levelled() -> None:
    shape = EngineShape(256, 8)
    slots = [WorkerId(f"slot{i}") for i in range(1000)]
    boot = plan_scale(PlanInput(Topology(Epoch(0)), 750, Epoch(1), shape, slots))
    up = plan_scale(PlanInput(boot.after, 1000, Epoch(2), shape, slots))
    assert up.joiners == tuple(slots[750:])
    replicas = Counter(e for m in up.settled.members for e in m.experts)
    assert max(replicas.values()) - min(replicas.values()) <= 1
    rounds = move_rounds(up.after, up.settled)
    assert rounds[-1].result.members == up.settled.members
