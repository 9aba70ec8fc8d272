"""An operation that fails before its commit is undone, whatever it raises; after it, it is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_elastic.engine.vllm.elastic.guard import MOVES, OVER, Guard, Stage
from dynamo_elastic.engine.vllm.elastic.meeting import GivenUp
from dynamo_elastic.errors import IllegalTransition


class Machine:
    """Goes to ready, and on to complete once a commit is asked for, as vLLM's does."""

    def __init__(self, worker_type: str = "existing") -> None:
        self.worker_type = worker_type
        self.commit_requested = False
        self.ready = self.complete = False

    def progress(self) -> bool:
        if not self.ready:
            self.ready = True
        elif self.commit_requested:
            self.complete = True
        return True

    def is_complete(self) -> bool:
        return self.complete

    def is_ready_for_switch(self) -> bool:
        return self.ready and not self.complete


class Rank:
    def __init__(self) -> None:
        self.undone: list[str] = []
        self.told: str | None = None

    def failure(self) -> str | None:
        return self.told

    def undo(self, reason: str) -> None:
        self.undone.append(reason)


def fails(error: Exception) -> Callable[[], bool]:
    def step() -> bool:
        raise error

    return step


def guard(machine: Machine, rank: Rank, *, parks: bool = False) -> Guard:
    return Guard(machine, rank, parks=parks)


def test_a_good_operation_goes_through_all_stages() -> None:
    machine, rank = Machine(), Rank()
    guarded = guard(machine, rank)
    stages = [guarded.stage]
    guarded.progress(machine.progress)
    stages.append(guarded.stage)
    machine.commit_requested = True

    def commit() -> bool:
        guarded.commit()
        return machine.progress()

    guarded.progress(commit)
    assert [*stages, guarded.stage] == [Stage.PREPARING, Stage.READY, Stage.DONE]
    assert rank.undone == []


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (GivenUp("joiner 2 never came"), "joiner 2 never came"),
        (RuntimeError("wait timeout after 300000ms"), "RuntimeError"),
        (AssertionError(), "AssertionError"),
    ],
)
def test_what_fails_before_the_commit_is_undone(error: Exception, reason: str) -> None:
    machine, rank = Machine(), Rank()
    guarded = guard(machine, rank)
    assert guarded.progress(fails(error))
    assert guarded.stage is Stage.GIVEN_UP
    assert reason in guarded.reason
    assert len(rank.undone) == 1
    guarded.progress(fails(error))
    assert len(rank.undone) == 1


def test_what_fails_after_the_commit_is_raised() -> None:
    machine, rank = Machine(), Rank()
    guarded = guard(machine, rank)
    guarded.commit()
    with pytest.raises(RuntimeError, match="lost"):
        guarded.progress(fails(RuntimeError("lost")))
    assert rank.undone == []
    assert guarded.give_up("too late") is Stage.COMMITTED


def test_a_failure_of_another_rank_is_seen_before_the_step() -> None:
    machine, rank = Machine(), Rank()
    rank.told = "rank 1 ran out of memory"
    guarded = guard(machine, rank)
    guarded.progress(machine.progress)
    assert guarded.reason == "rank 1 ran out of memory"
    assert not machine.ready


def test_an_operation_that_is_ready_can_be_given_up_by_a_call() -> None:
    machine, rank = Machine(), Rank()
    guarded = guard(machine, rank)
    guarded.progress(machine.progress)
    assert guarded.give_up("the target changed") is Stage.GIVEN_UP
    assert guarded.give_up("again") is Stage.GIVEN_UP
    assert rank.undone == ["the target changed"]


@pytest.mark.parametrize(("parks", "stage"), [(True, Stage.LEFT), (False, Stage.DONE)])
def test_who_leaves_lives_on_only_if_it_parks(parks: bool, stage: Stage) -> None:
    machine = Machine("removing")
    machine.complete = True
    guarded = guard(machine, Rank(), parks=parks)
    guarded.commit()
    guarded.progress(lambda: True)
    assert guarded.stage is stage


@given(st.lists(st.sampled_from(list(Stage))))
def test_only_moves_of_the_table_are_made(stages: list[Stage]) -> None:
    guarded = guard(Machine(), Rank())
    for stage in stages:
        before = guarded.stage
        if stage in MOVES[before]:
            guarded.move(stage)
            assert guarded.stage is stage
        else:
            with pytest.raises(IllegalTransition):
                guarded.move(stage)
            assert guarded.stage is before


def test_the_table_ends_where_nothing_is_left_to_do() -> None:
    assert {stage for stage, moves in MOVES.items() if not moves} == OVER
    assert Stage.GIVEN_UP not in MOVES[Stage.COMMITTED]
