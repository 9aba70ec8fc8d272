"""Engines of a simulated deployment: FakeEngines that switch together, as ranks in lockstep do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from dynamo_elastic.engine.base import EngineState, SwitchReport
from dynamo_elastic.errors import EngineError
from dynamo_elastic.testing.engine import FakeEngine
from dynamo_elastic.topology import Topology
from dynamo_elastic.types import Epoch, Incarnation


class Fabric:
    """All engines that live, and the groups that they step in."""

    def __init__(self, on_switch: Callable[[], None]) -> None:
        self.engines: dict[Incarnation, SimulatedEngine] = {}
        self._on_switch = on_switch

    def group(self, epoch: Epoch) -> list[SimulatedEngine]:
        """Engines that live and step in the group of `epoch`."""
        return [e for e in self.engines.values() if e.epoch == epoch]

    def advance(self) -> None:
        """Let every group switch that can: at one step boundary, all of its ranks at once."""
        for engine in list(self.engines.values()):
            pending = engine.ready
            if pending is not None and self._can_switch(engine.epoch, pending):
                self._switch(engine.epoch, pending)
                self._on_switch()

    def _can_switch(self, epoch: Epoch, pending: Topology) -> bool:
        """True once all who live and are members of both groups, and all joiners, are ready."""
        retained = self.group(epoch) if epoch else []
        stepping = {e.worker_id for e in retained}
        if not epoch and any(w in self._stepping() for w in pending.worker_ids):
            return False  # a joiner enters, and waits for those that serve
        members = [e for e in self.engines.values() if e.worker_id in pending.worker_ids]
        ready = {e.worker_id for e in members if e.ready and e.ready.epoch == pending.epoch}
        return all(e.worker_id in ready for e in members) and (
            bool(stepping & ready) or not stepping
        )

    def _stepping(self) -> set[str]:
        return {e.worker_id for e in self.engines.values() if e.topology is not None}

    def _switch(self, epoch: Epoch, pending: Topology) -> None:
        before = self.group(epoch) if epoch else []
        for engine in [e for e in self.engines.values() if e.ready]:
            if engine.worker_id in pending.worker_ids:
                engine.enter()
        for engine in before:
            if engine.worker_id not in pending.worker_ids:
                engine.leave()


@dataclass
class SimulatedEngine(FakeEngine):
    """An engine that has seen a decision waits for the others of its group."""

    fabric: Fabric | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._decided = Epoch(0)
        self._entered = asyncio.Event()
        self.act: Callable[[str], object] | None = None
        if self.fabric is not None:
            self.fabric.engines[self.incarnation] = self

    @property
    def epoch(self) -> Epoch:
        """Of the group that it steps in, 0 if it is in none."""
        return self.topology.epoch if self.topology else Epoch(0)

    @property
    def ready(self) -> Topology | None:
        """The pending topology, once its decision was seen."""
        pending = self._pending
        return pending if pending is not None and pending.epoch == self._decided else None

    @property
    def alive(self) -> bool:
        return not self._gone

    @property
    def pending(self) -> Topology | None:
        return self._pending

    def enter(self) -> None:
        """Switch to the pending group."""
        self.topology, self._pending = self._pending, None
        self.state = EngineState.SERVING
        self._entered.set()
        self._entered = asyncio.Event()

    def leave(self) -> None:
        """The group that it was in has switched without it."""
        self.topology, self.state = None, EngineState.LEFT

    def die(self) -> None:
        super().die()
        if self.fabric is not None:
            self.fabric.engines.pop(self.incarnation, None)
            self.fabric.advance()

    async def decide(self, epoch: Epoch) -> None:
        await self._enter("decide")
        if self.epoch == epoch:
            return
        if self._pending is None or self._pending.epoch != epoch:
            raise EngineError(f"epoch {epoch} is not connected here")
        self._decided = epoch
        if self.fabric is not None:
            self.fabric.advance()

    async def wait_switched(self, epoch: Epoch, *, timeout_s: float) -> SwitchReport:
        await self._enter("wait_switched")
        try:
            async with asyncio.timeout(timeout_s):
                while self.epoch != epoch:
                    await self._entered.wait()
        except TimeoutError as exc:
            raise EngineError(f"no switch to epoch {epoch} within {timeout_s:g} s") from exc
        return SwitchReport(epoch, 0.001, 0.002)
