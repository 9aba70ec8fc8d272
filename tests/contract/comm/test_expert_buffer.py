"""What every ExpertBuffer keeps: run on the fake, and on NIXL EP with a process on each GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from dynamo_elastic.testing.expert_buffer import FakeExpertWorld
from dynamo_elastic.testing.expert_buffer_group import (
    RankFailed,
    RankHandle,
    RankProcess,
    RankThread,
    activate,
    call_all,
    connect,
    joint_step,
    part,
)

SHAPE = {
    "capacity": 4,
    "experts_per_rank": 2,
    "hidden": 2048,
    "top_k": 2,
    "max_tokens": 8,
    "timeout_ms": 300,
}
NEW = Callable[[int], RankHandle]


@pytest.fixture(params=["fake", pytest.param("nixl-ep", marks=pytest.mark.gpu(2))])
def new(request: pytest.FixtureRequest) -> Iterator[NEW]:
    """Makes the rank of a number, with an open buffer; on GPUs, each rank has its own."""
    world = FakeExpertWorld()
    with ExitStack() as stack:

        def make(number: int) -> RankHandle:
            rank: RankHandle
            if request.param == "fake":
                rank = RankThread(number, world)
            else:
                rank = RankProcess(number, number % len(list(Path("/dev").glob("nvidia[0-9]*"))))
            stack.callback(rank.close)
            rank.call("open", rank=number, **SHAPE)
            return rank

        yield make


@pytest.fixture
def pair(new: NEW) -> list[RankHandle]:
    """Ranks 0 and 1, connected and active."""
    ranks = [new(0), new(1)]
    connect(ranks[1:], ranks[:1])
    activate(ranks)
    return ranks


def assert_right(ranks: list[RankHandle], seed: int = 7) -> None:
    result = joint_step(ranks, seed=seed)
    assert result["bad_tokens"] == 0, result
    assert result["masked"] == [[] for _ in ranks], result


def alone(rank: RankHandle) -> dict[str, float]:
    rank.call("route", world=[rank.number])
    rank.call("step")
    checked: dict[str, float] = rank.call("check", world=[rank.number])
    return checked


def test_a_fresh_buffer_serves_alone(new: NEW) -> None:
    rank = new(0)
    assert rank.call("states") == {"1": "absent", "2": "absent", "3": "absent"}
    assert alone(rank)["bad_tokens"] == 0
    assert rank.call("masked") == []
    rank.call("staged_layer")
    assert rank.call("check", world=[0])["bad_tokens"] == 0


def test_connected_peers_are_masked_until_all_activate(new: NEW) -> None:
    ranks = [new(0), new(1)]
    connect(ranks[1:], ranks[:1])
    assert ranks[0].call("states")["1"] == "connected"
    assert [alone(rank)["bad_tokens"] for rank in ranks] == [0, 0]
    activate(ranks)
    for seed in range(3):
        assert_right(ranks, seed)


def test_tokens_for_a_masked_rank_are_lost_not_late(pair: list[RankHandle]) -> None:
    for rank, other in ((pair[0], 1), (pair[1], 0)):
        rank.call("deactivate", ranks=[other])
    pair[0].call("route", world=[0, 1])
    pair[0].call("step")
    assert pair[0].call("check", world=[0, 1])["bad_tokens"] > 0
    assert pair[0].call("check", world=[0])["bad_tokens"] == 0
    activate(pair)
    assert_right(pair)


def test_the_same_rank_leaves_and_joins_again_at_once(pair: list[RankHandle]) -> None:
    for seed in range(3):
        part(pair[1:], pair[:1])
        pair[1].call("destroy", released_by=[0])
        assert alone(pair[0])["bad_tokens"] == 0
        pair[1].call("open", rank=1, **SHAPE)
        connect(pair[1:], pair[:1])
        activate(pair)
        assert_right(pair, seed)


def test_leaving_without_a_new_buffer(pair: list[RankHandle]) -> None:
    for seed in range(3):
        part(pair[1:], pair[:1])
        connect(pair[1:], pair[:1])
        activate(pair)
        assert_right(pair, seed)


def test_a_silent_peer_is_masked_after_the_timeout_and_stays_out(pair: list[RankHandle]) -> None:
    pair[0].call("route", world=[0, 1])
    result = pair[0].call("step")
    assert result["masked"] == [1]
    assert 0.25 < result["step_s"] < 5
    assert pair[0].call("check", world=[0])["bad_tokens"] == 0
    assert pair[0].call("states")["1"] == "timed-out"
    for op in ("activate", "deactivate"):
        with pytest.raises(RankFailed) as caught:
            pair[0].call(op, ranks=[1])
        assert caught.value.kind == "BufferMisused"
        assert "fresh buffer" in caught.value.message


def test_after_a_timeout_only_a_fresh_buffer_is_connected(pair: list[RankHandle]) -> None:
    old = pair[1].call("metadata")
    pair[0].call("step")
    pair[0].call("disconnect", ranks=[1])
    with pytest.raises(RankFailed) as caught:
        pair[0].call("connect", peers={"1": old}, timeout_s=1)
    assert caught.value.kind == "BufferMisused"

    pair[1].call("deactivate", ranks=[0])
    pair[1].call("disconnect", ranks=[0])
    pair[1].call("destroy", released_by=[0])
    pair[1].call("open", rank=1, **SHAPE)
    connect(pair[1:], pair[:1])
    activate(pair)
    assert_right(pair)


def test_a_peer_that_never_comes_stops_nobody(new: NEW) -> None:
    serving, stranger = new(0), new(1)
    begun = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        serving.call("connect", peers={"1": stranger.call("metadata")}, timeout_s=0.5)
    assert caught.value.kind == "PeerUnreachable"
    assert time.monotonic() - begun < 5
    assert serving.call("states")["1"] == "broken"
    for _ in range(3):
        assert alone(serving)["bad_tokens"] == 0
    with pytest.raises(RankFailed) as caught:
        serving.call("connect", peers={"2": stranger.call("metadata")}, timeout_s=0.5)
    assert caught.value.kind == "BufferMisused"
    assert "fresh buffer" in caught.value.message


def test_a_peer_that_died_takes_the_place_of_nobody(new: NEW) -> None:
    """Who comes next has its rank, as an engine that is started again in the same slot has."""
    serving, stays, dead = new(0), new(2), new(1)
    connect([stays], [serving])
    activate([serving, stays])
    metadata = dead.call("metadata")
    dead.close()
    with pytest.raises(RankFailed) as caught:
        serving.call("connect", peers={"1": metadata}, timeout_s=5)
    assert caught.value.kind == "PeerUnreachable"
    assert not serving.call("can_connect")
    assert_right([serving, stays])
    if serving.call("can_disconnect"):
        part([stays], [serving])
        serving.call("disconnect", ranks=[1])
    next_one = new(1)
    serving.call("open_beside")
    connect([next_one], [serving])
    activate([serving, next_one])
    assert_right([serving, next_one])
    serving.call("destroy_old", released_by=[1, 2])


def test_a_spent_buffer_is_replaced_beside_it(new: NEW) -> None:
    serving, gone = new(0), new(1)
    assert serving.call("can_connect")
    with pytest.raises(RankFailed):
        serving.call("connect", peers={"1": gone.call("metadata")}, timeout_s=0.5)
    assert not serving.call("can_connect")
    with pytest.raises(RankFailed) as caught:
        serving.call("disconnect", ranks=[1])
    assert caught.value.kind == "BufferMisused"
    assert alone(serving)["bad_tokens"] == 0
    gone.close()
    stranger = new(3)
    serving.call("open_beside")
    assert serving.call("can_connect")
    connect([stranger], [serving])
    activate([serving, stranger])
    for seed in range(3):
        assert_right([serving, stranger], seed)
    serving.call("destroy_old", released_by=[1, 2, 3])
    assert_right([serving, stranger])


def test_switches_only_between_layers(pair: list[RankHandle]) -> None:
    call_all(pair, "route", world=[0, 1])
    call_all(pair, "half_layer")
    assert call_all(pair, "parity") == [1, 1]
    for op, ranks in (("deactivate", [1]), ("disconnect", [1]), ("activate", [1])):
        with pytest.raises(RankFailed) as caught:
            pair[0].call(op, ranks=ranks)
        assert caught.value.kind == "BufferMisused"
        assert "between dispatch and combine" in caught.value.message
    call_all(pair, "finish_layer")
    assert call_all(pair, "parity") == [0, 0]
    assert call_all(pair, "check", world=[0, 1])[0]["bad_tokens"] == 0
    assert_right(pair)


def test_moves_that_the_table_does_not_have(pair: list[RankHandle]) -> None:
    for op, ranks in (
        ("activate", [2]),
        ("disconnect", [1]),
        ("activate", [0]),
        ("activate", [9]),
    ):
        with pytest.raises(RankFailed) as caught:
            pair[0].call(op, ranks=ranks)
        assert caught.value.kind == "BufferMisused"
    assert_right(pair)


def test_a_buffer_goes_only_after_its_peers_have_let_go(pair: list[RankHandle]) -> None:
    with pytest.raises(RankFailed) as caught:
        pair[1].call("destroy", released_by=[])
    assert caught.value.kind == "BufferMisused"
    assert_right(pair)
    part(pair[1:], pair[:1])
    pair[1].call("destroy", released_by=[0])
    pair[1].call("destroy", released_by=[])
    assert alone(pair[0])["bad_tokens"] == 0
    with pytest.raises(RankFailed) as caught:
        pair[1].call("step")
    assert caught.value.kind == "BufferMisused"


def test_what_can_not_be_built_is_named(new: NEW) -> None:
    rank = new(0)
    rank.call("destroy", released_by=[])
    for field, value in (
        ("capacity", 9),
        ("capacity", 0),
        ("hidden", 2049),
        ("top_k", 12),
        ("top_k", 0),
        ("max_tokens", 0),
        ("experts_per_rank", 0),
        ("timeout_ms", 0),
        ("rank", 4),
    ):
        with pytest.raises(RankFailed) as caught:
            rank.call("open", **{"rank": 0, **SHAPE, field: value})
        assert caught.value.kind == "ConfigError"
        assert f"{field} is {value}: take" in caught.value.message
    rank.call("open", rank=0, **SHAPE)
    assert alone(rank)["bad_tokens"] == 0


def test_three_ranks_join_one_by_one_in_any_order(new: NEW, request: pytest.FixtureRequest) -> None:
    if "nixl-ep" in request.node.name and not Path("/dev/nvidia2").exists():
        pytest.skip("needs 3 NVIDIA GPUs")
    ranks = [new(number) for number in (2, 0, 1)]
    for size in (2, 3):
        connect(ranks[size - 1 : size], ranks[: size - 1])
        numbers = [rank.number for rank in ranks[:size]]
        newest = numbers[-1]
        pairs = {n: [newest] if n != newest else numbers[:-1] for n in numbers}
        activate(ranks[:size], pairs)
        assert_right(ranks[:size], size)
