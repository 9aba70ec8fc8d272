"""The GPU engine's steps, epochs and expert table, over fake buffers: same tokens at any width."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_elastic.comm.expert_rules import PeerState
from dynamo_elastic.engine.base import EngineState, Finish, Request
from dynamo_elastic.engine.reference.device import StepResult
from dynamo_elastic.engine.reference.experts import Placement
from dynamo_elastic.engine.reference.gpu_experts import NOBODY, expert_table, stack_experts
from dynamo_elastic.engine.reference.gpu_steps import tile_sizes
from dynamo_elastic.testing.buffer_ranks import BUFFER_MODEL, BufferRank, BufferRanks
from dynamo_elastic.testing.expert_buffer import FakeExpertWorld
from dynamo_elastic.topology import EMPTY, Member, Topology
from dynamo_elastic.types import Epoch, Incarnation, Rank, WorkerId

EXPERTS = BUFFER_MODEL.num_experts
HALF = EXPERTS // 2
NOTHING = StepResult(np.empty((0, 0), dtype=np.float32), lost=True)
PROMPTS = {"a": (1, 9, 4, 30), "b": (7, 7, 2), "c": (50, 3, 12, 18, 40, 5)}


def request(name: str, tokens: int = 8) -> Request:
    return Request(name, PROMPTS[name], tokens, temperature=0.0)


@pytest.fixture(scope="module")
def alone(model_dir: Path) -> dict[str, tuple[int, ...]]:
    """What one rank with every expert says."""
    ranks = BufferRanks()
    only = ranks.add(BufferRank(FakeExpertWorld(), model_dir, 0, range(EXPERTS), EXPERTS))
    ranks.switch([only])
    said = {name: answer(only, name) for name in PROMPTS}
    ranks.close()
    return said


def answer(rank: BufferRank, name: str) -> tuple[int, ...]:
    rank.do(lambda: rank.loop.submit(request(name)))
    assert rank.wait_ended(name) is Finish.LENGTH
    return rank.tokens(name)


def test_two_ranks_say_what_one_says(
    world: FakeExpertWorld,
    ranks: BufferRanks,
    model_dir: Path,
    alone: dict[str, tuple[int, ...]],
) -> None:
    first = ranks.add(BufferRank(world, model_dir, 0, range(HALF), EXPERTS))
    # Not the next seat: ranks and seats are not the same thing.
    second = ranks.add(BufferRank(world, model_dir, 2, range(HALF, EXPERTS), EXPERTS))
    ranks.switch([first, second])
    at = {"a": first, "b": second, "c": second}
    for name, rank in at.items():
        rank.do(partial(rank.loop.submit, request(name)))
    for name, rank in at.items():
        assert rank.wait_ended(name) is Finish.LENGTH
        assert rank.tokens(name) == alone[name]
    assert len(set(alone["a"])) > 2


def test_a_stream_goes_on_through_growing_and_shrinking(
    world: FakeExpertWorld,
    ranks: BufferRanks,
    model_dir: Path,
    alone: dict[str, tuple[int, ...]],
) -> None:
    first = ranks.add(BufferRank(world, model_dir, 1, range(EXPERTS), EXPERTS))
    second = ranks.add(BufferRank(world, model_dir, 3, range(HALF, EXPERTS), EXPERTS))
    ranks.switch([first])
    first.do(lambda: first.loop.submit(request("c", 16)))
    first.wait_tokens("c", 2)
    ranks.switch([first, second])
    assert first.loop.state is second.loop.state is EngineState.SERVING
    assert first.buffer.states[Rank(3)] is PeerState.ACTIVE
    ranks.switch([first])
    assert first.buffer.states[Rank(3)] is PeerState.CONNECTED
    assert first.wait_ended("c") is Finish.LENGTH
    assert first.tokens("c")[:8] == alone["c"]
    for rank in (first, second):
        rank.do(partial(rank.loop.disconnect, ranks.epoch))
        rank.do(rank.let_go)
    assert first.buffer.states[Rank(3)] is PeerState.ABSENT
    second.executor.close()


def test_a_rank_that_stops_costs_a_step_and_no_wrong_token(
    world: FakeExpertWorld,
    ranks: BufferRanks,
    model_dir: Path,
    alone: dict[str, tuple[int, ...]],
) -> None:
    first = ranks.add(BufferRank(world, model_dir, 0, range(EXPERTS), EXPERTS))
    second = ranks.add(BufferRank(world, model_dir, 1, range(HALF), EXPERTS))
    ranks.switch([first, second])
    # It answers the records of a round but takes no part in its step.
    second.executor.step = lambda rows, membership: NOTHING  # type: ignore[method-assign]
    assert answer(first, "a") == alone["a"]
    assert first.buffer.states[Rank(1)] is PeerState.TIMED_OUT
    assert first.loop.current is not None
    assert first.loop.current.group.masked == frozenset({Rank(1)})

    # It comes back with a fresh buffer only.
    fresh = ranks.add(BufferRank(world, model_dir, 1, range(HALF), EXPERTS))
    ranks.switch([first])
    first.do(first.let_go)
    ranks.switch([first, fresh])
    assert answer(first, "b") == alone["b"]
    assert first.buffer.states[Rank(1)] is PeerState.ACTIVE


def test_an_epoch_that_is_aborted_leaves_no_peer(
    world: FakeExpertWorld, ranks: BufferRanks, model_dir: Path
) -> None:
    first = ranks.add(BufferRank(world, model_dir, 0, range(EXPERTS), EXPERTS))
    second = ranks.add(BufferRank(world, model_dir, 1, range(HALF), EXPERTS))
    ranks.switch([first])
    ranks.prepare([first, second])
    assert first.buffer.states[Rank(1)] is PeerState.CONNECTED
    for rank in (first, second):
        rank.do(partial(rank.loop.withdraw, ranks.epoch))
        rank.do(rank.let_go)
    assert first.buffer.states[Rank(1)] is PeerState.ABSENT
    ranks.switch([first, second])
    assert second.loop.state is EngineState.SERVING


@given(st.data())
def test_the_table_names_only_replicas_and_spreads_rows(data: st.DataObject) -> None:
    slots, world_size, rows = 3, data.draw(st.integers(1, 4)), 8
    held = st.lists(st.sampled_from([EMPTY, *range(6)]), min_size=slots, max_size=slots)
    members = [
        Member(WorkerId(f"w{r}"), Incarnation(""), tuple(data.draw(held)))
        for r in range(world_size)
    ]
    masked = frozenset(Rank(r) for r in data.draw(st.sets(st.integers(1, 3))) if r < world_size)
    placement = Placement(Topology(Epoch(1), tuple(members)), Rank(0), 6, masked)
    seats = {Rank(r): Rank(7 - r) for r in range(world_size)}
    table = expert_table(placement, 6, rows, seats, slots)
    for expert in range(6):
        replicas = {
            seats[Rank(r)] * slots + s
            for r, m in enumerate(members)
            for s, e in enumerate(m.experts)
            if e == expert and r not in masked
        }
        own = {n for n in replicas if n // slots == seats[Rank(0)]}
        used = set(table[:, expert].tolist())
        assert used == (own or replicas or {NOBODY}) or (
            used < replicas and not own and len(replicas) > rows
        )


def test_stacks_are_views_of_the_slots(world: FakeExpertWorld, model_dir: Path) -> None:
    rank = BufferRank(world, model_dir, 0, range(HALF), HALF)
    stacks = stack_experts(rank.weights)
    for slot in range(HALF):
        for layer in range(BUFFER_MODEL.num_hidden_layers):
            name = f"slot{slot}/layers.{layer}."
            for stack, piece in ((stacks.gate_up, "gate_up"), (stacks.down, "down")):
                tensor = rank.weights.tensors[name + piece]
                assert stack[layer][slot].data_ptr() == tensor.data_ptr()
                assert stack[layer][slot].equal(tensor)


def test_tile_sizes_end_with_a_whole_batch() -> None:
    assert tile_sizes(8) == (8,)
    assert tile_sizes(20) == (8, 16, 20)
