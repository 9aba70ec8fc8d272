"""Expert maps: the fast one is the slow one, and who holds everything."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from dynamo_elastic.engine.vllm.elastic.placement import (
    beside_prefix,
    complete_prefix,
    is_complete,
    logical_maps,
)


def slow_maps(physical: list[list[int]], experts: int) -> list[list[list[int]]]:
    """Slots of each expert, by walking over them."""
    return [
        [[slot for slot, held in enumerate(row) if held == expert] for expert in range(experts)]
        for row in physical
    ]


placements = st.integers(1, 6).flatmap(
    lambda experts: st.tuples(
        st.just(experts),
        st.integers(1, 9).flatmap(
            lambda slots: st.lists(
                st.lists(st.integers(-1, experts - 1), min_size=slots, max_size=slots),
                min_size=1,
                max_size=4,
            )
        ),
    )
)


@given(placements)
def test_maps_are_those_of_the_walk(placement: tuple[int, list[list[int]]]) -> None:
    experts, physical = placement
    slots, counts = logical_maps(torch.tensor(physical), experts)
    expected = slow_maps(physical, experts)
    most = max(len(found) for row in expected for found in row)
    assert slots.shape == (len(physical), experts, most)
    assert counts.tolist() == [[len(found) for found in row] for row in expected]
    padded = [[found + [-1] * (most - len(found)) for found in row] for row in expected]
    assert slots.tolist() == padded


@given(placements)
def test_one_layer_alone_has_the_same_maps(placement: tuple[int, list[list[int]]]) -> None:
    experts, physical = placement
    slots, counts = logical_maps(torch.tensor(physical[0]), experts)
    both = logical_maps(torch.tensor(physical[:1]), experts)
    assert torch.equal(slots, both[0][0])
    assert torch.equal(counts, both[1][0])


@given(placements, st.integers(0, 9))
def test_complete_is_every_expert_in_every_layer(
    placement: tuple[int, list[list[int]]], kept: int
) -> None:
    experts, physical = placement
    expected = all(set(range(experts)) <= set(row[:kept]) for row in physical)
    assert is_complete(torch.tensor(physical), kept, experts) is expected


@st.composite
def groups(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Some ranks that have every expert, others beside them with anything; load, how many of the
    first are enough, slots of a rank."""
    slots, kept, others = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    experts, layers = slots * kept, draw(st.integers(1, 3))
    anything = st.integers(-1, experts - 1)
    rows = [
        draw(st.permutations(range(experts)))
        + draw(st.lists(anything, min_size=slots * others, max_size=slots * others))
        for _ in range(layers)
    ]
    amount = st.integers(0, 1000).map(float)
    load = [draw(st.lists(amount, min_size=experts, max_size=experts)) for _ in range(layers)]
    return torch.tensor(rows), torch.tensor(load), kept, slots


@given(groups())
def test_those_who_have_all_keep_all_and_the_others_hold_copies(
    group: tuple[torch.Tensor, torch.Tensor, int, int],
) -> None:
    physical, load, _, slots = group
    experts = load.shape[1]
    kept = complete_prefix(physical, slots, experts)
    made = beside_prefix(physical, load, kept, slots)
    first = kept * slots
    assert torch.equal(made[:, :first], physical[:, :first])
    assert is_complete(made, first, experts)
    assert int(made.min()) >= 0
    for row, loads in zip(made.tolist(), load.tolist(), strict=True):
        copies = [row.count(expert) for expert in range(experts)]
        for a in range(experts):
            for b in range(experts):
                # No copy of b would have been better as one of a.
                if row[first:].count(b):
                    assert loads[a] / copies[a] <= loads[b] / (copies[b] - 1)
    again = beside_prefix(made, load, kept, slots)
    assert torch.equal(again.sort(dim=1).values, made.sort(dim=1).values)


def test_a_prefix_is_the_fewest_ranks_and_none_if_all_are_not_enough() -> None:
    rows = torch.tensor([[0, 1, 2, 3, 0, 1], [3, 2, 1, 0, -1, -1]])
    assert complete_prefix(rows, 2, 4) == 2
    assert complete_prefix(rows, 2, 5) == 0
