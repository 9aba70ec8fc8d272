"""Which images of a catalog have to go, and why: a pure policy, and its execution."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dynamo_elastic.errors import SnapshotInUse, SnapshotNewer, SnapshotNotFound
from dynamo_elastic.snapshot.catalog import Catalog
from dynamo_elastic.snapshot.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of a catalog. `max_images_per_slot` counts the images of one deployment's slot."""

    max_images_per_slot: int
    max_bytes: int
    max_age_s: float
    """Since an image was last used."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a deployment knows of an image: `stale` says why it can't run here ('' if it can),
    `ours` whether it is this deployment's, so that the bound by slot is ours to apply."""

    ours: bool
    stale: str


Judge = Callable[[Manifest], Judgement]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One whole image. `last_used`: seconds since the epoch."""

    manifest: Manifest
    last_used: float
    judgement: Judgement


@dataclass(frozen=True, slots=True)
class Eviction:
    image_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class PruneReport:
    """`removed` is gone (would go, in a dry run); `kept` should go and could not: it is in use."""

    removed: tuple[Eviction, ...]
    kept: tuple[Eviction, ...]
    partials: tuple[str, ...]
    left_bytes: int


def evictions(candidates: Sequence[Candidate], bounds: Bounds, now: float) -> tuple[Eviction, ...]:
    """Stale ones, unused ones, too many of a slot, then the least recently used until the rest
    fits into max_bytes. Each image is named once, with its first reason."""
    found: list[Eviction] = []
    left: list[Candidate] = []
    per_slot: dict[str, int] = {}

    def made(candidate: Candidate) -> tuple[str, str]:
        return candidate.manifest.created_at, candidate.manifest.image_id

    for candidate in sorted(candidates, key=made, reverse=True):
        where = candidate.manifest.fingerprint.control_dir
        reason = _own_reason(candidate, bounds, now)
        if not reason and candidate.judgement.ours:
            per_slot[where] = per_slot.get(where, 0) + 1
            if per_slot[where] > bounds.max_images_per_slot:
                reason = f"more than {bounds.max_images_per_slot} of its slot"
        if reason:
            found.append(Eviction(candidate.manifest.image_id, reason))
        else:
            left.append(candidate)
    return (*found, *_over_bytes(left, bounds.max_bytes))


def _own_reason(candidate: Candidate, bounds: Bounds, now: float) -> str:
    if candidate.judgement.stale:
        return f"stale: {candidate.judgement.stale}"
    if now - candidate.last_used > bounds.max_age_s:
        return f"unused for more than {bounds.max_age_s:g} s"
    return ""


def _over_bytes(candidates: Sequence[Candidate], max_bytes: int) -> list[Eviction]:
    total = sum(candidate.manifest.size_bytes for candidate in candidates)
    found = []
    for candidate in sorted(candidates, key=lambda c: (c.last_used, c.manifest.image_id)):
        if total <= max_bytes:
            break
        total -= candidate.manifest.size_bytes
        reason = f"least recently used of more than {max_bytes} bytes"
        found.append(Eviction(candidate.manifest.image_id, reason))
    return found


def prune(catalog: Catalog, bounds: Bounds, judge: Judge, *, dry_run: bool = False) -> PruneReport:
    """The catalog is within its bounds, but for images in use; damaged images and what dead writers
    left are gone. With `dry_run` nothing is changed. Raises SnapshotError if the file system does
    not let us."""
    candidates: list[Candidate] = []
    doomed: list[Eviction] = []
    for image_id, entry in catalog.entries().items():
        if isinstance(entry, SnapshotNewer):
            continue  # of a newer version that was here, and may be again
        if not isinstance(entry, Manifest):
            doomed.append(Eviction(image_id, f"damaged: {entry}"))
            continue
        try:
            last_used = catalog.last_used(image_id)
        except FileNotFoundError:
            continue
        candidates.append(Candidate(entry, last_used, judge(entry)))
    doomed += evictions(candidates, bounds, time.time())
    partials = catalog.partials()
    removed, kept = _carry_out(catalog, doomed, dry_run)
    if not dry_run:
        catalog.remove_partials()
    gone = {eviction.image_id for eviction in removed}
    left = sum(c.manifest.size_bytes for c in candidates if c.manifest.image_id not in gone)
    return PruneReport(removed, kept, partials, left)


def _carry_out(
    catalog: Catalog, doomed: Sequence[Eviction], dry_run: bool
) -> tuple[tuple[Eviction, ...], tuple[Eviction, ...]]:
    removed: list[Eviction] = []
    kept: list[Eviction] = []
    for eviction in doomed:
        try:
            if dry_run:
                catalog.check_unused(eviction.image_id)
            else:
                catalog.remove(eviction.image_id)
        except SnapshotInUse as exc:
            kept.append(Eviction(eviction.image_id, f"{eviction.reason}; {exc}"))
        except SnapshotNotFound:
            continue  # somebody else was faster
        else:
            removed.append(eviction)
    return tuple(removed), tuple(kept)
