"""What a run is: a resize, a fault in it, and what leads to where the fault then is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

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


class Occasion(StrEnum):
    """What is no fault, but leads to a failpoint that a resize does not pass."""

    CLIENT_LEAVES = "a client leaves its stream"
    INSTANCE_DROPPED = "Dynamo drops an instance"
    TARGET_REFUSED = "a target is refused"


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
    """One run. `via` leads to where `fault` then is: another fault, or an occasion before the
    resize. Slots are parts to be played: `slot2` joins or leaves, the others stay."""

    number: int
    resize: Resize
    fault: AtFailpoint | AtRandom
    via: AtFailpoint | Occasion | None = None

    @property
    def cell(self) -> tuple[str, str]:
        """Of the matrix: where, and what is done there."""
        fault = self.fault
        return fault.place, fault.act if isinstance(fault, AtFailpoint) else fault.fault

    @property
    def ranks(self) -> int:
        return NARROW if self.resize is Resize.DOWN else WIDE

    def __str__(self) -> str:
        place, what = self.cell
        return f"{self.resize}: {what} of {self.fault.process or 'one'} at {place}{self._via}"

    @property
    def _via(self) -> str:
        if isinstance(self.via, AtFailpoint):
            return f", after {self.via.act} at {self.via.file}"
        return f", after {self.via}" if self.via else ""


def cast(scenario: Scenario, order: Sequence[str]) -> Scenario:
    """With the parts given to the shells of a deployment: `slotN` is played by `order[N]`."""
    fault, via = scenario.fault, scenario.via
    return replace(
        scenario,
        fault=replace(fault, process=_played_by(fault.process, order)),
        via=replace(via, process=_played_by(via.process, order))
        if isinstance(via, AtFailpoint)
        else via,
    )


def _played_by(process: str, order: Sequence[str]) -> str:
    kind = process.rstrip("0123456789")
    if kind not in ("slot", "engine"):
        return process
    return kind + order[int(process.removeprefix(kind))].removeprefix("slot")


ACTS = (Act.KILL, Act.STOP, Act.ERROR, Act.DELAY)
_SECONDS = {Act.STOP: 4.0, Act.DELAY: 1.0}
"""A stop outlives a lease of 3 s; a delay does not."""


def at_failpoint(place: str, process: str, act: Act) -> AtFailpoint:
    """For as long as such an act lasts."""
    return AtFailpoint(place, process, act, _SECONDS.get(act, 0.0))
