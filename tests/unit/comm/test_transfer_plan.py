from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_elastic.comm.transfer_plan import Chunk, plan_copies, plan_dense, reassign
from dynamo_elastic.types import Region, WorkerId

ALIGN = 64


def regions_of(sizes: list[int]) -> list[Region]:
    regions = []
    offset = 0
    for i, size in enumerate(sizes):
        regions.append(Region(f"dense/{i}", offset, size))
        offset += -(-size // ALIGN) * ALIGN
    return regions


sizes = st.lists(st.integers(1, 5_000), min_size=1, max_size=12)
counts = st.integers(1, 5)
chunk_sizes = st.integers(1, 3_000).filter(lambda n: n > 16)


def workers(kind: str, count: int) -> list[WorkerId]:
    return [WorkerId(f"{kind}{i}") for i in range(count)]


@given(sizes, counts, counts, chunk_sizes)
def test_every_byte_of_every_region_reaches_every_joiner_once(
    sizes: list[int], num_sources: int, num_joiners: int, chunk_bytes: int
) -> None:
    regions = regions_of(sizes)
    joiners = workers("j", num_joiners)
    plan = plan_dense(regions, workers("s", num_sources), joiners, chunk_bytes=chunk_bytes)
    assert {c.target for c in plan} == set(joiners)
    expected = [b for r in regions for b in range(r.offset, r.offset + r.size_bytes)]
    for joiner in joiners:
        mine = [c for c in plan if c.target == joiner]
        covered = [b for c in mine for b in range(c.to_offset, c.to_offset + c.size_bytes)]
        assert sorted(covered) == expected
    assert all(c.from_offset == c.to_offset for c in plan)
    assert all(0 < c.size_bytes <= chunk_bytes for c in plan)


@given(sizes, counts, chunk_sizes)
def test_no_source_sends_more_than_an_even_share_and_a_chunk(
    sizes: list[int], num_sources: int, chunk_bytes: int
) -> None:
    sources = workers("s", num_sources)
    plan = plan_dense(regions_of(sizes), sources, workers("j", 1), chunk_bytes=chunk_bytes)
    sent = Counter(dict.fromkeys(sources, 0))
    for chunk in plan:
        sent[chunk.source] += chunk.size_bytes
    even = sum(sizes) / num_sources
    assert max(sent.values()) <= even + chunk_bytes
    assert min(sent.values()) >= even - chunk_bytes


@given(sizes, counts, counts, st.randoms(use_true_random=False))
def test_all_sources_make_the_same_plan(
    sizes: list[int], num_sources: int, num_joiners: int, rng: random.Random
) -> None:
    regions = regions_of(sizes)
    sources, joiners = workers("s", num_sources), workers("j", num_joiners)
    plan = plan_dense(regions, sources, joiners, chunk_bytes=700)
    rng.shuffle(regions)
    rng.shuffle(sources)
    rng.shuffle(joiners)
    assert plan_dense(regions, sources, joiners, chunk_bytes=700) == plan


def test_what_cannot_be_planned_is_refused() -> None:
    regions = regions_of([10])
    with pytest.raises(ValueError, match="no source"):
        plan_dense(regions, [], workers("j", 1), chunk_bytes=1)
    with pytest.raises(ValueError, match="chunk_bytes is 0"):
        plan_dense(regions, workers("s", 1), workers("j", 1), chunk_bytes=0)
    assert plan_dense(regions, workers("s", 1), [], chunk_bytes=1) == ()
    assert plan_dense([], workers("s", 1), workers("j", 1), chunk_bytes=1) == ()


def test_an_expert_goes_from_its_slot_to_another() -> None:
    a, b = WorkerId("a"), WorkerId("b")
    pairs = [(Region("slot0/w1", 100, 10), Region("slot3/w1", 700, 10))]
    assert plan_copies(a, b, pairs, chunk_bytes=8) == (
        Chunk(a, b, 100, 700, 8),
        Chunk(a, b, 108, 708, 2),
    )
    with pytest.raises(ValueError, match="slot0/w1 and slot3/w2 differ"):
        plan_copies(a, b, [(pairs[0][0], Region("slot3/w2", 0, 9))], chunk_bytes=8)


@given(sizes, st.integers(2, 5), counts, chunk_sizes)
def test_what_a_lost_source_owed_is_spread_over_the_others(
    sizes: list[int], num_sources: int, num_joiners: int, chunk_bytes: int
) -> None:
    sources = workers("s", num_sources)
    joiners = workers("j", num_joiners)
    plan = plan_dense(regions_of(sizes), sources, joiners, chunk_bytes=chunk_bytes)
    lost, *others = sources
    extra = reassign(plan, lost, sources)
    owed = {(c.target, c.to_offset, c.size_bytes) for c in plan if c.source == lost}
    assert {(c.target, c.to_offset, c.size_bytes) for c in extra} == owed
    assert len(extra) == len(owed)
    sent = Counter(dict.fromkeys(others, 0))
    for chunk in extra:
        sent[chunk.source] += chunk.size_bytes
    assert set(sent) == set(others)
    even = sum(c.size_bytes for c in extra) / len(others)
    assert max(sent.values()) <= even + chunk_bytes


def test_nobody_is_left_to_send() -> None:
    source = WorkerId("s0")
    plan = plan_dense(regions_of([10]), [source], [WorkerId("j")], chunk_bytes=8)
    with pytest.raises(ValueError, match="nobody is left"):
        reassign(plan, source, [source])
