"""Which tiers an engine may come from, best first, and why the others are not used: pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dynamo_elastic.agent.base import Tier

NO_PARKED = "this host has no GPU whose engines could be parked"


@dataclass(frozen=True, slots=True)
class Ladder:
    """`rungs` to try in order; `skipped` says of each better tier why it is not among them."""

    rungs: tuple[Tier, ...]
    skipped: tuple[str, ...]


def choose(wanted: Sequence[Tier], obstacles: Mapping[Tier, str]) -> Ladder:
    """The tiers of `wanted`, best first, that no obstacle stands against.

    >>> choose([Tier.COLD, Tier.IMAGE], {Tier.IMAGE: "no image"})
    Ladder(rungs=(<Tier.COLD: 'cold'>,), skipped=('image: no image',))
    """
    order = [tier for tier in Tier if tier in wanted]
    return Ladder(
        rungs=tuple(tier for tier in order if tier not in obstacles),
        skipped=tuple(fell(tier, obstacles[tier]) for tier in order if tier in obstacles),
    )


def fell(tier: Tier, reason: str) -> str:
    """How a tier that was not used is reported."""
    return f"{tier.value}: {reason}"
