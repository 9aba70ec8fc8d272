"""Who sends which bytes to whom. Pure: every source works out the same plan and takes its share."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from dynamo_elastic.types import Region, WorkerId


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes to copy from the arena of `source` to that of `target`."""

    source: WorkerId
    target: WorkerId
    from_offset: int
    to_offset: int
    size_bytes: int


def plan_dense(
    regions: Collection[Region],
    sources: Collection[WorkerId],
    joiners: Collection[WorkerId],
    *,
    chunk_bytes: int,
) -> tuple[Chunk, ...]:
    """Every byte of `regions` once to every joiner, each source sending about the same.

    The regions, in the order of their offsets, are cut into as many stretches as there are
    sources; one that begins inside a chunk begins after it. So no source sends more than an even
    share and one chunk to a joiner, whatever the order of the arguments. Raises ValueError if there
    is no source, or chunk_bytes is not positive.
    """
    if not sources:
        raise ValueError("no source to send from")
    in_order = sorted(set(sources))
    total_bytes = sum(r.size_bytes for r in regions)
    shares: list[tuple[WorkerId, int, int]] = []
    planned_bytes = 0
    for region in sorted(regions, key=lambda r: r.offset):
        for start, size_bytes in _cut(region.size_bytes, chunk_bytes):
            source = in_order[planned_bytes * len(in_order) // total_bytes]
            shares.append((source, region.offset + start, size_bytes))
            planned_bytes += size_bytes
    return tuple(
        Chunk(source, joiner, offset, offset, size_bytes)
        for joiner in sorted(set(joiners))
        for source, offset, size_bytes in shares
    )


def reassign(
    chunks: Collection[Chunk], lost: WorkerId, survivors: Collection[WorkerId]
) -> tuple[Chunk, ...]:
    """What the survivors send in place of the `lost` source: its chunks of `chunks`, each to its
    target at its place, whether it had landed or not; spread by size. Every source holds the same
    bytes. Raises ValueError if nobody survives."""
    ours = sorted(set(survivors) - {lost})
    if not ours:
        raise ValueError(f"nobody is left to send what {lost} did not")
    orphans = sorted((c for c in chunks if c.source == lost), key=lambda c: (c.target, c.to_offset))
    total_bytes = sum(c.size_bytes for c in orphans)
    taken: list[Chunk] = []
    planned_bytes = 0
    for chunk in orphans:
        taken.append(replace(chunk, source=ours[planned_bytes * len(ours) // total_bytes]))
        planned_bytes += chunk.size_bytes
    return tuple(taken)


def plan_copies(
    source: WorkerId,
    target: WorkerId,
    pairs: Iterable[tuple[Region, Region]],
    *,
    chunk_bytes: int,
) -> tuple[Chunk, ...]:
    """Every byte of each first region to the second: how an expert gets from slot to slot.

    Raises ValueError if two regions differ in size, or chunk_bytes is not positive.
    """
    chunks: list[Chunk] = []
    for ours, theirs in pairs:
        if ours.size_bytes != theirs.size_bytes:
            raise ValueError(f"{ours.name} and {theirs.name} differ in size")
        chunks += (
            Chunk(source, target, ours.offset + start, theirs.offset + start, size_bytes)
            for start, size_bytes in _cut(ours.size_bytes, chunk_bytes)
        )
    return tuple(chunks)


def _cut(size_bytes: int, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    if chunk_bytes < 1:
        raise ValueError(f"chunk_bytes is {chunk_bytes}; it must be positive")
    for start in range(0, size_bytes, chunk_bytes):
        yield start, min(chunk_bytes, size_bytes - start)
