"""Epochs of a replica: what may be opened, decided and aborted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_elastic.engine.vllm.epochs import Membership, ReplicaEpochs
from dynamo_elastic.errors import EngineError
from dynamo_elastic.types import Epoch, Rank


def member(epoch: int) -> Membership:
    return Membership(Epoch(epoch), Rank(0), 1)


def test_an_epoch_is_opened_decided_and_in_force() -> None:
    epochs = ReplicaEpochs()
    epochs.open(member(3))
    epochs.open(member(3))
    with pytest.raises(EngineError, match="not decided"):
        epochs.check_in_force(Epoch(3))
    epochs.decide(Epoch(3))
    epochs.decide(Epoch(3))
    epochs.check_in_force(Epoch(3))
    epochs.open(member(3))
    assert (epochs.current, epochs.pending) == (member(3), None)


def test_what_was_never_opened_is_not_decided() -> None:
    with pytest.raises(EngineError, match="not open"):
        ReplicaEpochs().decide(Epoch(1))


def test_an_epoch_in_force_is_not_aborted_and_none_below_it_is_opened() -> None:
    epochs = ReplicaEpochs()
    epochs.open(member(3))
    epochs.decide(Epoch(3))
    with pytest.raises(EngineError, match="is in force"):
        epochs.abort(Epoch(3))
    with pytest.raises(EngineError, match="3 is in force"):
        epochs.open(member(2))
    with pytest.raises(EngineError, match="3 is in force"):
        epochs.open(Membership(Epoch(3), Rank(1), 2))


def test_an_aborted_epoch_is_over_for_good() -> None:
    epochs = ReplicaEpochs()
    epochs.abort(Epoch(4))
    for over in (3, 4):
        with pytest.raises(EngineError, match="is over"):
            epochs.open(member(over))
    epochs.open(member(5))
    epochs.abort(Epoch(5))
    assert epochs.pending is None
    with pytest.raises(EngineError, match="not open"):
        epochs.decide(Epoch(5))


ACTS = st.lists(
    st.tuples(st.sampled_from(["open", "decide", "abort"]), st.integers(1, 6)), max_size=30
)


@given(ACTS)
def test_the_epoch_in_force_never_goes_back(acts: list[tuple[str, int]]) -> None:
    epochs = ReplicaEpochs()
    highest = 0
    for act, epoch in acts:
        try:
            if act == "open":
                epochs.open(member(epoch))
            elif act == "decide":
                epochs.decide(Epoch(epoch))
            else:
                epochs.abort(Epoch(epoch))
        except EngineError:
            continue
        current = epochs.current.epoch if epochs.current else 0
        assert current >= highest
        highest = current
        assert epochs.pending is None or epochs.pending.epoch > current
