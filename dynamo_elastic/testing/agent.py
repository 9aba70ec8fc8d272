"""An agent without processes: every start succeeds at once, or fails as it was told."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dynamo_elastic.agent.base import SlotStatus, StartedEngine, Tier
from dynamo_elastic.errors import EngineError
from dynamo_elastic.types import Epoch, Incarnation, OperationId, WorkerId

FIRST_PID = 100_000
"""Above any real pid_max of a test machine's default, so that nothing real is ever meant."""


class FakeAgent:
    """agent.base.Agent in memory. `on_start(slot, incarnation)` stands for the engine's boot and
    may raise; its result is the socket path. `images`: slot -> image id."""

    def __init__(
        self,
        slots: int,
        on_start: Callable[[int, Incarnation], str] = lambda slot, _: f"/nowhere/{slot}",
        images: Mapping[int, str] | None = None,
    ) -> None:
        self._slots = slots
        self._on_start = on_start
        self._images = images or {}
        self._engines: dict[int, tuple[OperationId, StartedEngine]] = {}
        self._count = 0

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
        if slot in self._engines:
            owner, engine = self._engines[slot]
            if owner != operation_id:
                raise EngineError(f"slot {slot} holds an engine of operation {owner}")
            return engine
        self._count += 1
        incarnation = Incarnation(f"{worker_id}-{self._count:08x}")
        engine = StartedEngine(
            incarnation=incarnation,
            pid=FIRST_PID + self._count,
            socket_path=self._on_start(slot, incarnation),
            tier=Tier.IMAGE if slot in self._images and Tier.IMAGE in tiers else Tier.COLD,
            ready_s=0.0,
        )
        self._engines[slot] = (operation_id, engine)
        return engine

    async def stop_engine(self, slot: int, incarnation: Incarnation) -> None:
        if slot in self._engines and self._engines[slot][1].incarnation == incarnation:
            del self._engines[slot]

    async def slots(self) -> tuple[SlotStatus, ...]:
        return tuple(self._status(slot) for slot in range(self._slots))

    async def close(self) -> None:
        return

    def lose(self, slot: int) -> None:
        """The engine of `slot` dies by itself."""
        del self._engines[slot]

    def _status(self, slot: int) -> SlotStatus:
        image_id = self._images.get(slot, "")
        if slot not in self._engines:
            return SlotStatus(slot, image_id)
        engine = self._engines[slot][1]
        return SlotStatus(slot, image_id, engine.incarnation, engine.pid, engine.tier.value)
