from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_elastic.comm.expert_rules import (
    HIDDEN_SIZES,
    MOVES,
    BufferShape,
    PeerBook,
    PeerState,
    check_shape,
)
from dynamo_elastic.errors import BufferMisused, ConfigError
from dynamo_elastic.types import Rank

SHAPE = BufferShape(capacity=4, experts_per_rank=2, hidden=2048, top_k=2, max_tokens=8)
PEERS = [Rank(1), Rank(2), Rank(3)]


@given(
    capacity=st.integers(-1, 40),
    hidden=st.sampled_from([*HIDDEN_SIZES, 1024, 2047]),
    top_k=st.integers(-1, 14),
    tokens=st.integers(-1, 20),
)
def test_what_is_accepted_is_what_nixl_ep_can_build(
    capacity: int, hidden: int, top_k: int, tokens: int
) -> None:
    shape = BufferShape(capacity, 4, hidden, top_k, tokens)
    fits = (
        (1 <= capacity <= 7 or (capacity > 0 and capacity % 8 == 0))
        and hidden in HIDDEN_SIZES
        and 1 <= top_k <= 11
        and top_k <= 4 * capacity
        and tokens > 0
        and capacity * tokens % 4 == 0
    )
    if fits:
        check_shape(shape, Rank(0))
    else:
        with pytest.raises(ConfigError):
            check_shape(shape, Rank(0))


@given(st.data())
def test_a_peer_only_makes_moves_of_the_table(data: st.DataObject) -> None:
    book = PeerBook(SHAPE, Rank(0))
    for _ in range(data.draw(st.integers(1, 25))):
        rank = data.draw(st.sampled_from(PEERS))
        after = data.draw(st.sampled_from(PeerState))
        before = book.states
        if after in MOVES[before[rank]]:
            book.move([rank], after)
            assert book.states == {**before, rank: after}
        else:
            with pytest.raises(BufferMisused):
                book.move([rank], after)
            assert book.states == before


def test_all_ranks_of_a_call_move_or_none() -> None:
    book = PeerBook(SHAPE, Rank(0))
    book.connecting({Rank(1): b"1"})
    with pytest.raises(BufferMisused):
        book.move([Rank(1), Rank(2)], PeerState.CONNECTED)
    assert book.states[Rank(1)] == "connecting"


@given(halves=st.lists(st.booleans(), max_size=20))
def test_switches_are_allowed_between_whole_layers_only(halves: list[bool]) -> None:
    book = PeerBook(SHAPE, Rank(0))
    book.connecting({Rank(1): b"1"})
    book.move([Rank(1)], PeerState.CONNECTED)
    open_layers = 0
    for dispatch in halves:
        if dispatch:
            book.dispatching()
            open_layers += 1
        elif open_layers:
            book.combining()
            open_layers -= 1
        else:
            with pytest.raises(BufferMisused, match="without a dispatch"):
                book.combining()
    if open_layers:
        with pytest.raises(BufferMisused, match="between dispatch and combine"):
            book.switching([Rank(1)], PeerState.ACTIVE, "activate")
        assert book.states[Rank(1)] == "connected"
    else:
        assert book.parity == 0
        book.switching([Rank(1)], PeerState.ACTIVE, "activate")


def test_connecting_goes_on_beside_a_step() -> None:
    book = PeerBook(SHAPE, Rank(0))
    book.dispatching()
    book.connecting({Rank(1): b"1"})
    book.move([Rank(1)], PeerState.CONNECTED)
    with pytest.raises(BufferMisused, match="between dispatch and combine"):
        book.switching([Rank(1)], PeerState.ACTIVE, "activate")


def test_every_rank_that_was_connected_must_let_go() -> None:
    book = PeerBook(SHAPE, Rank(0))
    book.connecting({Rank(1): b"1", Rank(2): b"2"})
    book.move([Rank(1), Rank(2)], PeerState.CONNECTED)
    book.switching([Rank(1)], PeerState.ABSENT, "disconnect")
    with pytest.raises(BufferMisused, match=r"\[1\]"):
        book.destroying([Rank(2)])
    book.destroying([Rank(1), Rank(2)])
    with pytest.raises(BufferMisused, match="destroyed"):
        book.dispatching()
