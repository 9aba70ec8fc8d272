"""What a simulated shell works with: Dynamo, the agent and engines, each suffering its faults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dynamo_elastic.agent.base import SlotStatus, StartedEngine, Tier
from dynamo_elastic.dynamo.base import Load
from dynamo_elastic.testing.agent import FakeAgent
from dynamo_elastic.testing.simulation_engine import SimulatedEngine
from dynamo_elastic.testing.simulation_faults import PROCESS, Process, suffer
from dynamo_elastic.testing.simulation_invariants import Invariants
from dynamo_elastic.types import Epoch, Incarnation, OperationId, WorkerId

if TYPE_CHECKING:
    from dynamo_elastic.testing.simulation import SimulatedDeployment


DROPPED = "dynamo.visible"
"""The place at which Dynamo drops a registration."""


class SimulatedRegistrar:
    """Dynamo for one shell: registered or not."""

    def __init__(self, worker: WorkerId, invariants: Invariants, process: Process) -> None:
        self.registered = False
        self._worker = worker
        self._invariants = invariants
        self._process = process

    async def register(self, runtime_data: Mapping[str, str]) -> int:
        self.registered = not self._process.dead
        self._invariants.admitted(self._worker)
        return 1

    async def unregister(self) -> None:
        if self.registered and not self._process.dead:
            self._invariants.unregistered(self._worker)
        self.registered = False

    def visible(self) -> bool:
        """False once Dynamo has dropped it: whatever the misfortune, that is what it does."""
        if self._process.misfortune.at(self._process.name, DROPPED) is not None:
            self.registered = False
        return self.registered

    def owns(self, instance_id: int) -> bool:
        return True

    def report(self, load: Load) -> None:
        """Nobody listens."""


class SimulatedAgent(FakeAgent):
    """An agent whose calls suffer what the calling process suffers."""

    def __init__(self, slots: int, deployment: SimulatedDeployment) -> None:
        super().__init__(
            slots, deployment.boot_engine, dict.fromkeys(range(slots), "image"), parks=True
        )
        self._deployment = deployment

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
        start = super().start_engine

        async def work() -> StartedEngine:
            return await start(
                slot, worker_id, operation_id, epoch, tiers=tiers, founds=founds,
                timeout_s=timeout_s,
            )  # fmt: skip

        started: Any = await self._suffer("agent.start_engine", slot, work)
        return started  # type: ignore[no-any-return]

    async def stop_engine(self, slot: int, incarnation: Incarnation) -> None:
        stop = super().stop_engine

        async def work() -> None:
            await stop(slot, incarnation)
            engine = self._deployment.fabric.engines.get(incarnation)
            if engine is not None:
                engine.die()

        await self._suffer("agent.stop_engine", slot, work)

    async def park_engine(self, slot: int, incarnation: Incarnation, *, timeout_s: float) -> str:
        park = super().park_engine

        async def work() -> str:
            reason = await park(slot, incarnation, timeout_s=timeout_s)
            # Whoever comes out of the slot next is another engine for its peers.
            engine = self._deployment.fabric.engines.get(incarnation)
            if engine is not None:
                engine.die()
            return reason

        parked: Any = await self._suffer("agent.park_engine", slot, work)
        return parked  # type: ignore[no-any-return]

    async def slots(self) -> tuple[SlotStatus, ...]:
        return tuple(self._status(slot) for slot in range(self._slots))

    async def _suffer(self, place: str, slot: int, work: Any) -> Any:
        process = PROCESS.get()
        if process is None:
            return await work()
        return await suffer(process, place, lambda: self._deployment.kill_engine(slot), work)


class SufferingEngine(SimulatedEngine):
    """An engine whose calls suffer what its shell's process suffers."""

    async def _enter(self, call: str) -> None:
        process = PROCESS.get()
        if process is not None and call != "status":

            async def nothing() -> None:
                return

            await suffer(process, f"engine.{call}", self.die, nothing)
        await super()._enter(call)
