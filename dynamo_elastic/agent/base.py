"""What a worker shell asks of its host's agent."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from dynamo_elastic.types import NO_INCARNATION, Epoch, Incarnation, OperationId, WorkerId


class Tier(StrEnum):
    """Where an engine came from: the ladder, best first."""

    PARKED = "parked"
    IMAGE = "image"
    COLD = "cold"


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
    """One GPU slot of the host."""

    slot: int
    image_id: str
    """Newest usable snapshot, '' if there is none."""
    incarnation: Incarnation = NO_INCARNATION
    pid: int = 0
    tier: str = ""


class Agent(Protocol):
    """Calls may raise EngineError (with the reason) or EngineGone (the agent is not there)."""

    async def start_engine(
        self,
        slot: int,
        worker_id: WorkerId,
        operation_id: OperationId,
        epoch: Epoch,
        *,
        tiers: tuple[Tier, ...] = (Tier.PARKED, Tier.IMAGE, Tier.COLD),
        timeout_s: float,
    ) -> StartedEngine:
        """Bring an engine to life in `slot` from the first tier that works. Idempotent by
        operation id: asked again it returns the same engine. An engine of another operation in the
        slot is an error."""
        ...

    async def stop_engine(self, slot: int, incarnation: Incarnation) -> None:
        """End that engine (park it where the host can); any other engine is left alone. Returns
        when its process is gone. Idempotent."""
        ...

    async def slots(self) -> tuple[SlotStatus, ...]: ...

    async def close(self) -> None: ...
