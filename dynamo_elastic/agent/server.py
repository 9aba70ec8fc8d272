"""The host's agent: leases slots to engines, starts, watches, ends and adopts them."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import IO, Any

from dynamo_elastic.agent.base import SlotStatus, StartedEngine, Tier
from dynamo_elastic.agent.drain import Drain
from dynamo_elastic.agent.host import Host, close_host, lock_state, open_host
from dynamo_elastic.agent.reconcile import reconcile
from dynamo_elastic.agent.records import EngineRecord, clear
from dynamo_elastic.agent.start import EngineArgv, ImageSource, Starter, StartRequest
from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.errors import ElasticError, EngineError
from dynamo_elastic.ipc import RpcServer
from dynamo_elastic.snapshot.process import alive, kill_and_wait, open_pidfd
from dynamo_elastic.types import Incarnation, OperationId, WorkerId

_KILL_TIMEOUT_S = 10.0
_GUARD_PERIOD_S = 5.0
_log = logging.getLogger(__name__)


class AgentServer:
    """Serves the calls of agent.base.Agent on the deployment's agent socket.

    A slot has at most one engine, and at most one start under way. Engines outlive the agent: its
    successor adopts those that were attached, and ends the others.
    """

    def __init__(
        self, config: DeploymentConfig, images: ImageSource, engine_argv: EngineArgv
    ) -> None:
        self._config = config
        self._images = images
        self._engine_argv = engine_argv
        self._engines: dict[int, EngineRecord] = {}
        self._starts: dict[int, tuple[OperationId, asyncio.Task[EngineRecord]]] = {}
        self._watched: dict[int, int] = {}
        self._drain = Drain(config.state_dir)
        self._tidied: tuple[str, ...] = ()
        self._guard: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._lock: IO[str] | None = None
        self._host: Host | None = None
        self._starter: Starter | None = None
        self._server = RpcServer(
            config.agent_socket,
            {
                "start_engine": self._call_start,
                "stop_engine": self._call_stop,
                "slots": self._call_slots,
                "status": self._call_status,
                "drain": self._call_drain,
                "undrain": self._call_undrain,
                "stop_all": self._call_stop_all,
            },
        )

    async def start(self) -> None:
        """Open the namespace, adopt what lives, serve. Raises EngineError if another agent does."""
        self._lock = lock_state(self._config)
        self._host = await asyncio.to_thread(open_host, self._config)
        self._starter = Starter(self._config, self._host, self._images, self._engine_argv)
        found = await asyncio.to_thread(reconcile, self._config, self._host, self._images)
        self._engines, self._tidied = found.engines, found.done
        for record in list(self._engines.values()):
            _log.info("adopted engine %s, pid %d", record.incarnation, record.process.pid)
            self._watch(record)
        self._guard = asyncio.create_task(_guard_pids(self._host))
        await self._server.start()

    async def close(self) -> None:
        """Stop serving; starts under way are undone, engines live on. Idempotent."""
        await self._server.close()
        if self._guard is not None:
            self._guard.cancel()
        await self._cancel_starts()
        for slot in list(self._watched):
            self._unwatch(slot)
            self._images.release(slot)
        if self._lock is not None:
            self._lock.close()

    async def stopped(self) -> None:
        """Return once stop_all() was called."""
        await self._stop.wait()

    async def start_engine(self, request: StartRequest) -> StartedEngine:
        """See agent.base.Agent."""
        slot = request.slot
        if not 0 <= slot < self._config.scale.max_ranks:
            raise EngineError(f"slot {slot}: this host has 0-{self._config.scale.max_ranks - 1}")
        running = self._engines.get(slot)
        if running is not None and alive(running.process):
            if running.operation_id != request.operation_id:
                raise EngineError(
                    f"slot {slot} holds engine {running.incarnation} of operation "
                    f"{running.operation_id}: stop it first"
                )
            return running.started(self._config.control_dir(slot))
        self._drain.check()
        under_way = self._starts.get(slot)
        if under_way is not None and under_way[0] != request.operation_id:
            raise EngineError(f"slot {slot} is being started by operation {under_way[0]}")
        if under_way is None:
            task = asyncio.create_task(self._start(request))
            self._starts[slot] = under_way = (request.operation_id, task)
        # Shielded: a caller that goes away and asks again finds the same start.
        record = await asyncio.shield(under_way[1])
        return record.started(self._config.control_dir(slot))

    async def stop_engine(self, slot: int, incarnation: Incarnation) -> None:
        """See agent.base.Agent. A start under way has no incarnation yet and is left alone."""
        record = self._engines.get(slot)
        if record is not None and record.incarnation == incarnation:
            self._unwatch(slot)
            await asyncio.to_thread(kill_and_wait, record.process, timeout_s=_KILL_TIMEOUT_S)
            self._forget(slot, record)

    def slots(self) -> tuple[SlotStatus, ...]:
        """See agent.base.Agent."""
        return tuple(self._slot(slot) for slot in range(self._config.scale.max_ranks))

    async def stop_all(self) -> None:
        """End every engine and the namespace, then let the agent end. Idempotent."""
        await self._cancel_starts()
        for slot, record in list(self._engines.items()):
            await self.stop_engine(slot, record.incarnation)
        await asyncio.to_thread(close_host, self._config, self._opened())
        self._stop.set()

    def _opened(self) -> Host:
        if self._host is None:
            raise EngineError("the agent is not started")
        return self._host

    async def _start(self, request: StartRequest) -> EngineRecord:
        try:
            if self._starter is None:
                raise EngineError("the agent is not started")
            record = await self._starter.start(request)
            self._engines[request.slot] = record
            self._watch(record)
            return record
        finally:
            del self._starts[request.slot]

    async def _cancel_starts(self) -> None:
        tasks = [task for _, task in self._starts.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _watch(self, record: EngineRecord) -> None:
        fd = open_pidfd(record.process)
        if fd is None:
            self._forget(record.slot, record)
            return
        self._watched[record.slot] = fd
        asyncio.get_running_loop().add_reader(fd, self._ended, record)

    def _unwatch(self, slot: int) -> None:
        fd = self._watched.pop(slot, None)
        if fd is not None:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)

    def _ended(self, record: EngineRecord) -> None:
        _log.error("engine %s of slot %d ended by itself", record.incarnation, record.slot)
        self._unwatch(record.slot)
        self._forget(record.slot, record)

    def _forget(self, slot: int, record: EngineRecord) -> None:
        if self._engines.get(slot) == record:
            del self._engines[slot]
            clear(self._config.control_dir(slot))
            self._images.release(slot)

    def _slot(self, slot: int) -> SlotStatus:
        image_id = self._images.newest(slot)
        record = self._engines.get(slot)
        if record is None:
            return SlotStatus(slot, image_id)
        pid = record.process.pid
        return SlotStatus(slot, image_id, record.incarnation, pid, record.tier.value)

    async def _call_start(self, params: Mapping[str, Any]) -> Any:
        now = asyncio.get_running_loop().time()
        request = StartRequest(
            slot=int(params["slot"]),
            worker_id=WorkerId(str(params["worker_id"])),
            operation_id=OperationId(str(params["operation_id"])),
            tiers=tuple(Tier(name) for name in params["tiers"]),
            began=now,
            deadline=now + float(params["timeout_s"]),
        )
        return asdict(await self.start_engine(request))

    async def _call_stop(self, params: Mapping[str, Any]) -> None:
        await self.stop_engine(int(params["slot"]), Incarnation(str(params["incarnation"])))

    async def _call_slots(self, _: Mapping[str, Any]) -> Any:
        return [asdict(slot) for slot in await asyncio.to_thread(self.slots)]

    async def _call_status(self, _: Mapping[str, Any]) -> Any:
        host = self._opened()
        slots = range(self._config.scale.max_ranks)
        obstacles = await asyncio.to_thread(
            lambda: {slot: self._images.obstacle(slot) for slot in slots}
        )
        return {
            "skipped": list(host.skipped),
            "no_image": {str(slot): why for slot, why in obstacles.items() if why},
            "quarantine": self._images.quarantined(),
            "draining": self._drain.reason,
            "tidied": list(self._tidied),
        }

    async def _call_drain(self, params: Mapping[str, Any]) -> Any:
        self._drain.begin(str(params["reason"]))
        return {"draining": self._drain.reason, "serving": sorted(self._engines)}

    async def _call_undrain(self, _: Mapping[str, Any]) -> None:
        self._drain.end()

    async def _call_stop_all(self, _: Mapping[str, Any]) -> None:
        await self.stop_all()


async def _guard_pids(host: Host) -> None:
    """Again and again: threads that engines start meanwhile use pids up, too."""
    while True:
        await asyncio.sleep(_GUARD_PERIOD_S)
        try:
            await asyncio.to_thread(host.guard_pids)
        except ElasticError as exc:
            _log.warning("pids of images are not guarded: %s", exc)
