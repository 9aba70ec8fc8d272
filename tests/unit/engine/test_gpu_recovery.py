"""A joiner that is lost while it connects, and what it costs the ranks that serve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dynamo_elastic.comm.expert_rules import PeerState
from dynamo_elastic.engine.base import Finish, Request
from dynamo_elastic.engine.reference.gpu_group import BufferGroup
from dynamo_elastic.errors import PeerLost, PeerUnreachable
from dynamo_elastic.testing.buffer_ranks import BUFFER_MODEL, BufferRank, BufferRanks
from dynamo_elastic.testing.expert_buffer import FakeExpertWorld
from dynamo_elastic.types import Rank

EXPERTS = BUFFER_MODEL.num_experts
HALF = EXPERTS // 2
New = Callable[[int, Sequence[int]], BufferRank]


@pytest.fixture
def new(world: FakeExpertWorld, ranks: BufferRanks, model_dir: Path) -> New:
    return lambda slot, held: ranks.add(BufferRank(world, model_dir, slot, held, EXPERTS))


def ask(rank: BufferRank, name: str, tokens: int = 6) -> None:
    request = Request(name, (1, 9, 4, 30), tokens, temperature=0.0)
    rank.do(lambda: rank.loop.submit(request))


def answer(rank: BufferRank, name: str) -> tuple[int, ...]:
    ask(rank, name)
    assert rank.wait_ended(name) is Finish.LENGTH
    return rank.tokens(name)


def silent_in_connect(
    world: FakeExpertWorld, to: Sequence[int] = ()
) -> Callable[[Sequence[BufferGroup]], None]:
    """The last rank meets the others, and then its buffer answers only the seats in `to`."""

    def spoil(groups: Sequence[BufferGroup]) -> None:
        buffer: Any = groups[-1].buffer
        connect = buffer.connect
        world.silent |= {
            (int(buffer.metadata()), serial)
            for serial, other in world.buffers.items()
            if other.rank not in to
        }

        def some(peers: dict[Rank, bytes], *, timeout_s: float) -> None:
            connect({r: p for r, p in peers.items() if r in to}, timeout_s=timeout_s)

        buffer.connect = some

    return spoil


def test_a_joiner_that_never_comes_costs_no_buffer(ranks: BufferRanks, new: New) -> None:
    first, second = new(0, range(EXPERTS)), new(1, range(HALF))
    ranks.switch([first])
    expected = answer(first, "alone")
    buffer = first.buffer

    def never(groups: Sequence[BufferGroup]) -> None:
        group: Any = groups[-1]
        group.connect = lambda addresses, *, timeout_s: None

    def stops_after_hello(groups: Sequence[BufferGroup]) -> None:
        group: Any = groups[-1]
        group._tell_all = lambda said, deadline: {}

    for spoil in (never, stops_after_hello):
        failures = ranks.abort([first, second], spoil, timeout_s=0.4)
        assert isinstance(failures[0], PeerLost)
        assert not isinstance(failures[0], PeerUnreachable)
        assert first.buffer is buffer
        assert buffer.can_connect
        assert set(buffer.states.values()) == {PeerState.ABSENT}
        assert answer(first, spoil.__name__) == expected
    ranks.switch([first, new(2, range(HALF))])
    assert answer(first, "joined") == expected
    assert first.buffer is buffer


def test_one_that_is_lost_in_the_connect_costs_a_buffer(
    world: FakeExpertWorld, ranks: BufferRanks, new: New
) -> None:
    first, second = new(0, range(EXPERTS)), new(1, range(HALF))
    ranks.switch([first])
    expected = answer(first, "alone")
    ask(first, "stream", 16)
    failures = ranks.abort([first, second], silent_in_connect(world))
    assert isinstance(failures[0], PeerUnreachable)
    spent = first.buffer
    assert not spent.can_connect
    assert first.wait_ended("stream") is Finish.LENGTH
    assert first.tokens("stream")[:6] == expected

    # Again and again: what was made for an epoch that came to nothing goes.
    for attempt in range(2):
        third = new(2, range(HALF))
        ranks.abort([first, third], silent_in_connect(world))
        assert first.buffer is spent
        assert answer(first, f"attempt{attempt}") == expected
    fresh = new(3, range(HALF, EXPERTS))
    ranks.switch([first, fresh])
    assert first.buffer is not spent
    assert answer(first, "joined") == expected
    assert answer(fresh, "joined") == expected
    ranks.switch([first])
    for rank in (first, fresh):
        rank.do(partial(rank.loop.disconnect, ranks.epoch))
        rank.do(rank.let_go)
    fresh.executor.close()
    ranks.switch([first, new(1, range(HALF))])
    assert answer(first, "again") == expected
    mine = [b for b in world.buffers.values() if b.rank == first.buffer.rank]
    assert mine == [first.buffer]


def test_one_that_dies_in_the_connect_costs_a_buffer_and_not_its_place(
    world: FakeExpertWorld, ranks: BufferRanks, new: New
) -> None:
    """NIXL would refuse whoever comes with its name, on every later attempt (seen on a GPU)."""
    first = new(0, range(EXPERTS))
    ranks.switch([first])
    expected = answer(first, "alone")

    def dies(groups: Sequence[BufferGroup]) -> None:
        buffer: Any = groups[-1].buffer
        buffer.connect = lambda peers, *, timeout_s: buffer.die()
        buffer.die()

    failures = ranks.abort([first, new(1, range(HALF))], dies)
    assert isinstance(failures[0], PeerUnreachable)
    before = first.buffer
    assert not before.can_connect
    assert before.can_disconnect
    assert answer(first, "after") == expected
    ranks.switch([first, new(1, range(HALF))])
    assert first.buffer is not before
    assert answer(first, "joined") == expected


def test_all_take_a_fresh_buffer_if_one_has_to(
    world: FakeExpertWorld, ranks: BufferRanks, new: New
) -> None:
    first, second = new(0, range(EXPERTS)), new(1, range(HALF))
    ranks.switch([first])
    expected = answer(first, "alone")
    ranks.switch([first, second])
    failures = ranks.abort([first, second, new(2, ())], silent_in_connect(world, to=[1]))
    assert isinstance(failures[0], PeerUnreachable)
    assert failures[1] is None
    assert [r.buffer.can_connect for r in (first, second)] == [False, True]
    before = first.buffer, second.buffer
    third = new(3, range(HALF))
    ranks.switch([first, second, third])
    assert (first.buffer, second.buffer) != before
    assert second.buffer is not before[1]
    for rank in (first, second, third):
        assert answer(rank, "joined") == expected
        assert PeerState.ACTIVE in rank.buffer.states.values()


def test_ranks_that_only_stay_need_no_fresh_buffer(
    world: FakeExpertWorld, ranks: BufferRanks, new: New
) -> None:
    first, second = new(0, range(EXPERTS)), new(1, range(HALF))
    ranks.switch([first, second])
    expected = answer(first, "before")
    ranks.abort([first, second, new(2, ())], silent_in_connect(world))
    spent = first.buffer
    assert not spent.can_connect
    ranks.switch([first])
    assert first.buffer is spent
    assert answer(first, "after") == expected


def test_an_engine_closes_a_buffer_that_is_spent(
    world: FakeExpertWorld, ranks: BufferRanks, new: New
) -> None:
    first, second = new(0, range(EXPERTS)), new(1, range(HALF))
    ranks.switch([first, second])
    ranks.abort([first, second, new(2, ())], silent_in_connect(world))
    ranks.switch([first])
    for rank in (first, second):
        rank.do(partial(rank.loop.disconnect, ranks.epoch))
        rank.do(rank.let_go)
    second.executor.close()
    second.executor.close()
