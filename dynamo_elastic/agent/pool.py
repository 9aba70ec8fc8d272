"""Which parked engines have to go, and why: pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Eviction(StrEnum):
    """Why a parked engine ended."""

    TTL = "ttl"
    COUNT = "count"
    BYTES = "bytes"
    MISFIT = "misfit"
    """The deployment or the machine is another one than it was started for."""
    UNWANTED = "unwanted"
    """Its slot was asked for an engine of another tier."""
    FAILED = "failed"
    """It did not come back."""
    DIED = "died"
    DRAIN = "drain"
    ASKED = "asked"
    DISABLED = "disabled"


@dataclass(frozen=True, slots=True)
class PoolBounds:
    """Limits of all parked engines of a host together."""

    max_count: int
    max_bytes: int
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Pooled:
    """One parked engine. `parked_at_s`: seconds since the epoch."""

    slot: int
    parked_at_s: float
    host_bytes: int


def evictions(pooled: Iterable[Pooled], bounds: PoolBounds, now_s: float) -> dict[int, Eviction]:
    """Slot -> reason of those that have to go: all that waited too long, then those that waited
    longest, until the others are within bounds. A clock that was set back makes nobody older."""
    doomed: dict[int, Eviction] = {}
    kept = sorted(pooled, key=lambda p: (p.parked_at_s, p.slot))
    for one in list(kept):
        if now_s - one.parked_at_s > bounds.ttl_s:
            doomed[one.slot] = Eviction.TTL
            kept.remove(one)
    while len(kept) > bounds.max_count:
        doomed[kept.pop(0).slot] = Eviction.COUNT
    while sum(one.host_bytes for one in kept) > bounds.max_bytes:
        doomed[kept.pop(0).slot] = Eviction.BYTES
    return doomed
