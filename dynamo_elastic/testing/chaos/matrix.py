"""Which fault comes where, in which resize: everything in a run follows from its number."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

import msgspec

from dynamo_elastic.testing.chaos.detours import DETOURS
from dynamo_elastic.testing.chaos.gpu_scenario import gpu_places
from dynamo_elastic.testing.chaos.image_scenario import ImageScenario, image_cells
from dynamo_elastic.testing.chaos.scenario import (
    ACTS,
    ANY_MOMENT,
    AtFailpoint,
    AtRandom,
    Fault,
    Occasion,
    Resize,
    Scenario,
    at_failpoint,
)

T = TypeVar("T")

_LEFT_OUT = ("coordinator.elected", "scale.before_recover")
"""Not passed without a fault."""

_PLACES_FILE = Path(__file__).with_name("places.json")


@cache
def places() -> dict[Resize, dict[str, tuple[str, ...]]]:
    """Resize -> failpoint -> in which processes it is passed ('': a coordinator, the agent), as
    `dynamo-elastic-chaos discover` has seen it."""
    read = msgspec.json.decode(_PLACES_FILE.read_bytes(), type=dict[str, dict[str, list[str]]])
    return {
        Resize(resize): {name: tuple(scopes) for name, scopes in sorted(passed.items())}
        for resize, passed in read.items()
    }


_AROUND: tuple[tuple[Fault, tuple[str, ...]], ...] = (
    (Fault.KILL, ("coordinator", "agent", "slot0", "slot2", "engine0", "engine2")),
    (Fault.STOP, ("coordinator", "agent", "slot1", "slot2", "engine1", "engine2")),
    (Fault.ETCD_LEADER_KILLED, ("",)),
    (Fault.ETCD_QUORUM_LOST, ("",)),
    (Fault.PARTITION, ("coordinator", "slot0", "slot2")),
    (Fault.SLOW_DISK, ("",)),
    (Fault.ETCD_DISK_FULL, ("",)),
    (Fault.LEASE_LOST, ("coordinator", "slot0")),
    (Fault.CLOCK_JUMP, ("coordinator",)),
    (Fault.DISK_FULL, ("",)),
    (Fault.OUT_OF_MEMORY, ("coordinator", "agent", "slot1")),
    (Fault.PORT_TAKEN, ("coordinator",)),
)

Cell = tuple[Resize, AtFailpoint | AtRandom, AtFailpoint | Occasion | None]


def _failpoint_cells(resize: Resize) -> list[Cell]:
    """Each failpoint with each act; where several processes pass it, another one each time."""
    cells: list[Cell] = []
    for number, (place, processes) in enumerate(_own_places(resize)):
        for turn, act in enumerate(ACTS):
            process = processes[(number + turn) % len(processes)]
            cells.append((resize, at_failpoint(place, process, act), None))
    return cells


def _own_places(resize: Resize) -> list[tuple[str, tuple[str, ...]]]:
    """Failpoints of `resize`; of the other way up those that only it passes."""
    known = places().get(Resize.UP, {}) if resize is Resize.UP_PARKED else {}
    found = places().get(resize, {})
    return [(p, found[p]) for p in found if p not in known and p not in _LEFT_OUT]


def _detour_cells(resize: Resize) -> list[Cell]:
    return [
        (resize, at_failpoint(place, detour.process, act), detour.via)
        for detour in DETOURS.get(resize, ())
        for place in detour.places
        for act in ACTS
    ]


def _around_cells(resize: Resize) -> list[Cell]:
    return [(resize, AtRandom(f, p), None) for f, processes in _AROUND for p in processes]


@cache
def cells(down: bool) -> tuple[Cell, ...]:
    """Every cell of the matrix for resizes up, or down."""
    if down:
        kinds: tuple[Resize, ...] = (Resize.DOWN,)
    else:
        kinds = (Resize.UP, Resize.UP_PARKED)
    first = kinds[0]
    found = [c for kind in kinds for c in _failpoint_cells(kind)]
    return (*found, *_detour_cells(first), *_around_cells(first))


FIRST_ON_IMAGES = 100_000
"""Runs from this number on are work on images, beside a deployment that serves."""


def scenario(number: int) -> Scenario | ImageScenario:
    """Run `number`. Resizes go up and down in turns, each through all of its cells again and again,
    every time in another order; so does the work on images."""
    if number >= FIRST_ON_IMAGES:
        nth = number - FIRST_ON_IMAGES
        return ImageScenario(number, *_nth(image_cells(), nth, "images"))
    down, nth = bool(number % 2), number // 2
    resize, fault, via = _nth(cells(down), nth, str(down))
    rng = random.Random(number)
    if isinstance(fault, AtRandom):
        after_s = round(rng.uniform(0.0, 1.5), 3)
        fault = AtRandom(fault.fault, fault.process, after_s)
    return Scenario(number, resize, fault, via)


def _nth(table: Sequence[T], nth: int, name: str) -> T:
    order = list(range(len(table)))
    random.Random(f"{name} {nth // len(table)}").shuffle(order)
    return table[order[nth % len(table)]]


def places_reached() -> frozenset[str]:
    """Failpoints for which there is a run."""
    of_resizes = (fault.place for down in (False, True) for _, fault, _ in cells(down))
    of_images = (fault.place for _, fault in image_cells())
    return frozenset({*of_resizes, *of_images, *gpu_places()} - {ANY_MOMENT})
