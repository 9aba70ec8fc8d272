"""Parking one engine: it gives up its identity, then its GPU; coming back is the other way."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable
from pathlib import Path

from dynamo_elastic.agent.boot import Boots
from dynamo_elastic.agent.drain import Drain
from dynamo_elastic.agent.ladder import Obstacle, Why
from dynamo_elastic.agent.pool import Eviction, PoolBounds, Pooled, evictions
from dynamo_elastic.agent.ready import wait_detached
from dynamo_elastic.agent.records import EngineRecord, ParkedRecord, write_parked, write_record
from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.engine.base import DETACHED_FILE, SOCKET_FILE
from dynamo_elastic.errors import EngineGone
from dynamo_elastic.failpoints import failpoint
from dynamo_elastic.ipc import RpcClient
from dynamo_elastic.snapshot.fingerprint import mismatches
from dynamo_elastic.snapshot.gpu import Gpu
from dynamo_elastic.snapshot.park import park, unpark
from dynamo_elastic.snapshot.process import alive, memory_of

_DISABLED = "parking is off (snapshot.parked.enabled)"
_DETACH_SHARE = 0.6
"""Of the time, what the engine has to answer; the rest is for letting go of its GPU."""


class Parking:
    """What is parked on this host now, what may be taken back, and how it is done."""

    def __init__(self, config: DeploymentConfig, boots: Boots, gpu: Gpu, drain: Drain) -> None:
        self._config = config
        self._settings = config.snapshot.parked
        self._boots = boots
        self._gpu = gpu
        self._drain = drain

    def refusal(self) -> tuple[Eviction, str] | None:
        """Why nothing is parked now, as a kind and in words."""
        if not self._settings.enabled:
            return Eviction.DISABLED, _DISABLED
        reason = self._drain.reason
        return (Eviction.DRAIN, f"this host drains ({reason})") if reason else None

    def misfit(self, parked: ParkedRecord) -> str:
        """How the world of a parked engine differs from today's; '' if it does not."""
        here = self._boots.fingerprint(parked.slot)
        differences = mismatches(parked.fingerprint, here, of="it")
        return f"the parked engine does not fit: {'; '.join(differences)}" if differences else ""

    def verdict(self, parked: ParkedRecord) -> tuple[Eviction, str] | None:
        """Why an engine that was parked before must not be kept."""
        misfit = self.misfit(parked)
        return self.refusal() or ((Eviction.MISFIT, misfit) if misfit else None)

    def nothing(self) -> Obstacle:
        """Of a slot in which no engine is parked."""
        if self._settings.enabled:
            return Obstacle(Why.ABSENT, "no engine is parked in the slot")
        return Obstacle(Why.DISABLED, _DISABLED)

    def out_of_bounds(self, parked: Iterable[ParkedRecord]) -> dict[int, Eviction]:
        """Slot -> reason of those that have to go."""
        settings = self._settings
        bounds = PoolBounds(settings.max_count, settings.max_bytes, settings.ttl_s)
        pooled = (Pooled(p.slot, p.parked_at_s, p.host_bytes) for p in parked)
        return evictions(pooled, bounds, time.time())

    async def park(self, record: EngineRecord, *, timeout_s: float) -> ParkedRecord:
        """See park_engine()."""
        control_dir = self._config.control_dir(record.slot)
        return await park_engine(record, control_dir, self._gpu, timeout_s=timeout_s)


async def park_engine(
    record: EngineRecord, control_dir: Path, gpu: Gpu, *, timeout_s: float
) -> ParkedRecord:
    """The engine is parked, and recorded so. Raises EngineError or SnapshotError: it is in no state
    to go on, and the caller ends it.

    If we die meanwhile, our successor finds no engine that it may adopt, and ends it.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s
    write_record(control_dir, record.leaving())
    failpoint("agent.before_detach")
    (control_dir / DETACHED_FILE).unlink(missing_ok=True)
    await _detach(control_dir / SOCKET_FILE, timeout_s=timeout_s * _DETACH_SHARE)
    failpoint("agent.engine_detached")
    await wait_detached(control_dir, record.process, deadline)
    engine = json.loads((control_dir / DETACHED_FILE).read_text())
    left_s = deadline - asyncio.get_running_loop().time()
    report = await asyncio.to_thread(
        park, record.process, gpu.driver, gpu.inventory, engine=engine, timeout_s=left_s
    )
    if not alive(record.process):
        raise EngineGone("the engine ended when it was parked")
    parked = ParkedRecord(
        slot=record.slot,
        report=report,
        fingerprint=record.fingerprint,
        image_id=record.image_id,
        parked_at_s=time.time(),
        host_bytes=report.host_bytes or memory_of((record.process,)).total_bytes,
    )
    write_parked(control_dir, parked)
    failpoint("agent.engine_parked")
    return parked


async def unpark_engine(parked: ParkedRecord, gpu: Gpu, *, timeout_s: float) -> None:
    """It has its GPU again, and polls for an identity. Tried once: whatever this raises, the
    process is of no use any more."""
    failpoint("agent.before_unpark")
    await asyncio.to_thread(unpark, parked.report, gpu.driver, gpu.inventory, timeout_s=timeout_s)
    failpoint("agent.unparked")


async def _detach(socket_path: Path, *, timeout_s: float) -> None:
    engine = RpcClient(socket_path)
    try:
        await engine.call("detach", {}, timeout_s=timeout_s)
    finally:
        await engine.close()
