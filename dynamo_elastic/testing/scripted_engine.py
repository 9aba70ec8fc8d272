"""ScriptedEngine: the Engine protocol without a model, for tests of what is around an engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from dynamo_elastic.engine.base import (
    EngineState,
    EngineStatus,
    Finish,
    Output,
    PushReport,
    Request,
    SwitchReport,
)
from dynamo_elastic.errors import EngineError, EngineGone
from dynamo_elastic.topology import ExpertMove, Topology
from dynamo_elastic.types import Epoch, Incarnation, Rank, WorkerId


def token_at(seed: int, position: int) -> int:
    """The token of a request at an absolute position: never 0-9, the same on every rank."""
    return (seed * 31 + position * 7) % 90 + 10


class ScriptedEngine:
    """Engine in memory. `calls` names every call in order; `refuse` maps a call's name to what it
    raises; `die()` is a crash. A step takes `step_s`."""

    def __init__(self, incarnation: Incarnation, step_s: float = 0.01) -> None:
        self.incarnation = incarnation
        self.calls: list[str] = []
        self.refuse: dict[str, Exception] = {}
        self.draining = False
        self.frozen = False
        self.epoch = Epoch(0)
        self._step_s = step_s
        self._outputs: asyncio.Queue[Output | None] = asyncio.Queue()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._to_go: dict[str, int] = {}
        self._dead = False
        self._decided: dict[Epoch, asyncio.Event] = {}

    def die(self) -> None:
        """End like a killed process: requests stop, every call and the outputs raise EngineGone."""
        self._dead = True
        for task in self._running.values():
            task.cancel()
        self._outputs.put_nowait(None)

    def _begin(self, call: str) -> None:
        if self._dead:
            raise EngineGone(f"{call}: scripted death")
        self.calls.append(call)
        if call in self.refuse:
            raise self.refuse[call]

    async def status(self) -> EngineStatus:
        if self._dead:
            raise EngineGone("status: scripted death")
        return EngineStatus(
            state=EngineState.SERVING if self.epoch else EngineState.ATTACHED,
            incarnation=self.incarnation,
            epoch=self.epoch,
            rank=Rank(0),
            world_size=1,
            step=0,
            running=len(self._running),
            waiting=0,
            masked=(),
            frozen=self.frozen,
            pid=0,
            kv_blocks_used=len(self._running),
            kv_blocks_total=64,
        )

    async def open_epoch(self, epoch: Epoch, rank: Rank, world_size: int) -> dict[str, Any]:
        self._begin("open_epoch")
        return {"address": f"{self.incarnation}@{epoch}"}

    async def connect_epoch(
        self, topology: Topology, endpoints: dict[WorkerId, dict[str, Any]], *, timeout_s: float
    ) -> None:
        self._begin("connect_epoch")

    async def load_weights(self, experts: Sequence[int]) -> PushReport:
        self._begin("load_weights")
        return PushReport(size_bytes=100, elapsed_s=0.1)

    async def push_dense(
        self, epoch: Epoch, sources: Sequence[WorkerId], joiners: Sequence[WorkerId]
    ) -> PushReport:
        self._begin("push_dense")
        return PushReport(100, 0.1, {w: {"dense/a": "digest"} for w in joiners})

    async def push_experts(
        self, epoch: Epoch, worker_id: WorkerId, moves: Sequence[ExpertMove]
    ) -> PushReport:
        self._begin("push_experts")
        targets = [m.to_worker for m in moves if m.from_worker == worker_id]
        return PushReport(10 * len(targets), 0.1, {w: {"slot0/a": "digest"} for w in targets})

    async def check(self, digests: dict[str, str]) -> dict[str, Any]:
        self._begin("check")
        return {"probe": "logits"}

    async def install(self, topology: Topology, digests: dict[str, str]) -> None:
        self._begin("install")

    async def decide(self, epoch: Epoch) -> None:
        self._begin("decide")
        self.epoch = epoch
        self._decision(epoch).set()

    async def wait_switched(self, epoch: Epoch, *, timeout_s: float) -> SwitchReport:
        self._begin("wait_switched")
        await self._decision(epoch).wait()
        return SwitchReport(epoch, 0.001, 0.002)

    async def canary(self) -> tuple[int, ...]:
        self._begin("canary")
        return tuple(token_at(0, position) for position in range(4))

    async def freeze(self, frozen: bool) -> None:
        self._begin("freeze" if frozen else "thaw")
        self.frozen = frozen

    async def drain(self, *, short_tokens: int, timeout_s: float) -> int:
        self._begin("drain")
        self.draining = True
        moved = [r for r, left in self._to_go.items() if left > short_tokens]
        for request_id in moved:
            self._running[request_id].cancel()
            self._end(request_id, Output(request_id, (), Finish.MOVED))
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        return len(moved)

    async def readmit(self) -> None:
        self._begin("readmit")
        self.draining = False

    async def disconnect(self, epoch: Epoch) -> None:
        self._begin("disconnect")

    async def abort_epoch(self, epoch: Epoch) -> None:
        self._begin("abort_epoch")

    async def submit(self, request: Request) -> None:
        self._begin("submit")
        if self.draining:
            raise EngineError("the rank drains")
        self._to_go[request.request_id] = request.max_tokens
        self._running[request.request_id] = asyncio.create_task(self._generate(request))

    async def cancel(self, request_id: str) -> None:
        self._begin("cancel")
        if request_id in self._running:
            self._running[request_id].cancel()
            self._end(request_id, Output(request_id, (), Finish.CANCELLED))

    async def outputs(self) -> AsyncIterator[Output]:
        while (output := await self._outputs.get()) is not None:
            yield output
        raise EngineGone("outputs: scripted death")

    async def close(self) -> None:
        self.calls.append("close")

    def _decision(self, epoch: Epoch) -> asyncio.Event:
        return self._decided.setdefault(epoch, asyncio.Event())

    async def _generate(self, request: Request) -> None:
        for n in range(1, request.max_tokens + 1):
            await asyncio.sleep(self._step_s)
            token = token_at(request.seed, len(request.prompt) + n - 1)
            self._to_go[request.request_id] = request.max_tokens - n
            stop = Finish.STOP if token in request.stop_tokens else None
            finish = Finish.LENGTH if n == request.max_tokens else stop
            output = Output(request.request_id, (token,), finish)
            if finish is not None:
                self._end(request.request_id, output)
                return
            self._outputs.put_nowait(output)

    def _end(self, request_id: str, output: Output) -> None:
        del self._running[request_id], self._to_go[request_id]
        self._outputs.put_nowait(output)
