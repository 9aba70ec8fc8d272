"""All slots of a host: starts, parks, evicts and ends what is in them, one act at a time a slot."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import replace

from dynamo_elastic.agent.base import SlotState, SlotStatus, StartedEngine, Tier
from dynamo_elastic.agent.drain import Drain
from dynamo_elastic.agent.image_source import ImageSource
from dynamo_elastic.agent.ladder import Obstacle, Why
from dynamo_elastic.agent.parking import Parking
from dynamo_elastic.agent.pool import Eviction
from dynamo_elastic.agent.records import EngineRecord, ParkedRecord, clear
from dynamo_elastic.agent.slot import Slot
from dynamo_elastic.agent.start import Starter, StartRequest, end_process
from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.engine.base import SOCKET_FILE
from dynamo_elastic.errors import ElasticError, EngineError
from dynamo_elastic.failpoints import failpoint
from dynamo_elastic.metrics import AgentMetrics
from dynamo_elastic.snapshot.process import alive, kill_session
from dynamo_elastic.types import Incarnation

_REMAINS_TIMEOUT_S = 5.0
_log = logging.getLogger(__name__)


class Slots:
    """The slots of one deployment on this host. A slot has at most one engine, serving or parked,
    and at most one start under way."""

    def __init__(
        self,
        config: DeploymentConfig,
        images: ImageSource,
        starter: Starter,
        parking: Parking,
        drain: Drain,
        metrics: AgentMetrics,
    ) -> None:
        self._config = config
        self._images = images
        self._starter = starter
        self._parking = parking
        self._drain = drain
        self._metrics = metrics
        self._slots = [Slot(number) for number in range(config.scale.max_ranks)]

    def adopt(self, found: Mapping[int, EngineRecord | ParkedRecord]) -> None:
        """Go on with what an earlier agent left, by slot."""
        for number, record in found.items():
            slot = self._slots[number]
            slot.adopt(record)
            self._watch(slot)
        self._gauge()

    async def start(self, request: StartRequest) -> StartedEngine:
        """See agent.base.Agent.start_engine."""
        slot = self._slot(request.slot)
        if slot.state is SlotState.SERVING and slot.engine is not None:
            if not alive(slot.engine.process):
                self._ended(slot)
            elif slot.lease == request.lease:
                return slot.engine.started(self._config.control_dir(slot.number))
        slot.check(request.lease)
        if slot.starting is None:
            self._drain.check()
            slot.claim(request.lease)
            slot.starting = asyncio.create_task(self._start(slot, request))
        # Shielded: a caller that goes away and asks again finds the same start.
        record = await asyncio.shield(slot.starting)
        return record.started(self._config.control_dir(slot.number))

    async def stop(self, number: int, incarnation: Incarnation) -> None:
        """See agent.base.Agent.stop_engine. A start under way has no incarnation yet and is left
        alone."""
        slot = self._slot(number)
        if not _holds(slot, incarnation):
            return
        async with slot.lock:
            if _holds(slot, incarnation):
                await self._end(slot)

    async def park(self, number: int, incarnation: Incarnation, *, timeout_s: float) -> str:
        """See agent.base.Agent.park_engine."""
        slot = self._slot(number)
        if not _holds(slot, incarnation):
            return ""
        async with slot.lock:
            if not _holds(slot, incarnation):
                return ""
            reason = await self._park(slot, timeout_s)
        self._metrics.parks.labels("failed" if reason else "ok").inc()
        await self.keep_bounds()
        return reason

    async def evict(self, number: int, why: Eviction) -> bool:
        """End the engine that is parked in the slot; False if none is."""
        slot = self._slot(number)
        async with slot.lock:
            if slot.state is not SlotState.PARKED:
                return False
            await self._end(slot)
        self._count_eviction(number, why)
        return True

    async def evict_all(self, why: Eviction) -> tuple[int, ...]:
        """End every parked engine; the slots that had one."""
        return tuple([s.number for s in self._slots if await self.evict(s.number, why)])

    async def keep_bounds(self) -> None:
        """Evict what is parked for too long or too much."""
        for number, why in self._parking.out_of_bounds(self._parked).items():
            await self.evict(number, why)

    async def cancel_starts(self) -> None:
        """Undo every start under way."""
        tasks = [slot.starting for slot in self._slots if slot.starting is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def end_all(self) -> None:
        """No process is left in any slot."""
        await self.cancel_starts()
        for slot in self._slots:
            async with slot.lock:
                await self._end(slot)

    def release(self) -> None:
        """Look after the slots no longer; what is in them lives on."""
        for slot in self._slots:
            slot.unwatch()
            self._images.release(slot.number)

    @property
    def serving(self) -> tuple[int, ...]:
        return tuple(slot.number for slot in self._slots if slot.engine is not None)

    @property
    def _parked(self) -> list[ParkedRecord]:
        return [slot.parked for slot in self._slots if slot.parked is not None]

    def status(self) -> tuple[SlotStatus, ...]:
        """Of every slot. Looks at images: not for the event loop's thread."""
        now_s = time.time()
        said = (s.status(self._images.newest(s.number), now_s) for s in self._slots)
        return tuple(replace(s, socket_path=self._socket_path(s)) for s in said)

    def _socket_path(self, status: SlotStatus) -> str:
        serves = status.state is SlotState.SERVING
        return str(self._config.control_dir(status.slot) / SOCKET_FILE) if serves else ""

    def _slot(self, number: int) -> Slot:
        if not 0 <= number < len(self._slots):
            raise EngineError(f"slot {number}: this host has 0-{len(self._slots) - 1}")
        return self._slots[number]

    async def _start(self, slot: Slot, request: StartRequest) -> EngineRecord:
        try:
            async with slot.lock:
                parked = await self._take_parked(slot, request.tiers)
                slot.move(SlotState.STARTING)
                slot.parked = None
                record = None
                try:
                    record = await self._starter.start(request, parked)
                finally:
                    came_back = record is not None and record.tier is Tier.PARKED
                    if isinstance(parked, ParkedRecord) and not came_back:
                        self._count_eviction(slot.number, Eviction.FAILED)
                    if record is None:
                        slot.free()
                slot.move(SlotState.SERVING)
                slot.engine = record
                self._watch(slot)
                return record
        except BaseException:
            slot.lease = None
            raise
        finally:
            slot.starting = None
            self._gauge()

    async def _take_parked(self, slot: Slot, wanted: tuple[Tier, ...]) -> ParkedRecord | Obstacle:
        """The engine parked in the slot, if it may be used; else it is ended, and why."""
        parked = slot.parked
        if parked is None:
            return self._parking.nothing()
        if Tier.PARKED not in wanted or slot.state is SlotState.ENDING:
            await self._end(slot)
            self._count_eviction(slot.number, Eviction.UNWANTED)
            return self._parking.nothing()
        misfit = await asyncio.to_thread(self._parking.misfit, parked)
        if misfit:
            await self._end(slot)
            self._count_eviction(slot.number, Eviction.MISFIT)
            return Obstacle(Why.MISFIT, misfit)
        slot.unwatch()
        return parked

    async def _park(self, slot: Slot, timeout_s: float) -> str:
        record = slot.engine
        if record is None:
            return ""
        refusal = self._parking.refusal()
        if refusal is not None:
            await self._end(slot)
            return refusal[1]
        slot.move(SlotState.PARKING)
        slot.unwatch()
        try:
            slot.parked = await self._parking.park(record, timeout_s=timeout_s)
        except (ElasticError, OSError) as exc:
            _log.warning("slot %d: the engine could not be parked: %s", slot.number, exc)
            await self._end(slot)
            return str(exc)
        slot.move(SlotState.PARKED)
        slot.engine = slot.lease = None
        self._watch(slot)
        self._gauge()
        return ""

    async def _end(self, slot: Slot) -> None:
        """End what is in the slot, whether it serves, is parked, or could not be ended before. The
        caller has the lock. Raises EngineError, and may be told again."""
        record = slot.engine or slot.parked
        if record is None:
            return
        slot.move(SlotState.ENDING)
        slot.unwatch()
        failpoint("agent.before_end")
        await end_process(record.process)
        failpoint("agent.engine_ended")
        self._forget(slot)

    def _watch(self, slot: Slot) -> None:
        record = slot.engine or slot.parked
        if record is not None:
            slot.watch(record.process, lambda: self._ended(slot))

    def _ended(self, slot: Slot) -> None:
        """The process in the slot is gone, and nobody here has ended it."""
        _log.error("slot %d: the %s engine ended by itself", slot.number, slot.state.value)
        slot.unwatch()
        record = slot.engine or slot.parked
        if record is not None:
            # Now, and not beside a start: descendants have pids that the slot's images need.
            kill_session(record.process, timeout_s=_REMAINS_TIMEOUT_S)
        if slot.parked is not None:
            self._count_eviction(slot.number, Eviction.DIED)
        self._forget(slot)

    def _forget(self, slot: Slot) -> None:
        if slot.engine is not None:
            slot.lease = None
        slot.free()
        clear(self._config.control_dir(slot.number))
        self._images.release(slot.number)
        self._gauge()

    def _count_eviction(self, number: int, why: Eviction) -> None:
        _log.info("slot %d: parked engine evicted: %s", number, why.value)
        self._metrics.evictions.labels(why).inc()

    def _gauge(self) -> None:
        self._metrics.parked_engines.set(len(self._parked))
        self._metrics.parked_bytes.set(sum(p.host_bytes for p in self._parked))


def _holds(slot: Slot, incarnation: Incarnation) -> bool:
    return slot.engine is not None and slot.engine.incarnation == incarnation
