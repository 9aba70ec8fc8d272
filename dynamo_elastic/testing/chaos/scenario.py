"""Which fault comes where, in which resize: everything in a run follows from its number."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from pathlib import Path

import msgspec

from dynamo_elastic.failpoints import Act

NARROW, WIDE = 2, 3
ANY_MOMENT = "any moment"


class Resize(StrEnum):
    """What is under way when the fault comes, and where the joiner comes from."""

    UP = "up"
    UP_PARKED = "up from parked"
    DOWN = "down"


class Fault(StrEnum):
    """What goes wrong around the processes, or in one of them, at a moment drawn by lot."""

    KILL = "kill -9"
    STOP = "SIGSTOP"
    ETCD_LEADER_KILLED = "etcd leader killed"
    ETCD_QUORUM_LOST = "etcd quorum lost for 10 s"
    PARTITION = "partition from etcd"
    SLOW_DISK = "slow disk: fsync takes 300 ms"
    ETCD_DISK_FULL = "etcd's disk full"
    LEASE_LOST = "lease lost during commit"
    CLOCK_JUMP = "clock jump by an hour"
    DISK_FULL = "state disk full"
    OUT_OF_MEMORY = "out of memory"
    PORT_TAKEN = "port taken"


@dataclass(frozen=True, slots=True)
class AtFailpoint:
    """`act` is done to `process` ('' for a coordinator or the agent) at a failpoint."""

    place: str
    process: str
    act: Act
    seconds: float = 0.0

    @property
    def file(self) -> str:
        """The name of the file that arms it."""
        return f"{self.process}:{self.place}" if self.process else self.place

    @property
    def content(self) -> str:
        return f"{self.act} {self.seconds:g}" if self.seconds else str(self.act)


@dataclass(frozen=True, slots=True)
class AtRandom:
    """`fault` meets `process` ('' if it is about none) `after_s` the resize was asked for."""

    fault: Fault
    process: str = ""
    after_s: float = 0.0

    @property
    def place(self) -> str:
        return ANY_MOMENT


@dataclass(frozen=True, slots=True)
class Scenario:
    """One run. `via` is a fault that leads to where `fault` then is. Slots are parts to be played:
    `slot2` joins or leaves, the others stay."""

    number: int
    resize: Resize
    fault: AtFailpoint | AtRandom
    via: AtFailpoint | None = None

    @property
    def ranks(self) -> int:
        return NARROW if self.resize is Resize.DOWN else WIDE

    def __str__(self) -> str:
        fault = self.fault
        what = fault.act if isinstance(fault, AtFailpoint) else fault.fault
        via = f", after {self.via.act} at {self.via.file}" if self.via else ""
        return f"{self.resize}: {what} of {fault.process or 'one'} at {fault.place}{via}"


def cast(scenario: Scenario, order: Sequence[str]) -> Scenario:
    """With the parts given to the shells of a deployment: `slotN` is played by `order[N]`."""
    fault, via = scenario.fault, scenario.via
    return replace(
        scenario,
        fault=replace(fault, process=_played_by(fault.process, order)),
        via=replace(via, process=_played_by(via.process, order)) if via is not None else None,
    )


def _played_by(process: str, order: Sequence[str]) -> str:
    kind = process.rstrip("0123456789")
    if kind not in ("slot", "engine"):
        return process
    return kind + order[int(process.removeprefix(kind))].removeprefix("slot")


ACTS = (Act.KILL, Act.STOP, Act.ERROR, Act.DELAY)
_SECONDS = {Act.STOP: 4.0, Act.DELAY: 1.0}
"""A stop outlives a lease of 3 s; a delay does not."""

_DETOURS: dict[Resize, tuple[tuple[AtFailpoint, str, tuple[str, ...]], ...]] = {
    Resize.UP: (
        (
            AtFailpoint("scale.before_check", "", Act.KILL),
            "",
            ("coordinator.elected", "scale.before_recover", "scale.before_abort"),
        ),
        (AtFailpoint("worker.check.begin", "slot2", Act.ERROR), "", ("scale.abort.commanded",)),
        (
            AtFailpoint("worker.check.begin", "slot2", Act.ERROR),
            "slot0",
            ("worker.abort.begin", "worker.abort.end", "engine.abort_epoch"),
        ),
        (AtFailpoint("agent.before_start", "", Act.KILL), "", ("agent.before_adopt",)),
        (AtFailpoint("worker.connect.begin", "slot1", Act.KILL), "slot1", ("worker.resumes",)),
    ),
    Resize.DOWN: (
        (
            AtFailpoint("scale.before_redistribute", "", Act.KILL),
            "",
            ("coordinator.elected", "scale.before_recover", "scale.before_abort"),
        ),
        (
            AtFailpoint("engine.after_open", "slot1", Act.KILL),
            "slot0",
            ("worker.load.begin", "worker.load.end", "engine.load_weights"),
        ),
        (AtFailpoint("engine.after_open", "slot1", Act.KILL), "", ("scale.load.commanded",)),
        (
            AtFailpoint("agent.before_detach", "", Act.ERROR),
            "",
            ("agent.before_end", "agent.engine_ended"),
        ),
    ),
}
"""A fault that leads to places that are not passed without one, the process, and the places: a
coordinator, an agent or a shell that takes over, an abort, an engine that is not parked, experts
that were lost with their rank."""

_LEFT_OUT = ("engine.status", "coordinator.elected", "scale.before_recover")
"""Passed every moment by every engine, whatever is under way; or not without a fault."""

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

Cell = tuple[Resize, AtFailpoint | AtRandom, AtFailpoint | None]


def _at(place: str, process: str, act: Act) -> AtFailpoint:
    return AtFailpoint(place, process, act, _SECONDS.get(act, 0.0))


def _failpoint_cells(resize: Resize) -> list[Cell]:
    """Each failpoint with each act; where several processes pass it, another one each time."""
    cells: list[Cell] = []
    for number, (place, processes) in enumerate(_own_places(resize)):
        for turn, act in enumerate(ACTS):
            process = processes[(number + turn) % len(processes)]
            cells.append((resize, _at(place, process, act), None))
    return cells


def _own_places(resize: Resize) -> list[tuple[str, tuple[str, ...]]]:
    """Failpoints of `resize`; of the other way up those that only it passes."""
    known = places().get(Resize.UP, {}) if resize is Resize.UP_PARKED else {}
    found = places().get(resize, {})
    return [(p, found[p]) for p in found if p not in known and p not in _LEFT_OUT]


def _detour_cells(resize: Resize) -> list[Cell]:
    detours = _DETOURS.get(resize, ())
    return [
        (resize, _at(place, process, act), via)
        for via, process, names in detours
        for place in names
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


def scenario(number: int) -> Scenario:
    """Run `number`: up and down in turns, each through all of its cells again and again, every time
    in another order."""
    down, nth = bool(number % 2), number // 2
    table = cells(down)
    order = list(range(len(table)))
    random.Random(f"{down} {nth // len(table)}").shuffle(order)
    resize, fault, via = table[order[nth % len(table)]]
    rng = random.Random(number)
    if isinstance(fault, AtRandom):
        after_s = round(rng.uniform(0.0, 1.5), 3)
        fault = AtRandom(fault.fault, fault.process, after_s)
    return Scenario(number, resize, fault, via)
