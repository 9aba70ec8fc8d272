"""Expert maps: the fast one is the slow one, and who holds everything."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from dynamo_elastic.engine.vllm.elastic.placement import is_complete, logical_maps


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
