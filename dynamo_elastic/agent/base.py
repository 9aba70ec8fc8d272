"""What a worker shell asks of its host's agent, and what a GPU slot may be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from dynamo_elastic.types import NO_INCARNATION, Epoch, Incarnation, OperationId, WorkerId


class Tier(StrEnum):
    """Where an engine came from: the ladder, best first."""

    PARKED = "parked"
    """It was there all the time, without a GPU and without an identity."""
    IMAGE = "image"
    CACHED = "cached"
    """Booted, with what compilers left in their caches at an earlier boot."""
    COLD = "cold"


BOOTED = (Tier.CACHED, Tier.COLD)
"""The tiers that need nothing of an earlier process."""


class SlotState(StrEnum):
    """What a GPU slot is doing. It holds one serving engine or one parked engine, never both."""

    FREE = "free"
    STARTING = "starting"
    SERVING = "serving"
    PARKING = "parking"
    PARKED = "parked"
    ENDING = "ending"


_S = SlotState
SLOT_MOVES: Mapping[SlotState, frozenset[SlotState]] = {
    _S.FREE: frozenset({_S.STARTING}),
    _S.STARTING: frozenset({_S.SERVING, _S.FREE}),
    _S.SERVING: frozenset({_S.PARKING, _S.ENDING, _S.FREE}),
    _S.PARKING: frozenset({_S.PARKED, _S.ENDING, _S.FREE}),
    _S.PARKED: frozenset({_S.STARTING, _S.ENDING, _S.FREE}),
    _S.ENDING: frozenset({_S.FREE, _S.ENDING}),
}
"""SERVING and PARKED go to FREE by themselves when the process dies. A process that outlives
SIGKILL stays in ENDING, and may be told again."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Who holds a slot, from the request for an engine until that engine has left the slot."""

    operation_id: OperationId
    worker_id: WorkerId
    epoch: Epoch

    def __str__(self) -> str:
        return f"{self.worker_id} of operation {self.operation_id} at epoch {self.epoch}"


@dataclass(frozen=True, slots=True)
class StartedEngine:
    """An attached engine. `ready_s` runs from the agent's request to its first right step, NIXL
    agent included; `fell_through` says why each better tier was not used."""

    incarnation: Incarnation
    pid: int
    """In the agent's own pid namespace."""
    socket_path: str
    tier: Tier
    ready_s: float
    fell_through: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SlotStatus:
    """One GPU slot of the host. `incarnation`, `tier`, `held_by` and `fell_through` are those of
    the engine that serves; a parked engine has a pid alone."""

    slot: int
    image_id: str
    """Newest usable snapshot, '' if there is none."""
    incarnation: Incarnation = NO_INCARNATION
    pid: int = 0
    tier: str = ""
    state: SlotState = SlotState.FREE
    held_by: str = ""
    fell_through: tuple[str, ...] = ()
    socket_path: str = ""
    """Of the engine that serves."""
    parked_bytes: int = 0
    """Host memory of the parked engine."""
    parked_s: float = 0.0
    """For how long it has been parked."""


class Agent(Protocol):
    """Calls may raise EngineError (with the reason) or EngineGone (the agent is not there)."""

    async def start_engine(
        self,
        slot: int,
        worker_id: WorkerId,
        operation_id: OperationId,
        epoch: Epoch,
        *,
        tiers: tuple[Tier, ...] = tuple(Tier),
        founds: bool = False,
        timeout_s: float,
    ) -> StartedEngine:
        """Bring an engine to life in `slot` from the first tier that works, and lease the slot to
        the worker. `founds`: it is one of the first ranks, of which some kinds of engine boot
        together. Idempotent by operation, worker and epoch: asked again it returns the same
        engine. Raises SlotLeased, and does nothing, if somebody else holds the slot, or if it was
        leased at a higher epoch before."""
        ...

    async def stop_engine(self, slot: int, incarnation: Incarnation) -> None:
        """End that engine, and the lease; any other engine is left alone. Returns when its process
        is gone. Idempotent."""
        ...

    async def park_engine(self, slot: int, incarnation: Incarnation, *, timeout_s: float) -> str:
        """Like stop_engine(), but the process stays: without identity, weights, keys and GPU it
        waits in its slot for the next start. It must have left its group. Returns '' then (and if
        it is not there any more), or why it was ended instead."""
        ...

    async def slots(self) -> tuple[SlotStatus, ...]: ...

    async def close(self) -> None: ...
