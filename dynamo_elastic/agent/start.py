"""Starting one engine: down the ladder until a rung holds, attach it, wait until it answers."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dynamo_elastic.agent.base import Tier
from dynamo_elastic.agent.host import Host, engine_environment
from dynamo_elastic.agent.ladder import NO_PARKED, choose, fell
from dynamo_elastic.agent.records import (
    ENGINE_LOG,
    EngineRecord,
    clear,
    write_attach,
    write_record,
)
from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.engine.base import DETACHED_FILE, SOCKET_FILE, Attach
from dynamo_elastic.errors import ElasticError, EngineError, EngineGone
from dynamo_elastic.failpoints import KILL_ONCE_DIR, failpoint
from dynamo_elastic.ipc import RpcClient
from dynamo_elastic.snapshot.base import BOOT_LOG, Command, Namespace
from dynamo_elastic.snapshot.process import ProcessRef, alive, kill_and_wait
from dynamo_elastic.types import Incarnation, OperationId, WorkerId

EngineArgv = Callable[[DeploymentConfig, int], Sequence[str]]
_POLL_S = 0.005
_STATUS_TIMEOUT_S = 2.0
_KILL_TIMEOUT_S = 10.0
_LOG_TAIL_BYTES = 2000
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunningImage:
    """A process that an image was turned into. `process`: in our namespace."""

    process: ProcessRef
    image_id: str


class ImageSource(Protocol):
    """Where images of slots come from (agent/images.py)."""

    def obstacle(self, slot: int) -> str:
        """Why no image of `slot` can be restored; '' if one can."""
        ...

    def newest(self, slot: int) -> str:
        """Id of the newest usable image of `slot`; '' if there is none."""
        ...

    def restore(self, slot: int, namespace: Namespace, *, timeout_s: float) -> RunningImage:
        """Run the newest usable image of `slot`, and hold it until release(slot). Raises
        SnapshotError or ResourceMissing; then it is not held."""
        ...

    def report(self, image_id: str, failure: str) -> None:
        """The engine from that image answered ('' as `failure`), or did not, and why."""
        ...

    def quarantined(self) -> dict[str, str]:
        """Images that failed too often -> why they are not tried now."""
        ...

    def hold(self, slot: int, image_id: str) -> None:
        """The image of the engine in `slot` is not removed before release(slot). Raises
        SnapshotError."""
        ...

    def release(self, slot: int) -> None:
        """The engine in `slot` is gone. Idempotent."""
        ...

    def tidy(self) -> tuple[str, ...]:
        """Remove images that are stale or too many; one line for each. Raises SnapshotError."""
        ...


@dataclass(frozen=True, slots=True)
class StartRequest:
    """One start. `began` and `deadline` are times of the running event loop."""

    slot: int
    worker_id: WorkerId
    operation_id: OperationId
    tiers: tuple[Tier, ...]
    began: float
    deadline: float


class Starter:
    """Starts engines of one deployment; starts of different slots may run side by side."""

    def __init__(
        self,
        config: DeploymentConfig,
        host: Host,
        images: ImageSource,
        engine_argv: EngineArgv,
    ) -> None:
        self._config = config
        self._host = host
        self._images = images
        self._engine_argv = engine_argv

    async def start(self, request: StartRequest) -> EngineRecord:
        """An engine that answers, recorded. Raises EngineError, with nothing left running, if no
        rung holds before the deadline."""
        obstacles = {Tier.PARKED: NO_PARKED}
        image_obstacle = await asyncio.to_thread(self._images.obstacle, request.slot)
        if image_obstacle:
            obstacles[Tier.IMAGE] = image_obstacle
        ladder = choose(request.tiers, obstacles)
        reasons = list(ladder.skipped)
        for tier in ladder.rungs:
            try:
                return await self._from_tier(request, tier, tuple(reasons))
            except (ElasticError, ProcessLookupError) as exc:
                _log.warning("slot %d: tier %s failed: %s", request.slot, tier.value, exc)
                reasons.append(fell(tier, str(exc)))
        raise EngineError(f"no engine for slot {request.slot}: {'; '.join(reasons)}")

    async def _from_tier(
        self, request: StartRequest, tier: Tier, reasons: tuple[str, ...]
    ) -> EngineRecord:
        control_dir = self._config.control_dir(request.slot)
        clear(control_dir)
        await asyncio.to_thread(self._host.guard_pids)
        incarnation = Incarnation(f"{request.worker_id}-{secrets.token_hex(4)}")
        attach = self._attach(request, incarnation)
        async with AsyncExitStack() as undo:
            undo.callback(clear, control_dir)
            undo.callback(self._images.release, request.slot)
            if tier is Tier.IMAGE:
                # The restored process is polling already: it finds its identity at once.
                write_attach(control_dir, attach)
                started = await _not_lost(asyncio.to_thread(self._restore, request))
            else:
                started = await _not_lost(asyncio.to_thread(self._boot, request.slot))
            process = started.process
            undo.push_async_callback(_end, process)
            failpoint("agent.engine_spawned")
            record = EngineRecord(
                slot=request.slot,
                worker_id=request.worker_id,
                operation_id=request.operation_id,
                incarnation=incarnation,
                tier=tier,
                process=process,
                image_id=started.image_id,
                fell_through=reasons,
            )
            write_record(control_dir, record)
            if tier is Tier.COLD:
                await _wait_detached(control_dir, process, request.deadline)
                write_attach(control_dir, attach)
            await self._wait_answer(control_dir, record, request.deadline)
            record = record.ready(asyncio.get_running_loop().time() - request.began)
            write_record(control_dir, record)
            undo.pop_all()
        return record

    async def _wait_answer(self, control_dir: Path, record: EngineRecord, deadline: float) -> None:
        try:
            await wait_ready(control_dir, record.process, record.incarnation, deadline)
        except EngineError as exc:
            if record.image_id:
                self._images.report(record.image_id, str(exc))
            raise
        if record.image_id:
            self._images.report(record.image_id, "")

    def _restore(self, request: StartRequest) -> RunningImage:
        return self._images.restore(
            request.slot, self._host.namespace, timeout_s=self._config.scale.restore_timeout_s
        )

    def _boot(self, slot: int) -> RunningImage:
        command = boot_command(self._config, slot, self._engine_argv)
        return RunningImage(self._host.namespace.spawn(command), "")

    def _attach(self, request: StartRequest, incarnation: Incarnation) -> Attach:
        return Attach(
            incarnation=incarnation,
            worker_id=request.worker_id,
            seed=secrets.randbits(63),
            log_path=str(self._config.control_dir(request.slot) / ENGINE_LOG),
            environment=_failpoints(),
        )


async def _wait_detached(control_dir: Path, process: ProcessRef, deadline: float) -> None:
    while not (control_dir / DETACHED_FILE).exists():
        await _pause(control_dir, process, deadline)


async def wait_ready(
    control_dir: Path, process: ProcessRef, incarnation: Incarnation, deadline: float
) -> None:
    """Return once that engine answers on its socket. Raises EngineGone if it ended, EngineError if
    it is not ready by `deadline` (a time of the event loop)."""
    client = RpcClient(control_dir / SOCKET_FILE)
    try:
        while not await _answers(client, control_dir, incarnation):
            await _pause(control_dir, process, deadline)
    finally:
        await client.close()


async def _answers(client: RpcClient, control_dir: Path, incarnation: Incarnation) -> bool:
    if not (control_dir / SOCKET_FILE).exists():
        return False
    try:
        status = await client.call("status", {}, timeout_s=_STATUS_TIMEOUT_S)
    except EngineGone:
        return False
    return bool(status["incarnation"] == incarnation)


async def _pause(control_dir: Path, process: ProcessRef, deadline: float) -> None:
    if not alive(process):
        raise EngineGone(f"the engine ended before it was ready: {log_tail(control_dir)}")
    if asyncio.get_running_loop().time() > deadline:
        raise EngineError(f"the engine was not ready in time: {log_tail(control_dir)}")
    await asyncio.sleep(_POLL_S)


async def _not_lost(starting: Coroutine[Any, Any, RunningImage]) -> RunningImage:
    """The process that a thread starts; if we are cancelled meanwhile, it is ended."""
    task = asyncio.create_task(starting)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await _end((await task).process)
        raise


async def _end(process: ProcessRef) -> None:
    await asyncio.to_thread(kill_and_wait, process, timeout_s=_KILL_TIMEOUT_S)


def boot_command(config: DeploymentConfig, slot: int, engine_argv: EngineArgv) -> Command:
    """How an engine of `slot` is booted; the same for a cold start and for an image."""
    return Command(
        argv=tuple(engine_argv(config, slot)),
        environment=engine_environment(),
        log_path=config.control_dir(slot) / BOOT_LOG,
    )


def log_tail(control_dir: Path) -> str:
    """The last line or two that an engine wrote, on one line."""
    for name in (ENGINE_LOG, BOOT_LOG):
        path = control_dir / name
        if path.exists() and path.stat().st_size:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - _LOG_TAIL_BYTES))
                lines = file.read().decode(errors="replace").strip().splitlines()
            return " | ".join(lines[-2:])
    return "it wrote no log"


def _failpoints() -> dict[str, str]:
    """For tests: an engine, restored or not, is killed where the agent was told to have it killed;
    its worker id is the scope."""
    return {KILL_ONCE_DIR: os.environ[KILL_ONCE_DIR]} if KILL_ONCE_DIR in os.environ else {}
