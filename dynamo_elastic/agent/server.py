"""The host's agent as a server: its calls, its start, and what it does again and again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import IO, Any

from dynamo_elastic.agent.base import Lease, Tier
from dynamo_elastic.agent.boot import Boots, EngineArgv
from dynamo_elastic.agent.caches import JitCaches
from dynamo_elastic.agent.drain import Drain
from dynamo_elastic.agent.host import Host, close_host, lock_state, open_host
from dynamo_elastic.agent.image_source import ImageSource
from dynamo_elastic.agent.parking import Parking
from dynamo_elastic.agent.pool import Eviction
from dynamo_elastic.agent.reconcile import reconcile
from dynamo_elastic.agent.slots import Slots
from dynamo_elastic.agent.start import Starter, StartRequest
from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.errors import ElasticError, EngineError
from dynamo_elastic.ipc import Callers, RpcServer
from dynamo_elastic.metrics import AgentMetrics
from dynamo_elastic.snapshot.gpu import NO_GPU, Gpu
from dynamo_elastic.types import Epoch, Incarnation, OperationId, WorkerId

_GUARD_PERIOD_S = 5.0
_MOST_SECONDS = 24 * 3600
_OPERATORS = frozenset({"evict", "drain", "undrain", "stop_all"})
"""Calls for root and our own user alone: who is let in for engines can't end other people's."""
_log = logging.getLogger(__name__)


class AgentServer:
    """Serves the calls of agent.base.Agent on the deployment's agent socket, and a few for
    operators. Engines outlive it: its successor adopts those that serve and those that are parked,
    and ends the others. `gpu` is open for as long as it lives."""

    def __init__(
        self,
        config: DeploymentConfig,
        images: ImageSource,
        engine_argv: EngineArgv,
        *,
        gpu: Gpu = NO_GPU,
        metrics: AgentMetrics | None = None,
    ) -> None:
        self._config = config
        self._images = images
        self._gpu = gpu
        self._metrics = metrics or AgentMetrics()
        self._boots = Boots(config, engine_argv, gpu.inventory.gpus())
        self._drain = Drain(config.state_dir)
        self._tidied: tuple[str, ...] = ()
        self._housekeeping: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._lock: IO[str] | None = None
        self._opened: tuple[Host, Slots] | None = None
        self._server = RpcServer(
            config.agent_socket,
            {
                "start_engine": self._start_engine,
                "stop_engine": self._stop_engine,
                "park_engine": self._park_engine,
                "slots": self._list_slots,
                "status": self._status,
                "evict": self._evict,
                "drain": self._begin_drain,
                "undrain": self._end_drain,
                "stop_all": self._stop_all,
            },
            callers=Callers(config.agent.uids, config.agent.gid, _OPERATORS),
        )

    async def start(self) -> None:
        """Open the namespace, adopt what lives, serve. Raises EngineError if another agent does."""
        config = self._config
        self._lock = lock_state(config)
        host = await asyncio.to_thread(open_host, config)
        starter = Starter(config, host, self._images, self._boots, self._gpu, self._metrics)
        parking = Parking(config, self._boots, self._gpu, self._drain)
        slots = Slots(config, self._images, starter, parking, self._drain, self._metrics)
        self._opened = host, slots
        found = await asyncio.to_thread(reconcile, config, host, self._images, parking.verdict)
        for why in found.evicted:
            self._metrics.evictions.labels(why).inc()
        caches = JitCaches(config.snapshot.catalog, config.snapshot.max_age_s)
        self._tidied = (*found.done, *await asyncio.to_thread(caches.prune))
        slots.adopt(found.adopted)
        await slots.keep_bounds()
        self._housekeeping = asyncio.create_task(_keep_house(host, slots))
        await self._server.start()

    async def close(self) -> None:
        """Stop serving; starts under way are undone, engines live on. Idempotent."""
        await self._server.close()
        if self._housekeeping is not None:
            self._housekeeping.cancel()
        if self._opened is not None:
            _, slots = self._opened
            await slots.cancel_starts()
            slots.release()
        if self._lock is not None:
            self._lock.close()

    async def stopped(self) -> None:
        """Return once stop_all() was called."""
        await self._stop.wait()

    async def stop_all(self) -> None:
        """End every engine and the namespace, then let the agent end. Idempotent."""
        host, slots = self._open()
        await slots.end_all()
        await asyncio.to_thread(close_host, self._config, host)
        self._stop.set()

    def _open(self) -> tuple[Host, Slots]:
        if self._opened is None:
            raise EngineError("the agent is not started")
        return self._opened

    @property
    def _slots(self) -> Slots:
        return self._open()[1]

    async def _start_engine(self, params: Mapping[str, Any]) -> Any:
        now = asyncio.get_running_loop().time()
        request = StartRequest(
            slot=int(params["slot"]),
            lease=Lease(
                operation_id=OperationId(str(params["operation_id"])),
                worker_id=WorkerId(str(params["worker_id"])),
                epoch=Epoch(int(params["epoch"])),
            ),
            tiers=tuple(Tier(name) for name in params["tiers"]),
            founds=bool(params.get("founds", False)),
            began=now,
            deadline=now + _seconds(params["timeout_s"]),
        )
        return asdict(await self._slots.start(request))

    async def _stop_engine(self, params: Mapping[str, Any]) -> None:
        await self._slots.stop(int(params["slot"]), Incarnation(str(params["incarnation"])))

    async def _park_engine(self, params: Mapping[str, Any]) -> str:
        return await self._slots.park(
            int(params["slot"]),
            Incarnation(str(params["incarnation"])),
            timeout_s=_seconds(params["timeout_s"]),
        )

    async def _list_slots(self, _: Mapping[str, Any]) -> Any:
        return [asdict(slot) for slot in await asyncio.to_thread(self._slots.status)]

    async def _status(self, _: Mapping[str, Any]) -> Any:
        host, _slots = self._open()
        numbers = range(self._config.scale.max_ranks)
        obstacles = await asyncio.to_thread(
            lambda: {number: self._images.obstacle(number) for number in numbers}
        )
        return {
            "skipped": list(host.skipped),
            "no_image": {str(slot): str(why) for slot, why in obstacles.items() if why},
            "quarantine": self._images.quarantined(),
            "draining": self._drain.reason,
            "tidied": list(self._tidied),
            "gpus": {str(n): self._boots.gpu(n) for n in numbers if self._boots.gpu(n)},
        }

    async def _evict(self, params: Mapping[str, Any]) -> Any:
        slots, number = self._slots, params["slot"]
        if number is None:
            return list(await slots.evict_all(Eviction.ASKED))
        return [number] if await slots.evict(int(number), Eviction.ASKED) else []

    async def _begin_drain(self, params: Mapping[str, Any]) -> Any:
        self._drain.begin(str(params["reason"]))
        evicted = await self._slots.evict_all(Eviction.DRAIN)
        return {
            "draining": self._drain.reason,
            "serving": list(self._slots.serving),
            "evicted": list(evicted),
        }

    async def _end_drain(self, _: Mapping[str, Any]) -> None:
        self._drain.end()

    async def _stop_all(self, _: Mapping[str, Any]) -> None:
        await self.stop_all()


def _seconds(value: Any) -> float:
    """A time to wait. Raises ValueError for one that never ends, or is none."""
    seconds = float(value)
    if not 0 <= seconds <= _MOST_SECONDS:
        raise ValueError(f"timeout_s: {seconds} is not between 0 and {_MOST_SECONDS}")
    return seconds


async def _keep_house(host: Host, slots: Slots) -> None:
    """Again and again: threads that engines start meanwhile use pids up, too; parked engines get
    too old."""
    while True:
        await asyncio.sleep(_GUARD_PERIOD_S)
        try:
            await asyncio.to_thread(host.guard_pids)
            await slots.keep_bounds()
        except ElasticError as exc:
            _log.warning("the host is not kept as it should be: %s", exc)
