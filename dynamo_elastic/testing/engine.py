"""FakeEngine: an Engine in this process, without a model, that fails when and where it is told to.

Its tokens follow the same law as real ones (prompt, seed and position decide), so a request that
moves from one fake to another goes on with the same tokens.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
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
from dynamo_elastic.errors import ElasticError, EngineError, EngineGone
from dynamo_elastic.topology import ExpertMove, Topology
from dynamo_elastic.types import NO_INCARNATION, Epoch, Incarnation, Rank, WorkerId

VOCABULARY = 1000
DENSE_DIGESTS = {"dense/all": "d0"}
PROBE = "p0"


def fake_tokens(request: Request, count: int) -> tuple[int, ...]:
    """The next `count` tokens of `request`, on any fake."""
    tokens = list(request.prompt)
    for _ in range(count):
        tokens.append(zlib.crc32(f"{request.seed}:{tokens}".encode()) % VOCABULARY)
    return tuple(tokens[len(request.prompt) :])


@dataclass(slots=True)
class _Running:
    request: Request
    generated: int = 0


@dataclass
class FakeEngine:
    """An attached engine. Nothing happens by itself: each step() makes one token per request.

    `failures[call]` is raised by that call, every time until it is removed; a call waits for
    `holds[call]` to be set. `calls` lists the calls that came, refused ones included.
    """

    worker_id: WorkerId
    incarnation: Incarnation = NO_INCARNATION
    max_context: int = 256
    failures: dict[str, ElasticError] = field(default_factory=dict)
    holds: dict[str, asyncio.Event] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    state: EngineState = EngineState.ATTACHED
    topology: Topology | None = None
    """In force."""
    frozen: bool = False
    draining: bool = False
    masked: tuple[Rank, ...] = ()
    lost_experts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self._opened: dict[Epoch, tuple[Rank, int]] = {}
        self._pending: Topology | None = None
        self._over = Epoch(0)
        self._running: dict[str, _Running] = {}
        self._outputs: asyncio.Queue[Output | None] = asyncio.Queue()
        self._steps = 0
        self._gone = False

    def die(self) -> None:
        """From now on every call, and the reader of outputs, sees EngineGone."""
        self._gone = True
        self._outputs.put_nowait(None)

    def step(self) -> None:
        """One token for every request."""
        self._steps += 1
        for running in list(self._running.values()):
            running.generated += 1
            token = fake_tokens(running.request, running.generated)[-1]
            finish = None
            if token in running.request.stop_tokens:
                finish = Finish.STOP
            elif running.generated == running.request.max_tokens:
                finish = Finish.LENGTH
            self._put(running, (token,), finish)

    def _put(self, running: _Running, tokens: tuple[int, ...], finish: Finish | None) -> None:
        request_id = running.request.request_id
        if finish:
            del self._running[request_id]
        self._outputs.put_nowait(Output(request_id, tokens, finish))

    async def _enter(self, call: str) -> None:
        self.calls.append(call)
        if call in self.holds:
            await self.holds[call].wait()
        if self._gone:
            raise EngineGone(f"{call}: the fake is dead")
        if call in self.failures:
            raise self.failures[call]

    def _refuse_old(self, epoch: Epoch) -> None:
        in_force = self.topology.epoch if self.topology else Epoch(0)
        if epoch < in_force or (epoch <= self._over and epoch != in_force):
            raise EngineError(
                f"epoch {epoch} is over: it was aborted, or a newer one is open or in force"
            )

    def _drop(self, epoch: Epoch) -> None:
        self._over = max(self._over, epoch)
        self._opened = {e: seat for e, seat in self._opened.items() if e > epoch}
        if self._pending and self._pending.epoch <= epoch:
            self._pending = None
            if self.topology is None:
                self.state = EngineState.ATTACHED

    async def status(self) -> EngineStatus:
        await self._enter("status")
        topology = self.topology
        return EngineStatus(
            state=self.state,
            incarnation=self.incarnation,
            epoch=topology.epoch if topology else Epoch(0),
            rank=(topology.rank_of(self.worker_id) if topology else None) or Rank(0),
            world_size=topology.world_size if topology else 0,
            step=self._steps,
            running=len(self._running),
            waiting=0,
            masked=self.masked,
            lost_experts=self.lost_experts,
            frozen=self.frozen,
            pid=1,
            kv_blocks_used=len(self._running),
            kv_blocks_total=100,
        )

    async def open_epoch(self, epoch: Epoch, rank: Rank, world_size: int) -> dict[str, Any]:
        await self._enter("open_epoch")
        self._refuse_old(epoch)
        self._drop(Epoch(epoch - 1))
        self._opened[epoch] = (rank, world_size)
        return {"fake": self.worker_id}

    async def connect_epoch(
        self, topology: Topology, endpoints: dict[WorkerId, dict[str, Any]], *, timeout_s: float
    ) -> None:
        await self._enter("connect_epoch")
        self._refuse_old(topology.epoch)
        if topology.epoch not in self._opened:
            raise EngineError(f"epoch {topology.epoch} is not open here")
        missing = [w for w in topology.worker_ids if w != self.worker_id and w not in endpoints]
        if missing:
            raise EngineError(f"endpoints of {missing} are missing")
        self._pending = topology
        if self.topology is None:
            self.state = EngineState.JOINING

    async def load_weights(self, experts: Sequence[int]) -> PushReport:
        await self._enter("load_weights")
        return PushReport(1, 0.001, {self.worker_id: DENSE_DIGESTS})

    async def push_dense(
        self, epoch: Epoch, sources: Sequence[WorkerId], joiners: Sequence[WorkerId]
    ) -> PushReport:
        await self._enter("push_dense")
        self._refuse_old(epoch)
        sent = dict.fromkeys(joiners, DENSE_DIGESTS)
        return PushReport(1, 0.001, sent, PROBE, links=dict.fromkeys(joiners, 1))

    async def push_experts(
        self, epoch: Epoch, worker_id: WorkerId, moves: Sequence[ExpertMove]
    ) -> PushReport:
        await self._enter("push_experts")
        self._refuse_old(epoch)
        digests: dict[WorkerId, dict[str, str]] = {}
        for move in moves:
            if move.from_worker == worker_id:
                region = f"slot{move.to_slot}/all"
                digests.setdefault(move.to_worker, {})[region] = f"e{move.expert}"
        return PushReport(len(digests), 0.001, digests, links=dict.fromkeys(digests, 1))

    async def check(self, digests: dict[str, str]) -> dict[str, Any]:
        await self._enter("check")
        proven = digests or self.state is not EngineState.SERVING
        if proven and any(digests.get(k) != v for k, v in DENSE_DIGESTS.items()):
            raise EngineError("digests of dense regions are missing or differ")
        return {"probe": PROBE}

    async def install(self, topology: Topology, digests: dict[str, str]) -> None:
        await self._enter("install")
        if self.topology and self.topology.epoch == topology.epoch:
            self.topology = topology
        elif self._pending and self._pending.epoch == topology.epoch:
            self._pending = topology
        else:
            raise EngineError(f"epoch {topology.epoch} is neither in force nor pending")

    async def decide(self, epoch: Epoch) -> None:
        await self._enter("decide")
        if self.topology and self.topology.epoch == epoch:
            return
        if self._pending is None or self._pending.epoch != epoch:
            raise EngineError(f"epoch {epoch} is not connected here")
        self.topology, self._pending = self._pending, None
        self.state = EngineState.SERVING

    async def wait_switched(self, epoch: Epoch, *, timeout_s: float) -> SwitchReport:
        await self._enter("wait_switched")
        if self.topology is None or self.topology.epoch != epoch:
            raise EngineError(f"no switch to epoch {epoch} within {timeout_s:g} s")
        return SwitchReport(epoch, 0.001, 0.002)

    async def canary(self) -> tuple[int, ...]:
        await self._enter("canary")
        self._require_serving()
        return fake_tokens(Request("canary", (1,), 8), 8)

    def _require_serving(self) -> None:
        if self.state is not EngineState.SERVING:
            raise EngineError(f"the rank serves nobody: it is {self.state.value}")

    async def freeze(self, frozen: bool) -> None:
        await self._enter("freeze")
        self.frozen = frozen

    async def drain(self, *, short_tokens: int, timeout_s: float) -> int:
        await self._enter("drain")
        self.draining = True
        running = list(self._running.values())
        for one in running:
            self._put(one, (), Finish.MOVED)
        return len(running)

    async def readmit(self) -> None:
        await self._enter("readmit")
        self.draining = False

    async def disconnect(self, epoch: Epoch) -> None:
        await self._enter("disconnect")

    async def abort_epoch(self, epoch: Epoch) -> None:
        await self._enter("abort_epoch")
        if self.topology and self.topology.epoch == epoch:
            raise EngineError(f"epoch {epoch} is in force")
        self._drop(epoch)

    async def detach(self) -> None:
        await self._enter("detach")
        if self.state not in (EngineState.ATTACHED, EngineState.LEFT):
            raise EngineError(f"the rank is {self.state.value}: it has to leave its group first")
        self.die()

    async def submit(self, request: Request) -> None:
        await self._enter("submit")
        self._require_serving()
        if self.draining:
            raise EngineError("the rank drains; send the request to another worker")
        if len(request.prompt) + request.max_tokens > self.max_context:
            raise EngineError(f"prompt + max_tokens is above max_context {self.max_context}")
        if request.request_id in self._running:
            raise EngineError(f"request {request.request_id}: request_id is in use")
        self._running[request.request_id] = _Running(request)

    async def cancel(self, request_id: str) -> None:
        await self._enter("cancel")
        if request_id in self._running:
            self._put(self._running[request_id], (), Finish.CANCELLED)

    async def outputs(self) -> AsyncIterator[Output]:
        while True:
            output = await self._outputs.get()
            if output is None:
                raise EngineGone("the fake is dead")
            yield output

    async def close(self) -> None:
        """Nothing to close."""
