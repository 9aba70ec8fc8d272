"""Failpoints that only an engine on a GPU passes, and what leads there. They are played on one GPU,
by benchmarks/gpu_failpoints.py: ranks that share it, then an agent that parks and restores."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dynamo_elastic.failpoints import Act

FIRST_ON_GPU = 200_000
ACTS = (Act.KILL, Act.ERROR, Act.STOP, Act.DELAY)
_SECONDS = {Act.STOP: 1.5, Act.DELAY: 0.2}
"""A stop outlives what ranks wait for a silent peer; a delay does not."""


class Move(StrEnum):
    """What is under way."""

    JOIN = "a rank joins and leaves"
    RESTORE = "an agent restores an image"
    PARK = "an agent parks an engine"
    UNPARK = "an agent brings a parked engine back"


BY_MOVE: dict[Move, tuple[str, ...]] = {
    Move.JOIN: (
        *("memory.before_access", "transfer.before_map"),
        *("buffer.made", "buffer.before_connect", "buffer.connected", "buffer.before_activate"),
        *("buffer.before_deactivate", "buffer.before_disconnect", "buffer.before_destroy"),
        *("rebind.planned", "rebind.before_node", "graphs.before_check", "graphs.before_capture"),
    ),
    Move.RESTORE: ("restore.before_thaw", "cuda.restore", "restore.thawed"),
    Move.PARK: ("cuda.lock", "cuda.checkpoint"),
    Move.UNPARK: ("unpark.checked", "cuda.unlock"),
}
VIA = {"graphs.before_capture": "rebind.planned"}
"""Passed only after an error there."""


@dataclass(frozen=True, slots=True)
class GpuScenario:
    """One run."""

    number: int
    move: Move
    place: str
    act: Act

    @property
    def content(self) -> str:
        """Of the file that arms it."""
        seconds = _SECONDS.get(self.act)
        return f"{self.act} {seconds:g}" if seconds else str(self.act)

    def __str__(self) -> str:
        via = f", after an error at {VIA[self.place]}" if self.place in VIA else ""
        return f"{self.move}: {self.act} at {self.place}{via}"


def gpu_scenarios(*moves: Move) -> tuple[GpuScenario, ...]:
    """Those of `moves`: each failpoint with each act, one act after the other, so that whoever has
    no time for all of them has been everywhere."""
    runs = [(m, place, act) for act in ACTS for m in Move for place in BY_MOVE[m]]
    numbered = (GpuScenario(FIRST_ON_GPU + n, *run) for n, run in enumerate(runs))
    return tuple(s for s in numbered if s.move in moves)


def gpu_places() -> frozenset[str]:
    """Every failpoint for which there is a run."""
    return frozenset(place for places in BY_MOVE.values() for place in places)
