"""Bounds of the parked pool, whatever is in it."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from dynamo_elastic.agent.pool import Eviction, PoolBounds, Pooled, evictions

NOW_S = 1e6

POOLED = st.lists(
    st.builds(
        Pooled,
        slot=st.integers(0, 63),
        parked_at_s=st.floats(NOW_S - 1000, NOW_S + 1000),
        host_bytes=st.integers(0, 100),
    ),
    unique_by=lambda p: p.slot,
)
BOUNDS = st.builds(
    PoolBounds,
    max_count=st.integers(1, 8),
    max_bytes=st.integers(1, 300),
    ttl_s=st.floats(1, 900),
)


@given(POOLED, BOUNDS)
def test_what_stays_is_within_bounds(pooled: list[Pooled], bounds: PoolBounds) -> None:
    doomed = evictions(pooled, bounds, NOW_S)
    kept = [p for p in pooled if p.slot not in doomed]
    assert len(kept) <= bounds.max_count
    assert sum(p.host_bytes for p in kept) <= bounds.max_bytes
    assert all(NOW_S - p.parked_at_s <= bounds.ttl_s for p in kept)


@given(POOLED, BOUNDS)
def test_nobody_goes_without_need(pooled: list[Pooled], bounds: PoolBounds) -> None:
    """Those parked longest go first; with the last of them, the pool would be too full."""
    doomed = evictions(pooled, bounds, NOW_S)
    young = [p for p in pooled if NOW_S - p.parked_at_s <= bounds.ttl_s]
    assert all(doomed[p.slot] is Eviction.TTL for p in pooled if p not in young)
    gone = sorted((p for p in young if p.slot in doomed), key=lambda p: (p.parked_at_s, p.slot))
    kept = [p for p in young if p.slot not in doomed]
    if not gone:
        return
    last = gone[-1]
    assert all((p.parked_at_s, p.slot) > (last.parked_at_s, last.slot) for p in kept)
    too_many = len(kept) + 1 > bounds.max_count
    too_large = sum(p.host_bytes for p in kept) + last.host_bytes > bounds.max_bytes
    assert too_many or too_large


@given(POOLED, BOUNDS)
def test_what_is_left_is_left_alone(pooled: list[Pooled], bounds: PoolBounds) -> None:
    doomed = evictions(pooled, bounds, NOW_S)
    kept = [p for p in pooled if p.slot not in doomed]
    assert evictions(kept, bounds, NOW_S) == {}


def test_reasons() -> None:
    bounds = PoolBounds(max_count=2, max_bytes=10, ttl_s=100)
    one = Pooled(0, NOW_S - 50, 4)
    old = replace(one, slot=1, parked_at_s=NOW_S - 101)
    assert evictions([one, old], bounds, NOW_S) == {1: Eviction.TTL}
    many = [replace(one, slot=slot, parked_at_s=NOW_S - slot) for slot in range(3)]
    assert evictions(many, bounds, NOW_S) == {2: Eviction.COUNT}
    assert evictions([replace(one, host_bytes=11)], bounds, NOW_S) == {0: Eviction.BYTES}
