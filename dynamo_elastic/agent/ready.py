"""Waiting for an engine: until it has let go of everything, until it answers."""

from __future__ import annotations

import asyncio
from pathlib import Path

from dynamo_elastic.agent.records import ENGINE_LOG
from dynamo_elastic.engine.base import DETACHED_FILE, SOCKET_FILE
from dynamo_elastic.errors import EngineError, EngineGone
from dynamo_elastic.ipc import RpcClient
from dynamo_elastic.snapshot.base import BOOT_LOG
from dynamo_elastic.snapshot.process import ProcessRef, alive
from dynamo_elastic.types import Incarnation

_POLL_S = 0.005
_STATUS_TIMEOUT_S = 2.0
_LOG_TAIL_BYTES = 2000


async def wait_detached(control_dir: Path, process: ProcessRef, deadline: float) -> None:
    """Return once the engine polls for an identity. Raises like wait_ready()."""
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
