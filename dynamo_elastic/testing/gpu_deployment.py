"""A host of reference engines on GPUs under its real agent, driven without a control plane."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from dynamo_elastic.agent.base import StartedEngine, Tier
from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.engine.base import Finish, Output, Request
from dynamo_elastic.errors import ElasticError, EngineError
from dynamo_elastic.testing.engine_process import AttachedEngine
from dynamo_elastic.testing.fleet import Fleet
from dynamo_elastic.testing.gpu_agent import GpuAgent
from dynamo_elastic.topology import EngineShape
from dynamo_elastic.types import Epoch, OperationId, WorkerId

_TIMEOUT_S = 60.0
_PROMPT_TOKENS = 12


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
        engine = AttachedEngine(worker, Path(started.socket_path))
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
    """Clients that stream one request after the other, and every token's time.

    Those of `home` stay; guests stream from workers that leave again, and what is under way there
    then goes on at home.
    """

    def __init__(self, host: GpuHost, home: Sequence[WorkerId], *, tokens: int) -> None:
        self._host = host
        self._home = home
        self._tokens = tokens
        self._stop = False
        self._tasks: list[asyncio.Task[None]] = []
        self.requests: dict[str, tuple[Request, tuple[int, ...]]] = {}
        self.times: dict[str, list[float]] = {}
        """Of requests that did not move."""
        self.moved_gaps_s: list[float] = []
        """From the last token at one worker to the first at the next, of each that did."""
        self.failed: list[str] = []

    def start(self, count: int) -> None:
        """So many clients at home."""
        workers = [self._home[i % len(self._home)] for i in range(count)]
        self._tasks += [
            asyncio.create_task(self._stream(f"home{i}", worker))
            for i, worker in enumerate(workers)
        ]

    def visit(self, workers: Sequence[WorkerId], count: int) -> None:
        """So many guests of each of `workers`, until these drain."""
        self._tasks += [
            asyncio.create_task(self._stream(f"{worker}-{len(self._tasks) + i}", worker))
            for worker in workers
            for i in range(count)
        ]

    async def stop(self) -> None:
        """Every request under way comes to its end first."""
        self._stop = True
        await asyncio.gather(*self._tasks)

    async def _stream(self, name: str, worker: WorkerId) -> None:
        number = 0
        while not self._stop:
            number += 1
            first = zlib.crc32(f"{name}/{number}".encode())
            prompt = tuple(5 + (first + i * 7) % 500 for i in range(_PROMPT_TOKENS))
            request = Request(f"{name}/{number}", prompt, self._tokens, temperature=0.0)
            try:
                if not await self._ask(request, worker):
                    return
            except (ElasticError, TimeoutError) as exc:
                if "drains" in str(exc):
                    return
                self.failed.append(f"{request.request_id}: {type(exc).__name__}: {exc}")
                await asyncio.sleep(0.05)

    async def _ask(self, request: Request, worker: WorkerId) -> bool:
        """False if the request had to move."""
        output, times = await self._answer(worker, request)
        moved = output.finish is Finish.MOVED
        if moved:
            rest = replace(
                request,
                prompt=request.prompt + output.tokens,
                max_tokens=request.max_tokens - len(output.tokens),
            )
            more, later = await self._answer(self._home[0], rest)
            if times and later:
                self.moved_gaps_s.append(later[0] - times[-1])
            output = replace(more, tokens=output.tokens + more.tokens)
        else:
            self.times[request.request_id] = times
        self.requests[request.request_id] = (request, output.tokens)
        if len(output.tokens) != self._tokens:
            self.failed.append(f"{request.request_id}: {output.finish} {output.reason}")
        return not moved

    async def _answer(self, worker: WorkerId, request: Request) -> tuple[Output, list[float]]:
        engine = self._host.fleet.all[worker]
        output = await engine.generate(request)
        return output, engine.token_times.pop(request.request_id, [])

    def longest_gap_s(self, begin_s: float, end_s: float) -> float:
        """Between two tokens of one stream that did not move, both in that time."""
        return max(self._gaps(begin_s, end_s).values(), default=0.0)

    def gap_quantiles_s(self, begin_s: float, end_s: float) -> dict[str, float]:
        """Of the longest gap of each stream in that time: half of the streams, all of them."""
        longest = sorted(self._gaps(begin_s, end_s).values())
        if not longest:
            return {}
        return {"streams": len(longest), "half": longest[len(longest) // 2], "all": longest[-1]}

    def _gaps(self, begin_s: float, end_s: float) -> dict[str, float]:
        """Stream -> its longest gap in that time."""
        found: dict[str, float] = {}
        for request_id, times in self.times.items():
            stream = request_id.partition("/")[0]
            for earlier, later in itertools.pairwise(times):
                if later >= begin_s and earlier <= end_s:
                    found[stream] = max(found.get(stream, 0.0), later - earlier)
        return found


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
