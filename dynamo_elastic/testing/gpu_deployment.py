"""A host of reference engines on GPUs under its real agent, driven without a control plane."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from dynamo_elastic.agent.base import StartedEngine, Tier
from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.engine.base import Request
from dynamo_elastic.engine.client import EngineClient
from dynamo_elastic.errors import ElasticError, EngineError
from dynamo_elastic.testing.engine_process import AttachedEngine
from dynamo_elastic.testing.fleet import Fleet
from dynamo_elastic.testing.gpu_agent import GpuAgent
from dynamo_elastic.topology import EngineShape
from dynamo_elastic.types import Epoch, OperationId, WorkerId

_TIMEOUT_S = 240.0


class ReferenceAgent(GpuAgent):
    """The agent as it is, instead of one with GPU test engines."""

    def _spawn(self) -> subprocess.Popen[bytes]:
        self._config.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        settings = self._config.state_dir / "deployment.yaml"
        settings.write_text(yaml.safe_dump(self._config.model_dump(mode="json")))
        argv = [sys.executable, "-m", "dynamo_elastic.agent", "--elastic-config", str(settings)]
        with self._log.open("ab") as log:
            return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


class GpuHost:
    """Slots of one host; engines come and go in a Fleet. `agent` serves `config`."""

    def __init__(self, config: DeploymentConfig, agent: GpuAgent, shape: EngineShape) -> None:
        self.fleet: Fleet[AttachedEngine] = Fleet([], shape)
        self._config = config
        self._agent = agent
        self._started: dict[WorkerId, StartedEngine] = {}

    async def start(self, slot: int, tier: Tier) -> StartedEngine:
        """An engine of `slot` from `tier` and no other is in the fleet, member of nothing yet."""
        worker = WorkerId(f"slot{slot}")
        operation = OperationId(f"start-{slot}-{time.monotonic_ns()}")
        epoch = Epoch(self.fleet.in_force.epoch + 1)
        started = await self._agent.client.start_engine(
            slot, worker, operation, epoch, tiers=(tier,), timeout_s=_TIMEOUT_S
        )
        engine = AttachedEngine(worker, EngineClient(Path(started.socket_path)))
        engine.read()
        self.fleet.all[worker] = engine
        self._started[worker] = started
        return started

    async def park(self, worker: WorkerId) -> float:
        """The engine, which has left its group, is parked. Returns the seconds; raises EngineError
        if it had to be ended instead."""
        began_s = time.monotonic()
        started = self._started.pop(worker)
        slot = int(worker.removeprefix("slot"))
        reason = await self._agent.client.park_engine(
            slot, started.incarnation, timeout_s=_TIMEOUT_S
        )
        elapsed_s = time.monotonic() - began_s
        await self.fleet.all.pop(worker).close()
        if reason:
            raise EngineError(f"{worker} is not parked: {reason}")
        return elapsed_s

    async def close(self) -> None:
        """No engine is read any more; the agent ends them."""
        for engine in self.fleet.all.values():
            with suppress(ElasticError, TimeoutError):
                await asyncio.wait_for(engine.client.close(), 5.0)


class Streams:
    """Clients that stream one request after the other from `workers`, and every token's time."""

    def __init__(self, host: GpuHost, workers: Sequence[WorkerId], *, tokens: int) -> None:
        self._host = host
        self._workers = workers
        self._tokens = tokens
        self._stop = False
        self._tasks: list[asyncio.Task[None]] = []
        self.requests: dict[str, tuple[Request, tuple[int, ...]]] = {}
        self.times: dict[str, list[float]] = {}
        self.failed: list[str] = []

    def start(self, count: int) -> None:
        self._tasks = [asyncio.create_task(self._stream(i)) for i in range(count)]

    async def stop(self) -> None:
        """Every request under way comes to its end first."""
        self._stop = True
        await asyncio.gather(*self._tasks)

    async def _stream(self, stream: int) -> None:
        number = 0
        while not self._stop:
            number += 1
            engine = self._host.fleet.all[self._workers[stream % len(self._workers)]]
            prompt = tuple(5 + (stream * 131 + number * 17 + i * 7) % 500 for i in range(12))
            request = Request(f"{stream}/{number}", prompt, self._tokens, temperature=0.0)
            try:
                output = await engine.generate(request)
            except ElasticError as exc:
                self.failed.append(f"{request.request_id}: {exc}")
                await asyncio.sleep(0.05)
                continue
            self.times[request.request_id] = engine.token_times.pop(request.request_id)
            self.requests[request.request_id] = (request, output.tokens)
            if len(output.tokens) != self._tokens:
                self.failed.append(f"{request.request_id}: {output.finish} {output.reason}")

    def longest_gap_s(self, begin_s: float, end_s: float) -> float:
        """Between two tokens of one stream, both in that time."""
        gaps = [
            later - earlier
            for times in self.times.values()
            for earlier, later in itertools.pairwise(times)
            if later >= begin_s and earlier <= end_s
        ]
        return max(gaps, default=0.0)


def deployment_settings(
    directory: Path, model: Path, *, slots: int, images: Path, engine: Mapping[str, Any]
) -> dict[str, Any]:
    """Settings of a deployment without Dynamo, everything of it below `directory`."""
    return {
        "deployment": "gpu",
        "model": {"path": str(model), "name": "seeded"},
        "engine": {"device": "cuda", **engine},
        "scale": {"initial_ranks": 1, "max_ranks": slots, "restore_timeout_s": 120},
        "snapshot": {"catalog": str(images)},
        "run_dir": str(directory / "run"),
    }
