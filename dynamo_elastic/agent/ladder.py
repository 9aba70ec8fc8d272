"""Which tiers an engine may come from, best first, and why the others are not used: pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from dynamo_elastic.agent.base import Tier


class Why(StrEnum):
    """Kinds of reasons for which a tier is not used."""

    DISABLED = "disabled"
    ABSENT = "absent"
    MISFIT = "misfit"
    """What there is was made for another world."""
    UNTRUSTED = "untrusted"
    """Nobody whom this host trusts has signed it."""
    QUARANTINED = "quarantined"
    UNUSABLE = "unusable"
    """The host can't do it."""
    NO_MEMORY = "no_memory"
    FAILED = "failed"
    """It was tried."""


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a tier can't be used now."""

    why: Why
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Fall:
    """A better tier that a start did not use."""

    tier: Tier
    obstacle: Obstacle

    def __str__(self) -> str:
        return f"{self.tier.value}: {self.obstacle}"


@dataclass(frozen=True, slots=True)
class Ladder:
    """`rungs` to try in order; `falls` says of each other wanted tier why it is not among them."""

    rungs: tuple[Tier, ...]
    falls: tuple[Fall, ...]


def choose(wanted: Sequence[Tier], obstacles: Mapping[Tier, Obstacle]) -> Ladder:
    """The tiers of `wanted`, best first, that no obstacle stands against.

    >>> choose([Tier.COLD, Tier.IMAGE], {Tier.IMAGE: Obstacle(Why.ABSENT, "none")}).rungs
    (<Tier.COLD: 'cold'>,)
    """
    order = [tier for tier in Tier if tier in wanted]
    return Ladder(
        rungs=tuple(tier for tier in order if tier not in obstacles),
        falls=tuple(Fall(tier, obstacles[tier]) for tier in order if tier in obstacles),
    )


def above(falls: Sequence[Fall], tier: Tier) -> tuple[Fall, ...]:
    """Those of tiers that are better than `tier`."""
    better = list(Tier)[: list(Tier).index(tier)]
    return tuple(fall for fall in falls if fall.tier in better)
