"""Which schedules are run: every place x mishap x kind of operation, then random ones."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

from dynamo_elastic.engine.rpc import CALLS
from dynamo_elastic.failpoint_table import FAILPOINTS, Actor
from dynamo_elastic.testing.simulation import COORDINATOR, SLOTS, Schedule
from dynamo_elastic.testing.simulation_faults import Mishap
from dynamo_elastic.testing.simulation_parts import DROPPED

COORDINATOR_PLACES = tuple(f.name for f in FAILPOINTS if f.actor is Actor.COORDINATOR)
ENGINE_CALLS = tuple(call for call in CALLS if call not in ("status", "submit", "cancel", "detach"))
"""The engine's part in operations: requests are no part of the simulation, and its agent parks."""

SHELL_PLACES = (
    *(f.name for f in FAILPOINTS if f.actor is Actor.SHELL),
    *(f"engine.{call}" for call in ENGINE_CALLS),
    *("agent.start_engine", "agent.stop_engine", "agent.park_engine", DROPPED),
)
WIDTHS = ((2,), (4,), (4, 2))
"""Targets. The first makes a boot happen alone, the second a boot and a scale-up, the third a
scale-down after these."""
DEAF_FROM = 2
"""Calls of decide() that a rank hears in an operation that it is a member of."""

_STATIC = [(COORDINATOR, place) for place in COORDINATOR_PLACES]
_SHELLS = [(f"slot{k}", place) for k in range(SLOTS) for place in SHELL_PLACES]

_Fault = tuple[str, str, str, int]

_IN_AN_ABORT = (
    *("scale.before_abort", "scale.abort.commanded", "worker.abort."),
    *("engine.abort_", "engine.readmit"),
)
_OF_A_NEW_LEADER = ("coordinator.elected", "scale.before_recover")
_IN_A_WITHDRAWAL = ("scale.before_withdraw", "scale.withdraw.", "worker.withdraw.")
_OF_THE_EVICTED = ("worker.evicted", "agent.stop_engine")
_OF_THE_DROPPED = ("registration.before_repair",)


def way(process: str, place: str, operation: int) -> tuple[_Fault, ...]:
    """What has to go wrong in that operation (from 0) for `process` to come by `place` at all."""
    if place.startswith(_IN_AN_ABORT):
        return (("slot1", "worker.connect.begin", Mishap.ERROR, operation),)
    if place.startswith(_OF_A_NEW_LEADER):
        return ((COORDINATOR, "scale.before_commit", Mishap.CRASH, operation),)
    if place.startswith(_IN_A_WITHDRAWAL):
        return (("slot0", "engine.decide", Mishap.STUCK, DEAF_FROM * operation),)
    if place.startswith(_OF_THE_EVICTED):
        return ((process, "engine.decide", Mishap.STUCK, DEAF_FROM * operation),)
    if place.startswith(_OF_THE_DROPPED):
        return ((process, DROPPED, Mishap.STUCK, 0),)
    return ()


def systematic() -> Iterator[Schedule]:
    """One fault each: every process x place x mishap x kind, at each time that it comes by there
    up to the last operation, with and without spare replicas of the experts."""
    seed = 0
    for (process, place), mishap, (last, widths), slots in product(
        _STATIC + _SHELLS, Mishap, enumerate(WIDTHS), (4, 2)
    ):
        for nth in range(last + 1):
            faults = (*way(process, place, last), (process, place, mishap, nth))
            yield Schedule(seed, widths, faults, slots)
            seed += 1


def scrambled(seed: int) -> Schedule:
    """Up to four faults, and up to three targets, that may come while others are under way."""
    rng = random.Random(f"schedule {seed}")
    faults = tuple(
        (*rng.choice(_STATIC if rng.random() < 0.25 else _SHELLS), rng.choice(list(Mishap)), nth)
        for nth in (rng.choice((0, 0, 0, 1, 2)) for _ in range(rng.randint(1, 4)))
    )
    widths = tuple(rng.choice((2, 3, 4)) for _ in range(rng.randint(1, 3)))
    return Schedule(seed, widths, faults, rng.choice((4, 4, 2)))
