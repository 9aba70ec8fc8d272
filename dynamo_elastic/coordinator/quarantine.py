"""Slots and images that failed twice in a row as joiners are left out for a while. Pure.

A suspect is 'slot2' or, while its engine came from an image, 'slot2/image'. Strikes travel from
operation record to operation record; success or time clears them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dynamo_elastic.coordinator.records import OperationRecord, Strike
from dynamo_elastic.phases import Step
from dynamo_elastic.types import WorkerId

MAX_STRIKES = 2
JUDGED = frozenset({Step.RESTORE, Step.CHECK, Step.CANARY})
"""A joiner that fails one of these may owe it to its slot or its image."""

_IMAGE = "/image"
_FROM_IMAGE = "image"

Strikes = Mapping[str, Strike]


def struck(record: OperationRecord, worker: WorkerId, why: str, now_s: float) -> dict[str, Strike]:
    """The strikes of `record`, with one more against what brought the engine of `worker` up."""
    suspect = worker + _IMAGE if _tier(record, worker) == _FROM_IMAGE else worker
    before = record.strikes.get(suspect)
    strike = Strike((before.count if before else 0) + 1, why, now_s)
    return {**record.strikes, suspect: strike}


def cleared(strikes: Strikes, workers: Iterable[WorkerId]) -> dict[str, Strike]:
    """Without those against `workers`, which have come to serve."""
    suspects = {s for w in workers for s in (w, w + _IMAGE)}
    return {s: strike for s, strike in strikes.items() if s not in suspects}


def remembered(strikes: Strikes, now_s: float, quarantine_s: float) -> dict[str, Strike]:
    """Without those that time has cleared."""
    return {s: k for s, k in strikes.items() if now_s - k.at_s < quarantine_s}


def quarantined(strikes: Strikes, now_s: float, quarantine_s: float) -> dict[str, str]:
    """Suspect -> reason, for those that are left out now."""
    lasting = remembered(strikes, now_s, quarantine_s)
    return {s: k.reason for s, k in lasting.items() if k.count >= MAX_STRIKES}


def released_s(strikes: Strikes, suspects: Iterable[str], quarantine_s: float) -> float | None:
    """When the first of `suspects` is let out (wall clock); None if there is none."""
    return min((strikes[s].at_s + quarantine_s for s in suspects), default=None)


def barred_slots(suspects: Iterable[str]) -> frozenset[WorkerId]:
    """Workers among `suspects` that may not join at all."""
    return frozenset(WorkerId(s) for s in suspects if not s.endswith(_IMAGE))


def barred_images(suspects: Iterable[str]) -> frozenset[WorkerId]:
    """Workers among `suspects` that may join, but not from their image."""
    return frozenset(WorkerId(s.removesuffix(_IMAGE)) for s in suspects if s.endswith(_IMAGE))


def _tier(record: OperationRecord, worker: WorkerId) -> str:
    """Where the engine of `worker` came from in this operation, '' before it was there."""
    for phase in reversed(record.phases):
        facts = phase.detail.get(Step.RESTORE, {}).get(worker)
        if facts is not None:
            return str(facts.get("tier", ""))
    return ""
