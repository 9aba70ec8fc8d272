"""Starting one engine: down the ladder until a rung holds, attach it, wait until it answers."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from dynamo_elastic.agent.base import BOOTED, Lease, Tier
from dynamo_elastic.agent.boot import Boots
from dynamo_elastic.agent.caches import JitCaches
from dynamo_elastic.agent.host import Host
from dynamo_elastic.agent.image_source import ImageSource, RunningImage
from dynamo_elastic.agent.ladder import Fall, Obstacle, Why, above, choose
from dynamo_elastic.agent.parking import unpark_engine
from dynamo_elastic.agent.ready import wait_detached, wait_ready
from dynamo_elastic.agent.records import (
    ENGINE_LOG,
    EngineRecord,
    ParkedRecord,
    clear,
    write_attach,
    write_record,
    write_started,
)
from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.dynamo.environment import engine_dynamo_environment
from dynamo_elastic.engine.base import Attach
from dynamo_elastic.errors import ElasticError, EngineError, GpuMemoryShort, ResourceMissing
from dynamo_elastic.failpoints import KILL_ONCE_DIR, failpoint
from dynamo_elastic.logs import log_fields
from dynamo_elastic.metrics import AgentMetrics
from dynamo_elastic.snapshot.gpu import Gpu
from dynamo_elastic.snapshot.process import ProcessRef, kill_session
from dynamo_elastic.types import Incarnation

_KILL_TIMEOUT_S = 10.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StartRequest:
    """One start. `began` and `deadline` are times of the running event loop."""

    slot: int
    lease: Lease
    tiers: tuple[Tier, ...]
    began: float
    deadline: float
    founds: bool = False


class Starter:
    """Starts engines of one deployment; starts of different slots may run side by side."""

    def __init__(
        self,
        config: DeploymentConfig,
        host: Host,
        images: ImageSource,
        boots: Boots,
        gpu: Gpu,
        metrics: AgentMetrics,
    ) -> None:
        self._config = config
        self._host = host
        self._images = images
        self._boots = boots
        self._gpu = gpu
        self._metrics = metrics
        self._caches = JitCaches(config.snapshot.catalog, config.snapshot.max_age_s)

    async def start(self, request: StartRequest, parked: ParkedRecord | Obstacle) -> EngineRecord:
        """An engine that answers, recorded. `parked` is the engine that waits in the slot, or why
        there is none to be used; whatever happens, it is parked no longer. Raises EngineError, with
        nothing left running, if no rung holds before the deadline."""
        lease = request.lease
        with log_fields(
            operation_id=lease.operation_id,
            epoch=lease.epoch,
            worker_id=lease.worker_id,
            slot=request.slot,
        ):
            return await self._climb(request, parked)

    async def _climb(self, request: StartRequest, parked: ParkedRecord | Obstacle) -> EngineRecord:
        obstacles = {Tier.PARKED: parked} if isinstance(parked, Obstacle) else {}
        for tier, obstacle in (await asyncio.to_thread(self._obstacles, request.slot)).items():
            if obstacle is not None:
                obstacles[tier] = obstacle
        if request.founds and self._boots.founder(request.slot) is not None:
            founder = Obstacle(Why.UNUSABLE, "the first ranks boot together")
            obstacles |= {tier: founder for tier in Tier if tier not in BOOTED}
        ladder = choose(request.tiers, obstacles)
        falls = list(ladder.falls)
        for tier in ladder.rungs:
            better = above(falls, tier)
            try:
                record = await self._from_tier(request, tier, parked, tuple(map(str, better)))
            except (ElasticError, ProcessLookupError) as exc:
                _log.warning("slot %d: tier %s failed: %s", request.slot, tier.value, exc)
                self._metrics.engine_starts.labels(tier, "failed").inc()
                falls.append(Fall(tier, Obstacle(_why(exc), str(exc))))
                continue
            self._metrics.engine_starts.labels(tier, "ok").inc()
            self._metrics.start_seconds.labels(tier).observe(record.ready_s)
            _log.info("engine from tier %s in %.3f s", tier.value, record.ready_s)
            self._count(better)
            return record
        self._count(falls)
        raise EngineError(f"no engine for slot {request.slot}: {'; '.join(map(str, falls))}")

    def _obstacles(self, slot: int) -> dict[Tier, Obstacle | None]:
        return {
            Tier.IMAGE: self._images.obstacle(slot),
            Tier.CACHED: self._caches.obstacle(self._boots.cache_key(slot)),
        }

    def _count(self, falls: Sequence[Fall]) -> None:
        for fall in falls:
            self._metrics.fall_throughs.labels(fall.tier, fall.obstacle.why).inc()

    async def _from_tier(
        self,
        request: StartRequest,
        tier: Tier,
        parked: ParkedRecord | Obstacle,
        falls: tuple[str, ...],
    ) -> EngineRecord:
        control_dir = self._config.control_dir(request.slot)
        incarnation = Incarnation(f"{request.lease.worker_id}-{secrets.token_hex(4)}")
        attach = self._attach(request, incarnation)
        failpoint("agent.before_start")
        async with AsyncExitStack() as undo:
            undo.callback(self._images.release, request.slot)
            undo.callback(clear, control_dir)
            if tier is Tier.PARKED and isinstance(parked, ParkedRecord):
                undo.push_async_callback(end_process, parked.process)
                started = RunningImage(parked.process, parked.image_id)
                fingerprint = parked.fingerprint
            else:
                clear(control_dir)
                await asyncio.to_thread(self._host.guard_pids)
                fingerprint = await asyncio.to_thread(self._boots.fingerprint, request.slot)
                started = await _not_lost(asyncio.to_thread(self._spawn, request, tier))
                undo.push_async_callback(end_process, started.process)
            failpoint("agent.engine_spawned")
            record = EngineRecord(
                slot=request.slot,
                lease=request.lease,
                incarnation=incarnation,
                tier=tier,
                process=started.process,
                fingerprint=fingerprint,
                image_id=started.image_id,
                fell_through=falls,
            )
            write_started(control_dir, record)
            if tier is not Tier.IMAGE:
                await self._until_detached(request, record, parked)
            # Not before it is back on its GPU: CUDA, called by a process that is not, faults.
            write_attach(control_dir, attach)
            failpoint("agent.attached")
            await self._wait_answer(request, record)
            failpoint("agent.engine_answered")
            record = record.ready(asyncio.get_running_loop().time() - request.began)
            write_record(control_dir, record)
            undo.pop_all()
        return record

    async def _until_detached(
        self, request: StartRequest, record: EngineRecord, parked: ParkedRecord | Obstacle
    ) -> None:
        """The engine polls for its identity."""
        if isinstance(parked, ParkedRecord) and record.tier is Tier.PARKED:
            left_s = request.deadline - asyncio.get_running_loop().time()
            await unpark_engine(parked, self._gpu, timeout_s=left_s)
        control_dir = self._config.control_dir(request.slot)
        await wait_detached(control_dir, record.process, request.deadline)

    async def _wait_answer(self, request: StartRequest, record: EngineRecord) -> None:
        control_dir = self._config.control_dir(request.slot)
        failure = ""
        try:
            await wait_ready(control_dir, record.process, record.incarnation, request.deadline)
        except EngineError as exc:
            failure = str(exc)
            if record.tier is Tier.CACHED:
                self._caches.discard(self._boots.cache_key(request.slot))
            raise
        finally:
            if record.tier is Tier.IMAGE:
                self._images.report(record.image_id, failure)

    def _spawn(self, request: StartRequest, tier: Tier) -> RunningImage:
        """A process that becomes an engine: restored, or booted."""
        slot = request.slot
        if tier is Tier.IMAGE:
            timeout_s = self._config.scale.restore_timeout_s
            return self._images.restore(slot, self._host.namespace, timeout_s=timeout_s)
        key = self._boots.cache_key(slot)
        # A boot that is to be cold does not read what is there; one that finds nothing fills it.
        obstacle = self._caches.obstacle(key)
        fills = tier is Tier.CACHED or (obstacle is not None and obstacle.why is Why.ABSENT)
        caches = self._caches.environment(key) if fills else None
        founder = self._boots.founder(slot, caches) if request.founds else None
        command = founder or self._boots.command(slot, caches)
        return RunningImage(self._host.namespace.spawn(command), "")

    def _attach(self, request: StartRequest, incarnation: Incarnation) -> Attach:
        return Attach(
            incarnation=incarnation,
            worker_id=request.lease.worker_id,
            seed=secrets.randbits(63),
            log_path=str(self._config.control_dir(request.slot) / ENGINE_LOG),
            environment=_failpoints() | engine_dynamo_environment(self._config, request.slot),
        )


async def end_process(process: ProcessRef) -> None:
    """It is gone, and with it all of its session. Raises EngineError if the kernel can't end it."""
    await asyncio.to_thread(kill_session, process, timeout_s=_KILL_TIMEOUT_S)


async def _not_lost(starting: Coroutine[Any, Any, RunningImage]) -> RunningImage:
    """The process that a thread starts; if we are cancelled meanwhile, it is ended."""
    task = asyncio.create_task(starting)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await end_process((await task).process)
        raise


def _why(failure: Exception) -> Why:
    if isinstance(failure, GpuMemoryShort):
        return Why.NO_MEMORY
    return Why.UNUSABLE if isinstance(failure, ResourceMissing) else Why.FAILED


def _failpoints() -> dict[str, str]:
    """For tests: an engine, restored or not, is killed where the agent was told to have it killed;
    its worker id is the scope."""
    return {KILL_ONCE_DIR: os.environ[KILL_ONCE_DIR]} if KILL_ONCE_DIR in os.environ else {}
