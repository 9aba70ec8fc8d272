"""Names for plain values, so that a rank cannot be passed where an epoch is meant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

Rank = NewType("Rank", int)
"""Position in the expert-parallel group of one epoch, 0-based and without gaps."""

Epoch = NewType("Epoch", int)
"""Number of a topology; strictly rising, never used twice, not even after an abort."""

WorkerId = NewType("WorkerId", str)
"""A worker shell: stable over epochs, one per GPU slot of a host ('host-a.slot2')."""

Incarnation = NewType("Incarnation", str)
"""One life of an engine process; a restored or restarted engine has a new one."""

LeaseId = NewType("LeaseId", int)
FencingToken = NewType("FencingToken", int)
"""Create revision of the leader's key: a newer leader has a larger one."""

NO_INCARNATION = Incarnation("")
NO_EPOCH = Epoch(0)
"""No engine."""

OperationId = NewType("OperationId", str)


@dataclass(frozen=True, slots=True)
class Region:
    """A named piece of an arena, at the same offset on every rank: 'dense/layers.0.q_proj'."""

    name: str
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class SharedChunk:
    """One piece of an arena's physical memory on its way to a peer: `size_bytes` at `offset` from
    the arena's first byte. Whoever has `descriptor` closes it."""

    descriptor: int
    offset: int
    size_bytes: int
