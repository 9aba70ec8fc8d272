"""The history checker: histories of a made-up control plane pass, and each planted violation of a
rule is found as a violation of that rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_elastic.coordinator.records import (
    CommandRecord,
    Keys,
    OperationRecord,
    OutcomeStatus,
    TargetOutcome,
    decode,
    encode,
)
from dynamo_elastic.phases import Phase, Step, phases_of
from dynamo_elastic.testing.chaos.checker import Rule, Windows, check, lost
from dynamo_elastic.testing.chaos.history import Answer, History, Seen, Write
from dynamo_elastic.topology import EngineShape, PlanInput, Topology, plan_scale
from dynamo_elastic.types import Epoch, FencingToken, OperationId, WorkerId

KEYS = Keys("test")
SHAPE = EngineShape(num_experts=4, slots_per_rank=4)
SLOTS = [WorkerId(f"slot{k}") for k in range(4)]
WINDOWS = Windows(two_topologies_s=2.0, silence_s=3.0)
PROMPT, TEXT = "river#7", "stone light maple"


@dataclass
class ControlPlane:
    """Writes what a right coordinator would, one transaction a revision."""

    writes: list[Write] = field(default_factory=list)
    revision: int = 0
    token: int = 0
    epoch: int = 0
    topology: Topology | None = None
    topology_revision: int = 0
    operation: OperationRecord | None = None
    committed: int = 0

    def put(self, **values: object) -> None:
        """One transaction, by the names of Keys; None deletes."""
        self.revision += 1
        for name, value in values.items():
            key = KEYS.command(SLOTS[0]) if name == "command" else getattr(KEYS, name)
            raw = None if value is None else value if isinstance(value, bytes) else encode(value)
            self.writes.append(Write(float(self.revision), self.revision, key, raw))

    def elect(self) -> None:
        if self.token:
            self.put(leader=None)
        self.put(leader=b"a coordinator")
        self.token = self.revision
        if self.operation is not None:
            self.save(self.operation.phase)

    def save(self, phase: Phase, **more: object) -> None:
        assert self.operation is not None
        self.operation = replace(self.operation, phase=phase, token=FencingToken(self.token))
        self.put(operation=self.operation, **more)

    def open(self, ranks: int) -> None:
        before = self.topology or Topology(Epoch(0))
        plan = plan_scale(PlanInput(before, ranks, Epoch(self.epoch + 1), SHAPE, SLOTS))
        self.epoch += 1
        self.operation = OperationRecord(
            OperationId(f"{plan.kind}-{self.epoch}"),
            plan.kind,
            plan,
            phases_of(plan.kind)[0],
            source="test",
            request_id="r",
            token=FencingToken(self.token),
            topology_revision=self.topology_revision,
            opened_at_s=0.0,
        )
        self.put(operation=self.operation, epoch=self.epoch)

    def step(self) -> None:
        """The next phase, with a command in it; or the end."""
        assert self.operation is not None
        order = phases_of(self.operation.kind)
        at = order.index(self.operation.phase) + 1
        if at == len(order):
            return self.close(Phase.DONE)
        if order[at] is Phase.COMMIT:
            self.topology = self.operation.plan.after
            self.save(Phase.COMMIT, topology=self.topology)
            self.topology_revision = self.revision
            self.committed += 1
        else:
            self.save(order[at])
        self.command(self.token)

    def command(self, token: int) -> None:
        assert self.operation is not None
        epoch, fencing = Epoch(self.epoch), FencingToken(token)
        operation_id = self.operation.operation_id
        self.put(command=CommandRecord(operation_id, epoch, fencing, 1, Step.OPEN, 1.0))

    def abort(self) -> None:
        self.save(Phase.ABORTING)
        self.close(Phase.ABORTED)

    def close(self, phase: Phase) -> None:
        assert self.operation is not None
        last = replace(self.operation, phase=phase, token=FencingToken(self.token))
        more: dict[str, object] = {}
        if phase is Phase.DONE:
            ranks = last.plan.after.world_size
            more["outcome"] = TargetOutcome("r", ranks, OutcomeStatus.REACHED)
        self.operation = None
        self.put(operation=None, last=last, **more)

    def scale(self, ranks: int, *, aborted: bool = False, elections: int = 0) -> None:
        """A whole operation, with new leaders on the way."""
        self.open(ranks)
        while self.operation is not None:
            if elections:
                self.elect()
                elections -= 1
            if aborted and self.operation.phase is not phases_of(self.operation.kind)[0]:
                return self.abort()
            self.step()


OPERATIONS = st.lists(
    st.tuples(st.integers(1, 4), st.booleans(), st.integers(0, 2)), min_size=1, max_size=6
)


def played(operations: list[tuple[int, bool, int]]) -> ControlPlane:
    plane = ControlPlane()
    plane.elect()
    plane.scale(2)
    for ranks, aborted, elections in operations:
        assert plane.topology is not None
        if ranks != plane.topology.world_size:
            plane.scale(ranks, aborted=aborted, elections=elections)
    return plane


def history(plane: ControlPlane, **more: Any) -> History:
    return History(KEYS.prefix, reference={PROMPT: TEXT}, writes=plane.writes, **more)


def rules(found: History) -> set[Rule]:
    return {violation.rule for violation in check(found, WINDOWS)}


@given(OPERATIONS)
@settings(max_examples=20, deadline=None)
def test_what_a_right_coordinator_writes_is_right(operations: list[tuple[int, bool, int]]) -> None:
    assert rules(history(played(operations))) == set()


@given(OPERATIONS, st.data())
@settings(max_examples=15, deadline=None)
def test_a_history_may_begin_anywhere(
    operations: list[tuple[int, bool, int]], data: st.DataObject
) -> None:
    plane = played(operations)
    cut = data.draw(st.integers(0, plane.revision))
    stored = {w.key: w for w in plane.writes if w.revision <= cut}
    later = history(plane)
    later.before = sorted(stored.values(), key=lambda w: w.revision)
    later.writes = [w for w in plane.writes if w.revision > cut]
    assert rules(later) == set()


def rewrite(plane: ControlPlane, key: str, nth: int, change: Callable[[Any], Any]) -> None:
    """Change the record in the `nth` (modulo) put of `key`."""
    places = [i for i, w in enumerate(plane.writes) if w.key == key and w.value is not None]
    at = places[nth % len(places)]
    write = plane.writes[at]
    kinds = {KEYS.topology: Topology, KEYS.operation: OperationRecord, KEYS.last: OperationRecord}
    value = encode(change(decode(kinds.get(key, CommandRecord), write.value or b"")))
    plane.writes[at] = msgspec.structs.replace(write, value=value)


def stale(record: Any) -> Any:
    return replace(record, token=FencingToken(record.token - 1))


def stale_operation(plane: ControlPlane, nth: int) -> None:
    rewrite(plane, KEYS.operation, nth, stale)


def stale_command(plane: ControlPlane, nth: int) -> None:
    rewrite(plane, KEYS.command(SLOTS[0]), nth, stale)


def stale_end(plane: ControlPlane, nth: int) -> None:
    rewrite(plane, KEYS.last, nth, stale)


def no_leader(plane: ControlPlane, nth: int) -> None:
    plane.put(leader=None)
    plane.put(notice="somebody writes all the same")


def other_topology(plane: ControlPlane, nth: int) -> None:
    def shorter(topology: Topology) -> Topology:
        return replace(topology, members=topology.members[:-1])

    rewrite(plane, KEYS.topology, nth, shorter)


def topology_by_hand(plane: ControlPlane, nth: int) -> None:
    assert plane.topology is not None
    plane.put(topology=replace(plane.topology, epoch=Epoch(plane.epoch + 1)))


def topology_before_commit(plane: ControlPlane, nth: int) -> None:
    width = plane.topology.world_size if plane.topology else 0
    plane.open(2 if width != 2 else 3)
    assert plane.operation is not None
    plane.save(plane.operation.phase, topology=plane.operation.plan.after)


def planned_from_another(plane: ControlPlane, nth: int) -> None:
    plane.topology_revision -= 1
    width = plane.topology.world_size if plane.topology else 0
    plane.scale(2 if width != 2 else 3)


def members_changed_inside(plane: ControlPlane, nth: int) -> None:
    assert plane.topology is not None
    plane.put(topology=replace(plane.topology, members=plane.topology.members[:-1]))


def epoch_again(plane: ControlPlane, nth: int) -> None:
    plane.epoch -= 1
    width = plane.topology.world_size if plane.topology else 0
    plane.open(2 if width != 2 else 3)


def epoch_falls(plane: ControlPlane, nth: int) -> None:
    plane.put(epoch=plane.epoch - 1)


def second_operation(plane: ControlPlane, nth: int) -> None:
    width = plane.topology.world_size if plane.topology else 0
    for _ in range(2):
        plane.open(2 if width != 2 else 3)


def phase_skipped(plane: ControlPlane, nth: int) -> None:
    width = plane.topology.world_size if plane.topology else 0
    plane.open(2 if width != 2 else 3)
    plane.save(Phase.COMMIT)


def aborted_after_commit(plane: ControlPlane, nth: int) -> None:
    width = plane.topology.world_size if plane.topology else 0
    plane.open(2 if width != 2 else 3)
    committed = plane.committed
    while plane.committed == committed:
        plane.step()
    plane.abort()


def ended_unfinished(plane: ControlPlane, nth: int) -> None:
    width = plane.topology.world_size if plane.topology else 0
    plane.open(2 if width != 2 else 3)
    plane.close(Phase.DONE)


def told_of_a_width_that_was_not_made(plane: ControlPlane, nth: int) -> None:
    rewrite_outcome = TargetOutcome("r", 9, OutcomeStatus.REACHED)
    at = max(i for i, w in enumerate(plane.writes) if w.key == KEYS.outcome)
    plane.writes[at] = msgspec.structs.replace(plane.writes[at], value=encode(rewrite_outcome))


def unreadable(plane: ControlPlane, nth: int) -> None:
    plane.put(topology=b"no record")


PLANTED = [
    (stale_operation, Rule.STALE_TOKEN),
    (stale_command, Rule.STALE_TOKEN),
    (stale_end, Rule.STALE_TOKEN),
    (no_leader, Rule.STALE_TOKEN),
    (other_topology, Rule.TOPOLOGY),
    (topology_by_hand, Rule.TOPOLOGY),
    (topology_before_commit, Rule.TOPOLOGY),
    (planned_from_another, Rule.TOPOLOGY),
    (members_changed_inside, Rule.TOPOLOGY),
    (told_of_a_width_that_was_not_made, Rule.TOPOLOGY),
    (epoch_again, Rule.EPOCH),
    (epoch_falls, Rule.EPOCH),
    (second_operation, Rule.ONE_OPERATION),
    (phase_skipped, Rule.ONE_OPERATION),
    (aborted_after_commit, Rule.ONE_OPERATION),
    (ended_unfinished, Rule.ONE_OPERATION),
    (unreadable, Rule.RECORD),
]


@pytest.mark.parametrize(("plant", "rule"), PLANTED, ids=[p.__name__ for p, _ in PLANTED])
@given(operations=OPERATIONS, nth=st.integers(0, 1000))
@settings(max_examples=6, deadline=None)
def test_a_planted_violation_is_found(
    plant: Callable[[ControlPlane, int], None],
    rule: Rule,
    operations: list[tuple[int, bool, int]],
    nth: int,
) -> None:
    plane = played(operations)
    plant(plane, nth)
    assert rule in rules(history(plane))


def seen(round_: int, epochs: dict[str, int], at_s: float) -> list[Seen]:
    return [Seen(at_s, round_, w, f"{w}-life", True, e) for w, e in epochs.items()]


@given(st.integers(1, 40), st.floats(0.1, 1.0))
@settings(deadline=None)
def test_two_topologies_may_serve_for_the_commit_window_and_no_longer(
    rounds: int, every_s: float
) -> None:
    plane = played([(3, False, 0)])
    both = [s for n in range(rounds) for s in seen(n, {"slot0": 1, "slot1": 2}, n * every_s)]
    after = seen(rounds, {"slot0": 2, "slot1": 2}, rounds * every_s)
    found = rules(history(plane, seen=both + after))
    assert (Rule.ONE_TOPOLOGY in found) == ((rounds - 1) * every_s > WINDOWS.two_topologies_s)


def test_two_short_switches_are_not_one_long_one() -> None:
    plane = played([(3, False, 0)])
    both = {"slot0": 1, "slot1": 2}
    said = [*seen(0, both, 0.0), *seen(1, {"slot0": 1}, 1.5), *seen(2, both, 3.0)]
    assert rules(history(plane, seen=said)) == set()


def test_an_epoch_that_was_never_decided_is_not_served() -> None:
    plane = played([(3, True, 0)])
    assert rules(history(plane, seen=seen(0, {"slot0": 2}, 0.0))) == {Rule.TOPOLOGY}


@pytest.mark.parametrize(("epoch", "found"), [(1, set()), (2, set()), (3, {Rule.TOPOLOGY})])
def test_a_rank_may_be_late_by_more_than_a_history_knows(epoch: int, found: set[Rule]) -> None:
    """Run 704: of the epochs before a history only the last is stored."""
    plane = played([(3, False, 0)])
    newest = [w for w in plane.writes if w.key == KEYS.topology][-1:]
    late = History(KEYS.prefix, before=newest, seen=seen(0, {"slot0": epoch}, 0.0))
    assert rules(late) == found


def test_nobody_is_there_while_a_group_boots() -> None:
    """Run 550: Dynamo's frontend answers 404 then. At any other time such a request is lost."""
    plane = played([(3, False, 0)])
    first, last = [w.at_s for w in plane.writes if w.key == KEYS.operation and not w.value][:2]
    refused = [
        Answer(started_s, started_s, PROMPT, "", "HTTP 404: Model not found", [])
        for started_s in (first, first + 1.0, last)
    ]
    found = check(history(plane, answers=refused), WINDOWS)
    assert [violation.rule for violation in found] == [Rule.LOST]
    assert lost(history(plane, answers=refused)) == 1


