"""The phase table: order, what may follow what, and where there is no way back."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_elastic.errors import IllegalTransition
from dynamo_elastic.phases import PHASES, Kind, Phase, Step, check_move, committed, phases_of

kinds = st.sampled_from(list(Kind))


@pytest.mark.parametrize("kind", list(Kind))
def test_the_way_through_the_table_is_legal(kind: Kind) -> None:
    for before, after in pairwise([*phases_of(kind), Phase.DONE]):
        check_move(kind, before, after)


@given(kinds, st.sampled_from(list(Phase)), st.sampled_from(list(Phase)))
def test_nothing_is_undone_after_the_commit(kind: Kind, before: Phase, after: Phase) -> None:
    order = phases_of(kind)
    if before not in order or after not in (Phase.ABORTING, Phase.ABORTED):
        return
    if committed(kind, before) or after is Phase.ABORTED:
        with pytest.raises(IllegalTransition):
            check_move(kind, before, after)
    else:
        check_move(kind, before, after)


@given(kinds, st.sampled_from([Phase.DONE, Phase.ABORTED]), st.sampled_from(list(Phase)))
def test_terminal_phases_are_terminal(kind: Kind, before: Phase, after: Phase) -> None:
    with pytest.raises(IllegalTransition):
        check_move(kind, before, after)


def test_no_phase_is_skipped() -> None:
    with pytest.raises(IllegalTransition, match="restore to stream"):
        check_move(Kind.UP, Phase.RESTORE, Phase.STREAM)


@pytest.mark.parametrize("kind", list(Kind))
def test_only_the_commit_switches(kind: Kind) -> None:
    switching = [p.phase for p in PHASES[kind] for step, _ in p.steps if step is Step.SWITCH]
    assert switching == ([] if kind is Kind.REBALANCE else [Phase.COMMIT])
