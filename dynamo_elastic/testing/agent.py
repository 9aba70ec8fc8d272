"""An agent without processes: every start succeeds at once, or fails as it was told."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dynamo_elastic.agent.base import Lease, SlotState, SlotStatus, StartedEngine, Tier
from dynamo_elastic.errors import SlotLeased
from dynamo_elastic.types import Epoch, Incarnation, OperationId, WorkerId

FIRST_PID = 100_000
"""Above any real pid_max of a test machine's default, so that nothing real is ever meant."""


class FakeAgent:
    """agent.base.Agent in memory. `on_start(slot, incarnation)` stands for the engine's boot and
    may raise; its result is the socket path. `images`: slot -> image id. Engines are parked only if
    `parks`; then each is parked for good."""

    def __init__(
        self,
        slots: int,
        on_start: Callable[[int, Incarnation], str] = lambda slot, _: f"/nowhere/{slot}",
        images: Mapping[int, str] | None = None,
        *,
        parks: bool = False,
    ) -> None:
        self._slots = slots
        self._on_start = on_start
        self._images = images or {}
        self._parks = parks
        self._engines: dict[int, tuple[Lease, StartedEngine]] = {}
        self._parked: dict[int, int] = {}
        self._fences: dict[int, Epoch] = {}
        self._count = 0

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
        lease = Lease(operation_id, worker_id, epoch)
        if slot in self._engines:
            owner, engine = self._engines[slot]
            if owner == lease:
                return engine
        if epoch < self._fences.get(slot, Epoch(0)):
            raise SlotLeased(f"slot {slot}: epoch {epoch} is over")
        if slot in self._engines:
            raise SlotLeased(f"slot {slot} is leased to {self._engines[slot][0]}: stop it first")
        self._fences[slot] = epoch
        self._count += 1
        incarnation = Incarnation(f"{worker_id}-{self._count:08x}")
        tier, parked = self._tier(slot, tiers), self._parked.pop(slot, 0)
        engine = StartedEngine(
            incarnation=incarnation,
            pid=parked if tier is Tier.PARKED else FIRST_PID + self._count,
            socket_path=self._on_start(slot, incarnation),
            tier=tier,
            ready_s=0.0,
        )
        self._engines[slot] = (lease, engine)
        return engine

    async def stop_engine(self, slot: int, incarnation: Incarnation) -> None:
        if slot in self._engines and self._engines[slot][1].incarnation == incarnation:
            del self._engines[slot]

    async def park_engine(self, slot: int, incarnation: Incarnation, *, timeout_s: float) -> str:
        if slot not in self._engines or self._engines[slot][1].incarnation != incarnation:
            return ""
        _, engine = self._engines.pop(slot)
        if not self._parks:
            return "this fake parks nothing"
        self._parked[slot] = engine.pid
        return ""

    async def slots(self) -> tuple[SlotStatus, ...]:
        return tuple(self._status(slot) for slot in range(self._slots))

    async def close(self) -> None:
        return

    def lose(self, slot: int) -> None:
        """The engine of `slot` dies by itself."""
        del self._engines[slot]

    def _tier(self, slot: int, tiers: tuple[Tier, ...]) -> Tier:
        there = {Tier.PARKED: slot in self._parked, Tier.IMAGE: slot in self._images}
        return next((t for t in tiers if there.get(t)), Tier.COLD)

    def _status(self, slot: int) -> SlotStatus:
        image_id = self._images.get(slot, "")
        if slot in self._parked:
            return SlotStatus(slot, image_id, pid=self._parked[slot], state=SlotState.PARKED)
        if slot not in self._engines:
            return SlotStatus(slot, image_id)
        lease, engine = self._engines[slot]
        return SlotStatus(
            slot=slot,
            image_id=image_id,
            incarnation=engine.incarnation,
            pid=engine.pid,
            tier=engine.tier.value,
            state=SlotState.SERVING,
            held_by=str(lease),
            socket_path=engine.socket_path,
        )
