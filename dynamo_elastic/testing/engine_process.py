"""Real engine processes without an agent: booted, attached and killed by the test itself."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dynamo_elastic.config import DeploymentConfig, parse_config
from dynamo_elastic.engine.base import ATTACH_FILE, DETACHED_FILE, SOCKET_FILE, Attach, Output
from dynamo_elastic.engine.base import Request as EngineRequest
from dynamo_elastic.engine.client import EngineClient
from dynamo_elastic.engine.launch import engine_argv
from dynamo_elastic.engine.reference.life import LOGITS
from dynamo_elastic.engine.shape import ModelShape
from dynamo_elastic.errors import EngineGone
from dynamo_elastic.ipc import RpcClient, wait_for_socket
from dynamo_elastic.types import Incarnation, WorkerId

SMALL_SHAPE = ModelShape(
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    intermediate_size=64,
    vocab_size=64,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    eos_token_id=0,
)
"""For make_model.write_model(): a step takes a millisecond."""

BOOT_TIMEOUT_S = 60.0
_LOGITS_TIMEOUT_S = 30.0
_POLL_S = 0.01


def engine_config(model: Path, run_dir: Path, **engine: Any) -> DeploymentConfig:
    """Settings for engines alone; `engine` are those of the section of that name."""
    return parse_config(
        {
            "deployment": "test",
            "model": {"path": str(model), "name": "test"},
            "engine": engine,
            "scale": {"initial_ranks": 1, "max_ranks": 8},
            "run_dir": str(run_dir),
        }
    )


class AttachedEngine:
    """An engine that has an identity, and what it says; close() it."""

    def __init__(self, worker_id: WorkerId, socket_path: Path) -> None:
        self.worker_id = worker_id
        self.socket_path = socket_path
        self.client = EngineClient(socket_path)
        self.outputs: dict[str, list[Output]] = {}
        self.token_times: dict[str, list[float]] = {}
        """When the tokens of each request came, in time.monotonic()."""
        self._reader: asyncio.Task[None] | None = None
        self._news = asyncio.Condition()

    def read(self) -> None:
        """Collect outputs from now on, for finished()."""
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for output in self.client.outputs():
                self.outputs.setdefault(output.request_id, []).append(output)
                times = self.token_times.setdefault(output.request_id, [])
                times += [time.monotonic()] * len(output.tokens)
                async with self._news:
                    self._news.notify_all()
        except EngineGone:
            return

    async def finished(self, request_id: str, *, timeout_s: float = 60.0) -> Output:
        """All of a request's tokens from this engine in one output, once it ended; once only."""
        async with asyncio.timeout(timeout_s), self._news:
            while True:
                given = self.outputs.get(request_id, [])
                if given and given[-1].finish:
                    del self.outputs[request_id]
                    tokens = tuple(t for o in given for t in o.tokens)
                    return Output(request_id, tokens, given[-1].finish, given[-1].reason)
                await self._news.wait()

    async def generate(self, request: EngineRequest) -> Output:
        """submit(), then finished()."""
        await self.client.submit(request)
        return await self.finished(request.request_id)

    async def logits(self, prompt: Sequence[int]) -> list[float]:
        """After `prompt`, of a reference engine: computed in a step of its group."""
        rpc = RpcClient(self.socket_path)
        try:
            answer = await rpc.call(LOGITS, {"prompt": list(prompt)}, timeout_s=_LOGITS_TIMEOUT_S)
        finally:
            await rpc.close()
        return [float(value) for value in answer]

    async def close(self) -> None:
        """The engine, which has ended, is not read any more."""
        if self._reader is not None:
            await self._reader
        await self.client.close()


class EngineProcess(AttachedEngine):
    """One engine process in the slot of its worker; stop() it."""

    def __init__(
        self, config: DeploymentConfig, slot: int, environment: Mapping[str, str] | None = None
    ) -> None:
        """It boots with our environment, and what `environment` has besides."""
        self.control_dir = config.control_dir(slot)
        super().__init__(WorkerId(f"slot{slot}"), self.control_dir / SOCKET_FILE)
        self.control_dir.mkdir(parents=True, exist_ok=True)
        self._boot_log = self.control_dir / "boot.log"
        with self._boot_log.open("wb") as log:
            self.process = subprocess.Popen(
                engine_argv(config, slot),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
            )

    async def detached(self) -> dict[str, Any]:
        """What `detached.json` says, once it is there."""
        await self._appears(self.control_dir / DETACHED_FILE)
        report: dict[str, Any] = json.loads((self.control_dir / DETACHED_FILE).read_text())
        return report

    async def attach(
        self, environment: Mapping[str, str] | None = None, *, read_outputs: bool = True
    ) -> None:
        """Give it an identity, and return once it serves. Its outputs are for finished(), or with
        `read_outputs` false for the caller."""
        await self.detached()
        attach = Attach(
            incarnation=Incarnation(f"{self.worker_id}-{self.process.pid}"),
            worker_id=self.worker_id,
            seed=1,
            log_path=str(self.control_dir / "engine.log"),
            environment=dict(environment or {}),
        )
        partial = self.control_dir / "attach.partial"
        partial.write_text(json.dumps(asdict(attach)))
        partial.replace(self.control_dir / ATTACH_FILE)
        await self._appears(self.control_dir / SOCKET_FILE)
        # The file is there a moment before anybody listens on it.
        await wait_for_socket(self.control_dir / SOCKET_FILE, timeout_s=BOOT_TIMEOUT_S)
        if read_outputs:
            self.read()

    async def _appears(self, path: Path) -> None:
        deadline = time.monotonic() + BOOT_TIMEOUT_S
        while not path.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise EngineGone(f"no {path.name}: {self.log()}")
            await asyncio.sleep(_POLL_S)

    def log(self) -> str:
        """What it wrote, before and after it was attached."""
        paths = (self._boot_log, self.control_dir / "engine.log")
        return "".join(p.read_text() for p in paths if p.exists())

    def kill(self) -> None:
        """kill -9, and wait."""
        self.process.kill()
        self.process.wait()

    async def stop(self) -> None:
        """Kill it and let go of it. Idempotent."""
        self.kill()
        await self.close()
