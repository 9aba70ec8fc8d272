"""Which schedules are run: every place x mishap x kind of operation, then random ones."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

from dynamo_elastic.engine.rpc import CALLS
from dynamo_elastic.phases import Kind, Step, phases_of
from dynamo_elastic.testing.simulation import COORDINATOR, SLOTS, Schedule
from dynamo_elastic.testing.simulation_faults import Mishap

COORDINATOR_PLACES = tuple(
    sorted(
        {f"scale.{when}_{p}" for k in Kind for p in phases_of(k) for when in ("before", "after")}
        | {"scale.before_abort", "scale.before_close"}
    )
)
WORKER_PLACES = tuple(f"worker.{step}.{at}" for step in Step for at in ("begin", "end"))
ENGINE_CALLS = tuple(call for call in CALLS if call not in ("status", "submit", "cancel"))
"""The engine's part in operations; requests are no part of the simulation."""

SHELL_PLACES = (
    *WORKER_PLACES,
    *(f"engine.{call}" for call in ENGINE_CALLS),
    "agent.start_engine",
    "agent.stop_engine",
)
WIDTHS = {Kind.BOOT: (2,), Kind.UP: (4,), Kind.DOWN: (4, 2)}
"""Targets that make an operation of each kind happen, the last of it the one of interest."""

_STATIC = [(COORDINATOR, place) for place in COORDINATOR_PLACES]
_SHELLS = [(f"slot{k}", place) for k in range(SLOTS) for place in SHELL_PLACES]


def systematic() -> Iterator[Schedule]:
    """One fault each: every process x place x mishap x kind, the first or second time it comes
    by there, with and without spare replicas of the experts."""
    cases = product(_STATIC + _SHELLS, Mishap, WIDTHS.values(), (0, 1), (4, 2))
    for seed, ((process, place), mishap, widths, nth, slots) in enumerate(cases):
        yield Schedule(seed, widths, ((process, place, mishap, nth),), slots)


def scrambled(seed: int) -> Schedule:
    """Up to four faults, and up to three targets, that may come while others are under way."""
    rng = random.Random(f"schedule {seed}")
    faults = tuple(
        (*rng.choice(_STATIC if rng.random() < 0.25 else _SHELLS), rng.choice(list(Mishap)), nth)
        for nth in (rng.choice((0, 0, 0, 1, 2)) for _ in range(rng.randint(1, 4)))
    )
    widths = tuple(rng.choice((2, 3, 4)) for _ in range(rng.randint(1, 3)))
    return Schedule(seed, widths, faults, rng.choice((4, 4, 2)))
