"""A vLLM replica as an Engine: what it answers on its socket.

User requests do not come this way: they go from Dynamo's frontend to Dynamo's worker, which is the
engine's own process. A replica has the whole model from its boot on, so the calls that move weights
have nothing to do.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from dynamo_elastic.dynamo.vllm_registrar import REGISTER, UNREGISTER
from dynamo_elastic.dynamo.vllm_seat import ReplicaSeat
from dynamo_elastic.engine.base import (
    Attach,
    EngineState,
    EngineStatus,
    Output,
    PushReport,
    Request,
    SwitchReport,
)
from dynamo_elastic.engine.rpc import handlers
from dynamo_elastic.engine.vllm.epochs import Membership, ReplicaEpochs
from dynamo_elastic.engine.vllm.requests import Requests
from dynamo_elastic.errors import EngineError
from dynamo_elastic.ipc import Handler
from dynamo_elastic.topology import ExpertMove, Topology
from dynamo_elastic.types import Epoch, Rank, WorkerId

_MOVE_TIMEOUT_S = 5.0
_NOTHING_MOVED = PushReport(size_bytes=0, elapsed_s=0.0)


class Replica(Protocol):
    """What is asked of engine.vllm.replica.Replica."""

    async def probe(self) -> tuple[int, ...]: ...

    async def abort_all(self) -> None: ...


class VllmEngine:
    """One attached replica (see engine.base.Engine)."""

    def __init__(
        self, attach: Attach, replica: Replica, requests: Requests, kv_blocks: int
    ) -> None:
        self._attach = attach
        self._replica = replica
        self._requests = requests
        self._kv_blocks = kv_blocks
        self._epochs = ReplicaEpochs()
        self._frozen = False

    async def status(self) -> EngineStatus:
        """`step` and `kv_blocks_used` are not known here: Dynamo has them, from the scheduler."""
        current = self._epochs.current
        return EngineStatus(
            state=self._state(),
            incarnation=self._attach.incarnation,
            epoch=current.epoch if current else Epoch(0),
            rank=current.rank if current else Rank(0),
            world_size=current.world_size if current else 0,
            step=0,
            running=self._requests.running,
            waiting=0,
            masked=(),
            frozen=self._frozen,
            pid=os.getpid(),
            kv_blocks_used=0,
            kv_blocks_total=self._kv_blocks,
        )

    def _state(self) -> EngineState:
        if self._epochs.current is not None:
            return EngineState.SERVING
        return EngineState.ATTACHED if self._epochs.pending is None else EngineState.JOINING

    async def open_epoch(self, epoch: Epoch, rank: Rank, world_size: int) -> dict[str, Any]:
        """Peers need nothing of it."""
        self._epochs.open(Membership(epoch, rank, world_size))
        return {}

    async def connect_epoch(
        self, topology: Topology, endpoints: dict[WorkerId, dict[str, Any]], *, timeout_s: float
    ) -> None:
        """Nobody to connect to."""

    async def load_weights(self, experts: Sequence[int]) -> PushReport:
        """They are there since the boot."""
        return _NOTHING_MOVED

    async def push_dense(
        self, epoch: Epoch, sources: Sequence[WorkerId], joiners: Sequence[WorkerId]
    ) -> PushReport:
        """The joiners have them, from their image or their boot; check() tells."""
        return _NOTHING_MOVED

    async def push_experts(
        self, epoch: Epoch, worker_id: WorkerId, moves: Sequence[ExpertMove]
    ) -> PushReport:
        """Raises EngineError if any are asked for: replicas share no experts."""
        if moves:
            raise EngineError("a replica has no experts that could move")
        return _NOTHING_MOVED

    async def check(self, digests: dict[str, str]) -> dict[str, Any]:
        """The probe alone says whether the weights are right: nobody sent any."""
        tokens = await self._replica.probe()
        return {"probe": hashlib.blake2s(repr(tokens).encode()).hexdigest()}

    async def install(self, topology: Topology, digests: dict[str, str]) -> None:
        """Nothing is routed between replicas."""

    async def decide(self, epoch: Epoch) -> None:
        self._epochs.decide(epoch)

    async def wait_switched(self, epoch: Epoch, *, timeout_s: float) -> SwitchReport:
        """A replica switches when it is told: it knows at once whether it has."""
        self._epochs.check_in_force(epoch)
        return SwitchReport(epoch, gap_s=0.0, decided_to_first_step_s=0.0)

    async def canary(self) -> tuple[int, ...]:
        return await self._replica.probe()

    async def freeze(self, frozen: bool) -> None:
        """Nothing to stop; the flag shows in status()."""
        self._frozen = frozen

    async def drain(self, *, short_tokens: int, timeout_s: float) -> int:
        """Whatever its length, a request may finish until the time is up: on another replica vLLM
        would draw other tokens for its seed. What is left then moves."""
        self._requests.close()
        if await self._requests.idle(timeout_s):
            return 0
        moved = self._requests.running
        self._requests.move()
        await self._replica.abort_all()
        if not await self._requests.idle(_MOVE_TIMEOUT_S):
            raise EngineError(f"{self._requests.running} requests did not move")
        return moved

    async def readmit(self) -> None:
        self._requests.reopen()

    async def disconnect(self, epoch: Epoch) -> None:
        """Nobody is connected."""

    async def abort_epoch(self, epoch: Epoch) -> None:
        self._epochs.abort(epoch)

    async def detach(self) -> None:
        """Raises EngineError: Dynamo's runtime, once made, stays for the life of its process."""
        raise EngineError("a vLLM replica can't give its identity up: end it, and restore an image")

    async def submit(self, request: Request) -> None:
        """Raises EngineError: see the module."""
        raise EngineError("requests reach a vLLM replica through Dynamo alone")

    async def cancel(self, request_id: str) -> None:
        """None of ours is under way."""

    async def outputs(self) -> AsyncIterator[Output]:
        """None, ever: they go to the frontend."""
        return
        yield

    async def close(self) -> None:
        """Nothing to close: the engine lives as long as its process."""


def all_handlers(engine: VllmEngine, seat: ReplicaSeat) -> Mapping[str, Handler]:
    """What the socket of a replica answers."""

    async def register(params: dict[str, Any]) -> int:
        return await seat.take(params["runtime_data"])

    async def unregister(_: dict[str, Any]) -> None:
        await seat.leave()

    return handlers(engine) | {REGISTER: register, UNREGISTER: unregister}