def answer(text: str = TEXT, error: str = "", tokens_s: tuple[float, ...] = (0.0,)) -> Answer:
    return Answer(0.0, 1.0, PROMPT, text, error, list(tokens_s))


@pytest.mark.parametrize(
    ("given_answer", "found"),
    [
        (answer(), set()),
        (answer("stone", "HTTP 503: busy"), set()),
        (answer("", "retry: experts were lost"), set()),
        (answer("stone", "connection reset"), {Rule.LOST}),
        (answer("stane", "HTTP 503: busy"), {Rule.TOKENS}),
        (answer("stone light"), {Rule.TOKENS}),
        (answer(TEXT + " x"), {Rule.TOKENS}),
    ],
)
def test_answers_are_right_or_may_be_asked_again(given_answer: Answer, found: set[Rule]) -> None:
    assert rules(history(ControlPlane(), answers=[given_answer])) == found


@given(st.lists(st.floats(0.0, 30.0), min_size=2, max_size=8))
def test_silence_is_that_of_all_clients_together(times: list[float]) -> None:
    half = len(times) // 2
    answers = [answer(tokens_s=tuple(sorted(part))) for part in (times[:half], times[half:])]
    ordered = sorted(times)
    longest_s = max(b - a for a, b in pairwise(ordered))
    expected = {Rule.SILENCE} if longest_s > WINDOWS.silence_s else set()
    assert rules(history(ControlPlane(), answers=answers)) == expected


def test_a_history_can_be_kept(tmp_path: Path) -> None:
    kept = history(played([(3, False, 1)]), seen=seen(0, {"slot0": 1}, 0.0), answers=[answer()])
    kept.save(tmp_path / "history.json")
    assert History.load(tmp_path / "history.json") == kept
