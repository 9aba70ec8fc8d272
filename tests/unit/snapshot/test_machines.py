"""The two state machines: their tables, and how a track walks them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_elastic.errors import IllegalTransition
from dynamo_elastic.snapshot.base import (
    RESTORE_MOVES,
    TAKE_MOVES,
    RestorePhase,
    TakePhase,
    Track,
    first_pid,
)

MACHINES: list[Any] = [(TAKE_MOVES, TakePhase), (RESTORE_MOVES, RestorePhase)]


@pytest.mark.parametrize(("moves", "phases"), MACHINES)
def test_every_phase_has_a_row_and_only_ends_are_final(moves: Any, phases: Any) -> None:
    assert set(moves) == set(phases)
    final = {phase for phase, after in moves.items() if not after}
    assert final == {phases.DONE, phases.FAILED}
    assert all(phases.FAILED in after for phase, after in moves.items() if phase not in final)


def test_track_times_and_tells_each_phase() -> None:
    told: list[TakePhase] = []
    now = [0.0]
    track = Track(TAKE_MOVES, TakePhase.START, told.append, lambda: now[0])
    now[0] = 1.0
    track.to(TakePhase.BOOT)
    now[0] = 4.0
    track.to(TakePhase.INSPECT)
    now[0] = 4.5
    assert told == [TakePhase.BOOT, TakePhase.INSPECT]
    assert track.timings_s() == {"start": 1.0, "boot": 3.0, "inspect": 0.5}


@given(st.lists(st.sampled_from(list(RestorePhase)), max_size=8))
def test_track_allows_exactly_the_table(walk: list[RestorePhase]) -> None:
    track = Track(RESTORE_MOVES, RestorePhase.START)
    for phase in walk:
        before = track.phase
        if phase in RESTORE_MOVES[before]:
            track.to(phase)
            assert track.phase is phase
        else:
            with pytest.raises(IllegalTransition):
                track.to(phase)
            assert track.phase is before


def test_pid_ranges_of_slots_are_apart() -> None:
    starts = [first_pid(slot) for slot in range(30)]
    assert starts[0] > 300  # pids that the kernel keeps back after it wrapped around
    assert all(b - a == 1000 for a, b in itertools.pairwise(starts))
