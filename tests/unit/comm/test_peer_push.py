"""Copies of a push: neighbours are one copy, and nothing else changes."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from dynamo_elastic.comm.base import Span
from dynamo_elastic.comm.peer_push import joined

Copies = list[tuple[int, int, int]]


def moved(pairs: list[tuple[Span, Span]]) -> list[tuple[int, int]]:
    """Byte by byte, in order."""
    return [
        (source.address + i, target.address + i)
        for source, target in pairs
        for i in range(source.size_bytes)
    ]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 4)), max_size=12))
def test_the_same_bytes_go_to_the_same_places(copies: Copies) -> None:
    pairs = [(Span(a, n, 1), Span(100 + b, n, 1)) for a, b, n in copies]
    whole = joined(pairs)
    assert moved(whole) == moved(pairs)
    for (s, t), (s_next, t_next) in itertools.pairwise(whole):
        ends = s.address + s.size_bytes, t.address + t.size_bytes
        assert ends != (s_next.address, t_next.address)


def test_neighbours_are_one_copy() -> None:
    pairs = [(Span(8 * i, 8, 2), Span(1000 + 8 * i, 8, 2)) for i in range(50)]
    assert joined(pairs) == [(Span(0, 400, 2), Span(1000, 400, 2))]
    assert joined(pairs[::-1]) == pairs[::-1]
