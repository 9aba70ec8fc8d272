"""The reference engine as an Engine: what its RPC server serves, in the server's thread.

Work on epochs goes to one worker thread, work on sequences to the step loop.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from dynamo_elastic.engine.base import (
    Attach,
    EngineStatus,
    Finish,
    Output,
    PushReport,
    Request,
    SwitchReport,
)
from dynamo_elastic.engine.reference.epochs import Epochs
from dynamo_elastic.engine.reference.feed import Feed
from dynamo_elastic.engine.reference.loop import StepLoop
from dynamo_elastic.errors import EngineError, EngineGone
from dynamo_elastic.topology import ExpertMove, Topology
from dynamo_elastic.types import Epoch, Rank, WorkerId

T = TypeVar("T")

CANARY_PROMPT = tuple(range(1, 9))
CANARY_TOKENS = 4

_DRAIN_POLL_S = 0.01
_CANARY_TIMEOUT_S = 15.0
_EXPERTS_POLL_S = 0.05
_LOOP_TIMEOUT_S = 15.0
"""For the step loop to take in a call; a step may wait for a silent peer meanwhile."""


class ReferenceEngine:
    """One attached engine (see engine.base.Engine)."""

    def __init__(self, attach: Attach, loop: StepLoop, epochs: Epochs, feed: Feed) -> None:
        self._attach = attach
        self._loop = loop
        self._epochs = epochs
        self._feed = feed
        self._frozen = False
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="epochs")

    async def _prepare(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, function)

    def _require_life(self) -> None:
        """Its socket is there for a moment longer than this life of the engine."""
        if self._loop.over:
            raise EngineGone(f"{self._attach.incarnation} is detached")

    async def _in_loop(self, function: Callable[[], T]) -> T:
        self._require_life()
        try:
            future = asyncio.wrap_future(self._loop.calls.put(function))
            return await asyncio.wait_for(future, _LOOP_TIMEOUT_S)
        except TimeoutError as exc:
            raise EngineError("the step loop is stuck in a step") from exc

    async def status(self) -> EngineStatus:
        self._require_life()
        loop = self._loop
        current = loop.current
        return EngineStatus(
            state=loop.state,
            incarnation=self._attach.incarnation,
            epoch=current.epoch if current else Epoch(0),
            rank=current.rank if current else Rank(0),
            world_size=current.group.world_size if current else 0,
            step=loop.step,
            running=loop.scheduler.running,
            waiting=loop.scheduler.waiting,
            masked=tuple(sorted(current.masked)) if current else (),
            frozen=self._frozen,
            pid=os.getpid(),
            kv_blocks_used=loop.scheduler.kv_blocks_used,
            kv_blocks_total=loop.scheduler.kv_blocks_total,
            lost_experts=current.lost_experts if current else (),
        )

    async def open_epoch(self, epoch: Epoch, rank: Rank, world_size: int) -> dict[str, Any]:
        self._epochs.interrupt(Epoch(epoch - 1))
        return await self._prepare(lambda: self._epochs.open(epoch, rank, world_size))

    async def connect_epoch(
        self, topology: Topology, endpoints: dict[WorkerId, dict[str, Any]], *, timeout_s: float
    ) -> None:
        await self._prepare(lambda: self._epochs.connect(topology, endpoints, timeout_s=timeout_s))

    async def load_weights(self, experts: Sequence[int]) -> PushReport:
        return await self._prepare(lambda: self._epochs.load(experts))

    async def push_dense(
        self, epoch: Epoch, sources: Sequence[WorkerId], joiners: Sequence[WorkerId]
    ) -> PushReport:
        return await self._prepare(lambda: self._epochs.push_dense(epoch, sources, joiners))

    async def push_experts(
        self, epoch: Epoch, worker_id: WorkerId, moves: Sequence[ExpertMove]
    ) -> PushReport:
        return await self._prepare(lambda: self._epochs.push_experts(epoch, worker_id, moves))

    async def check(self, digests: dict[str, str]) -> dict[str, Any]:
        return await self._prepare(lambda: self._epochs.check(digests))

    async def install(self, topology: Topology, digests: dict[str, str]) -> None:
        await self._prepare(lambda: self._epochs.install(topology, digests))

    async def decide(self, epoch: Epoch) -> None:
        await self._in_loop(lambda: self._loop.decide(epoch))

    async def wait_switched(self, epoch: Epoch, *, timeout_s: float) -> SwitchReport:
        try:
            future = asyncio.wrap_future(self._loop.switched(epoch))
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError as exc:
            raise EngineError(
                f"no switch to epoch {epoch} within {timeout_s:g} s: the rank is "
                f"{self._loop.state.value}"
            ) from exc

    async def canary(self) -> tuple[int, ...]:
        request_id, tokens = self._feed.private()
        request = Request(request_id, CANARY_PROMPT, CANARY_TOKENS, temperature=0.0)
        try:
            await self._in_loop(lambda: self._loop.submit_always(request))
            async with asyncio.timeout(_CANARY_TIMEOUT_S):
                while not tokens.done():
                    self._require_experts()
                    await asyncio.wait({tokens}, timeout=_EXPERTS_POLL_S)
            return tokens.result()
        except TimeoutError as exc:
            raise EngineError(f"the canary did not end within {_CANARY_TIMEOUT_S:g} s") from exc
        finally:
            self._feed.drop(request_id)

    def _require_experts(self) -> None:
        current = self._loop.current
        if current is not None and current.lost_experts:
            raise EngineError(f"experts {list(current.lost_experts)} are lost with their rank")

    async def logits(self, prompt: Sequence[int]) -> list[float]:
        """After `prompt`, computed in a step of the group in force, to be compared with those of
        other ranks. Not a call of Engine."""
        request_id, _ = self._feed.private()
        request = Request(request_id, tuple(prompt), 1, temperature=0.0)
        try:
            asked = await self._in_loop(lambda: self._loop.logits(request))
            logits = await asyncio.wait_for(asyncio.wrap_future(asked), _CANARY_TIMEOUT_S)
        except TimeoutError as exc:
            raise EngineError(f"no logits within {_CANARY_TIMEOUT_S:g} s") from exc
        finally:
            self._loop.forget_logits(request_id)
            self._feed.drop(request_id)
        return [float(value) for value in logits]

    async def freeze(self, frozen: bool) -> None:
        """Nothing to stop: this engine moves no experts of its own accord, only in push_experts().
        The flag shows in status()."""
        self._frozen = frozen

    async def drain(self, *, short_tokens: int, timeout_s: float) -> int:
        moved = await self._in_loop(lambda: self._begin_drain(short_tokens))
        clock = asyncio.get_running_loop()
        deadline = clock.time() + timeout_s
        while self._loop.scheduler.busy and clock.time() < deadline:
            await asyncio.sleep(_DRAIN_POLL_S)
        return moved + await self._in_loop(lambda: self._loop.end(Finish.MOVED, longer_than=0))

    def _begin_drain(self, short_tokens: int) -> int:
        self._loop.draining = True
        return self._loop.end(Finish.MOVED, longer_than=short_tokens)

    async def readmit(self) -> None:
        self._loop.draining = False

    async def disconnect(self, epoch: Epoch) -> None:
        await self._prepare(lambda: self._epochs.disconnect(epoch))

    async def abort_epoch(self, epoch: Epoch) -> None:
        self._epochs.interrupt(epoch)
        await self._prepare(lambda: self._epochs.abort(epoch))

    async def detach(self) -> None:
        await self._in_loop(self._loop.detach)

    async def submit(self, request: Request) -> None:
        await self._in_loop(lambda: self._loop.submit(request))

    async def cancel(self, request_id: str) -> None:
        await self._in_loop(lambda: self._loop.cancel(request_id))

    async def outputs(self) -> AsyncIterator[Output]:
        async for step in self._feed.steps():
            for output in step:
                yield output

    async def close(self) -> None:
        """Nobody prepares epochs any more."""
        self._worker.shutdown()
