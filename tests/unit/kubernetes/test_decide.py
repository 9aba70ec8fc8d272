"""Pods before ranks on the way up, ranks before pods on the way down; never a pod in use."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dynamo_elastic.coordinator.records import EarlierTarget, TargetRecord
from dynamo_elastic.kubernetes.base import Role
from dynamo_elastic.kubernetes.decide import (
    Correct,
    CreatePod,
    DeletePod,
    Request,
    SetRole,
    View,
    engaged,
)
from dynamo_elastic.testing.pod_world import LIMITS, SCALE, SHAPE, World
from dynamo_elastic.topology import refusal


def slots(world: World) -> list[int]:
    return [p.slot for p in world.cluster.view().pods]


def serving(ranks: int) -> World:
    world = World(ranks)
    world.settle()
    assert world.status.width == ranks
    return world


def test_up_pods_come_first_and_the_target_when_their_workers_are_there() -> None:
    world = serving(2)
    world.cluster.wish(4)
    assert world.round() == (CreatePod(2), CreatePod(3))
    assert world.round() == ()
    world.start(world.cluster.view().pods[2])
    assert world.round() == (), "one worker of two is there"
    world.start(world.cluster.view().pods[3])
    (request,) = world.round()
    assert isinstance(request, Request)
    assert request.ranks == 4


def test_down_the_target_comes_first_and_exactly_the_leavers_pods_go_after_it() -> None:
    world = serving(4)
    world.cluster.wish(2)
    (request,) = world.round()
    assert isinstance(request, Request)
    while world.coordinate():
        outcome, last = world.status.outcome, world.status.last
        over = world.status.operation is None
        done = over and outcome is not None and outcome.request_id == request.request_id
        acts = world.round()
        assert done or acts == (), "nothing goes before the operation is over"
    assert last is not None
    leavers = set(last.plan.leavers)
    released = {p.worker_id for p in world.cluster.view().pods if p.role is Role.RELEASED}
    assert released == leavers
    deletions = world.round()
    assert {a.pod.worker_id for a in deletions if isinstance(a, DeletePod)} == leavers
    world.settle()
    assert len(slots(world)) == world.status.width == 2


def test_the_pod_that_goes_is_that_of_who_left_not_the_last_one() -> None:
    world = serving(4)
    lost = world.cluster.view().pods[1]
    world.crash(lost.worker_id)
    world.cluster.update(lost, deleting=True)
    world.settle()
    world.cluster.wish(3)
    world.settle()
    world.cluster.wish(4)
    world.settle()
    topology = world.status.topology
    assert topology is not None
    ranks = [int(w.removeprefix("slot")) for w in topology.worker_ids]
    assert ranks[-1] < max(ranks), "the highest rank is not in the last slot"
    world.cluster.wish(3)
    world.settle()
    assert slots(world) == sorted(ranks[:-1])


def test_a_lost_rank_is_replaced_and_the_wish_stays() -> None:
    world = serving(4)
    world.crash(world.cluster.view().pods[1].worker_id)
    world.cluster.update(world.cluster.view().pods[1], deleting=True)
    assert CreatePod(4) in world.round(), "the node is gone; a pod elsewhere takes its place"
    world.settle()
    assert world.cluster.graph.replicas == world.status.width == 4


def test_a_lost_rank_that_no_pod_can_replace_is_a_fault_and_the_wish_stays() -> None:
    world = serving(4)
    pod = world.cluster.view().pods[1]
    world.crash(pod.worker_id)
    world.cluster.update(pod, failed=True)
    for _ in range(40):
        world.now_s += 10
        actions = world.round()
        assert not any(isinstance(a, Correct) for a in actions)
        world.coordinate()
        for gone in [p for p in world.cluster.view().pods if p.deleting]:
            world.end(gone)
    assert world.cluster.graph.replicas == 4
    assert world.status.width == 3


def test_all_ranks_lost_there_are_pods_enough_to_boot_anew() -> None:
    world = serving(1)
    assert slots(world) == [0], f"it boots with {SCALE.initial_ranks}"
    world.crash(world.cluster.view().pods[0].worker_id)
    world.settle()
    assert (world.status.width, len(slots(world))) == (1, 1)


def test_pods_that_never_come_up_lower_the_wish_and_are_removed() -> None:
    world = serving(2)
    world.cluster.wish(4)
    world.settle(broken=frozenset({2, 3, 4}))
    assert world.cluster.graph.replicas == world.status.width == 2
    assert slots(world) == [0, 1]


def test_half_of_what_was_wanted_is_taken_when_the_rest_never_comes() -> None:
    world = serving(2)
    world.cluster.wish(4)
    world.settle(broken=frozenset({3, 4}))
    assert world.cluster.graph.replicas == world.status.width == 3
    assert len(slots(world)) == 3


def test_an_illegal_wish_is_made_legal_where_it_was_written() -> None:
    even = replace(LIMITS, scale=SCALE.model_copy(update={"multiple_of": 2, "min_ranks": 2}))
    world = World(2, even)
    world.settle()
    world.cluster.wish(3)
    (correct,) = world.round()
    assert isinstance(correct, Correct)
    assert (correct.replicas, world.cluster.graph.replicas) == (2, 2)


def test_a_newer_target_by_hand_becomes_the_wish() -> None:
    world = serving(4)
    before = world.status.target
    assert before is not None
    earlier = EarlierTarget(before.request_id, before.ranks, before.source, 0.0)
    by_hand = TargetRecord("by-hand", 3, "cli", world.now_s, supersedes=(earlier,))
    world.status = replace(world.status, target=by_hand)
    (correct,) = (a for a in world.round() if isinstance(a, Correct))
    assert "cli" in correct.why
    world.settle()
    assert (world.cluster.graph.replicas, world.status.width, len(slots(world))) == (3, 3, 3)


def test_a_stopped_controllers_deletion_fails_once_the_pod_is_needed_again() -> None:
    world = serving(4)
    world.cluster.wish(2)
    while not any(p.role is Role.RELEASED for p in world.cluster.view().pods):
        world.round()
        world.coordinate()
    stopped = world.view()
    world.cluster.wish(4)
    assert all(isinstance(a, SetRole) for a in world.round()), "taken back before anything else"
    while world.status.width < 4:
        world.round()
        world.coordinate()
    world.round(stopped)
    assert not any(p.deleting for p in world.cluster.view().pods)


def test_nothing_is_done_for_a_graph_that_is_being_deleted() -> None:
    world = serving(2)
    world.cluster.graph = replace(world.cluster.graph, deleting=True, replicas=4)
    assert world.round() == ()


@pytest.mark.parametrize("wish", range(7))
def test_two_controllers_with_one_view_do_no_more_than_one(wish: int) -> None:
    world = World(wish)
    for _ in range(30):
        view = world.view()
        world.round(view)
        once = world.cluster.view().pods
        world.round(view)
        again = world.cluster.view().pods
        assert [(p.name, p.uid) for p in again] == [(p.name, p.uid) for p in once]
        for pod in again:
            world.start(pod)
        world.coordinate()
    assert world.status.width == world.view().desired


class Misfortune(RuleBasedStateMachine):
    """Anything in any order; World raises ActiveRankDeleted if a pod in use is deleted."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(2)
        self.stopped: View | None = None

    @rule(ranks=st.integers(0, 7))
    def wish(self, ranks: int) -> None:
        self.world.cluster.wish(ranks)

    @rule()
    def control(self) -> None:
        self.world.round()

    @rule()
    def stop_a_controller(self) -> None:
        self.stopped = self.world.view()

    @precondition(lambda self: self.stopped is not None)
    @rule()
    def a_stopped_one_goes_on(self) -> None:
        """What it had decided is done now. A deletion may come so late only if the pod has not
        changed: whoever gave its worker work in between has taken the pod back first."""
        self.world.round(self.stopped)
        self.stopped = None

    @rule(count=st.integers(1, 3))
    def coordinate(self, count: int) -> None:
        for _ in range(count):
            self.world.coordinate()

    @rule(turns=st.integers(1, 8))
    def everybody(self, turns: int) -> None:
        for _ in range(turns):
            self.world.turn()

    @rule(which=st.integers(0, 4))
    def start(self, which: int) -> None:
        for pod in self.world.cluster.view().pods[which : which + 1]:
            self.world.start(pod)

    @rule(which=st.integers(0, 4))
    def crash(self, which: int) -> None:
        for pod in self.world.cluster.view().pods[which : which + 1]:
            self.world.crash(pod.worker_id)

    @rule(which=st.integers(0, 4))
    def fail(self, which: int) -> None:
        for pod in self.world.cluster.view().pods[which : which + 1]:
            self.world.crash(pod.worker_id)
            self.world.cluster.update(pod, failed=True)

    @rule(which=st.integers(0, 4))
    def drain_by_hand(self, which: int) -> None:
        for pod in self.world.cluster.view().pods[which : which + 1]:
            self.world.cluster.update(pod, deleting=True)

    @rule()
    def pods_end(self) -> None:
        for pod in [p for p in self.world.cluster.view().pods if p.deleting]:
            self.world.end(pod)

    @rule(seconds=st.floats(1, 40))
    def time_passes(self, seconds: float) -> None:
        self.world.now_s += seconds

    @invariant()
    def no_slot_has_two_pods(self) -> None:
        held = slots(self.world)
        assert len(held) == len(set(held))

    def teardown(self) -> None:
        """Left alone, it comes to rest where the wish says."""
        self.world.settle()
        world = self.world
        assert world.status.width == world.view().desired == world.cluster.graph.replicas
        assert refusal(world.status.width, SHAPE, SCALE.limits, SCALE.max_ranks) is None
        assert {p.worker_id for p in world.cluster.view().pods} == set(engaged(world.status))
        assert all(p.role is Role.HELD for p in world.cluster.view().pods)


TestMisfortune = Misfortune.TestCase
TestMisfortune.settings = settings(max_examples=50, stateful_step_count=25, deadline=None)
