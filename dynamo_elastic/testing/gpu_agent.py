"""An agent process with GPU test engines, driven by a test or a benchmark."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic import TypeAdapter

from dynamo_elastic.agent.base import StartedEngine, Tier
from dynamo_elastic.agent.client import AgentClient
from dynamo_elastic.agent.host import NAMESPACE_FILE
from dynamo_elastic.agent.records import ENGINE_LOG
from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.errors import ElasticError, EngineError
from dynamo_elastic.ipc import RpcClient, wait_for_socket
from dynamo_elastic.snapshot.base import BOOT_LOG
from dynamo_elastic.snapshot.process import ProcessRef, alive, identify, kill_and_wait
from dynamo_elastic.testing import gpu_agent_process
from dynamo_elastic.types import Epoch, OperationId, WorkerId

_START_TIMEOUT_S = 60.0
_ENGINE_TIMEOUT_S = 180.0
_CALL_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 20.0
_POLL_S = 0.01
_LOG_CHARS = 2000
_TOUCH_BYTES = 64 << 20
_PROCESS = TypeAdapter(ProcessRef)


@dataclass(frozen=True, slots=True)
class Started:
    """An engine, and the time from the request to its answer: its probe was right before that."""

    slot: int
    engine: StartedEngine
    elapsed_s: float


class GpuAgent:
    """`async with` it: an agent with engines of `sizes` (fields of GpuEngineSettings) serves
    `config`, with more in its environment if given; on leaving, agent, engines and their namespace
    are gone, and if that is by an error, their logs are on stderr."""

    def __init__(
        self, config: DeploymentConfig, environment: Mapping[str, str] | None = None, **sizes: Any
    ) -> None:
        self._config = config
        self._environment = environment or {}
        self._sizes = sizes
        self._log = config.state_dir / "agent.log"
        self._numbers = itertools.count(1)
        self._process: subprocess.Popen[bytes] | None = None
        self._client = AgentClient(config.agent_socket)

    async def __aenter__(self) -> Self:
        await self.boot()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            sys.stderr.write(self.log())
        with suppress(ElasticError, TimeoutError):
            async with asyncio.timeout(_END_TIMEOUT_S):
                await self._client.stop_all()
        await self._client.close()
        self.kill()
        self._end_namespace()

    @property
    def client(self) -> AgentClient:
        return self._client

    async def boot(self) -> None:
        """Start the agent's process and wait until it serves. Raises EngineGone with its log."""
        self._process = self._spawn()
        try:
            await wait_for_socket(self._config.agent_socket, timeout_s=_START_TIMEOUT_S)
        except ElasticError as exc:
            raise EngineError(f"{exc}: {self.log()}") from exc

    def _spawn(self) -> subprocess.Popen[bytes]:
        config = self._config.model_dump(mode="json")
        settings = json.dumps({"config": config, "sizes": self._sizes})
        self._config.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", gpu_agent_process.__name__, settings],
                env=dict(os.environ, **self._environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def kill(self) -> None:
        """kill -9 of the agent alone: its engines live on. Idempotent."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(_END_TIMEOUT_S)
            self._process = None
            self._config.agent_socket.unlink(missing_ok=True)

    def log(self) -> str:
        """The last lines that the agent and its engines wrote."""
        slots = range(self._config.scale.max_ranks)
        directories = [self._config.control_dir(slot) for slot in slots]
        engines = [d / name for d in directories for name in (BOOT_LOG, ENGINE_LOG)]
        texts = [
            f"--- {path}\n{path.read_text(errors='replace')[-_LOG_CHARS:]}"
            for path in (self._log, *engines)
            if path.exists()
        ]
        return "\n".join(texts)

    async def start(
        self, slot: int = 0, *tiers: Tier, timeout_s: float = _ENGINE_TIMEOUT_S
    ) -> Started:
        """An engine in `slot`, from one of `tiers` (any, if none is named)."""
        number = next(self._numbers)
        began_s = time.perf_counter()
        engine = await self._client.start_engine(
            slot,
            WorkerId(f"slot{slot}"),
            OperationId(f"operation{number}"),
            Epoch(number),
            tiers=tiers or tuple(Tier),
            timeout_s=timeout_s,
        )
        return Started(slot, engine, time.perf_counter() - began_s)

    async def probe(self, started: Started, **params: Any) -> dict[str, Any]:
        """What the engine's graphs give now. Raises EngineError unless it is what they gave when
        the engine was warmed up (or with `seed`, which makes other weights, unless it is not)."""
        rpc = RpcClient(Path(started.engine.socket_path))
        try:
            answer: dict[str, Any] = await rpc.call("probe", params, timeout_s=_CALL_TIMEOUT_S)
        finally:
            await rpc.close()
        same = answer["digest"] == answer["expected"]
        if same == ("seed" in params) or answer["host_intact"] is False:
            raise EngineError(f"slot {started.slot}: the probe gave {answer}")
        return answer

    async def park(self, started: Started, *, timeout_s: float = _CALL_TIMEOUT_S) -> None:
        """The engine is parked. Raises EngineError with the reason if it is not."""
        reason = await self._client.park_engine(
            started.slot, started.engine.incarnation, timeout_s=timeout_s
        )
        if reason:
            raise EngineError(f"slot {started.slot} is not parked: {reason}")

    async def end(self, started: Started) -> None:
        """The engine's process is gone."""
        await self._client.stop_engine(started.slot, started.engine.incarnation)

    async def end_all(self) -> None:
        """No slot has a serving engine."""
        for slot in await self._client.slots():
            if slot.incarnation:
                await self._client.stop_engine(slot.slot, slot.incarnation)

    async def clear(self) -> None:
        """No slot has an engine, serving or parked."""
        await self.end_all()
        await self._client.evict(None)

    def _end_namespace(self) -> None:
        """What a killed agent left running."""
        with suppress(OSError, ValueError):
            path = self._config.state_dir / NAMESPACE_FILE
            init = _PROCESS.validate_json(path.read_bytes())
            if alive(init):
                kill_and_wait(init, timeout_s=_END_TIMEOUT_S)


@contextmanager
def work_area(image_bytes: int) -> Iterator[Path]:
    """A directory with a tmpfs of that size as `images`, its memory touched before: a virtual
    machine's memory is slow the first time. Raises OSError (no root, say)."""
    with tempfile.TemporaryDirectory(prefix="de-gpu-") as directory:
        images = Path(directory) / "images"
        images.mkdir(mode=0o700)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={image_bytes},mode=0700", "tmpfs"]
        subprocess.run([*mount, str(images)], check=True, timeout=_END_TIMEOUT_S)
        try:
            _touch(images / "touched", image_bytes)
            yield Path(directory)
        finally:
            subprocess.run(["umount", "-l", str(images)], check=False, timeout=_END_TIMEOUT_S)


def _touch(path: Path, size_bytes: int) -> None:
    block = bytes(_TOUCH_BYTES)
    with path.open("wb") as file:
        for _ in range((size_bytes - _TOUCH_BYTES) // _TOUCH_BYTES):
            file.write(block)
    path.unlink()


async def wait_gone(pid: int, *, timeout_s: float = _END_TIMEOUT_S) -> None:
    """Return once `pid` is no running process. Raises EngineError."""
    deadline = time.monotonic() + timeout_s
    while identify(pid) is not None:
        if time.monotonic() > deadline:
            raise EngineError(f"process {pid} still runs after {timeout_s:g} s")
        await asyncio.sleep(_POLL_S)
