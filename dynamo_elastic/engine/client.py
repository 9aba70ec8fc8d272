"""An engine in another process of this host, as its shell sees it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from dynamo_elastic.engine.base import EngineStatus, Output, PushReport, Request, SwitchReport
from dynamo_elastic.engine.rpc import OUTPUTS
from dynamo_elastic.errors import EngineGone
from dynamo_elastic.ipc import RpcClient
from dynamo_elastic.topology import ExpertMove, Topology
from dynamo_elastic.types import Epoch, Rank, WorkerId

T = TypeVar("T")

CALL_TIMEOUT_S = 20.0
"""Above what an engine gives its own parts."""

BULK_TIMEOUT_S = 120.0
"""For calls that move, read or compare weights."""

_MARGIN_S = 2.0
"""A call with a deadline of its own gets so much longer to say that it ran out."""


class EngineClient:
    """An Engine (see base) behind the socket at `path`. Close it."""

    def __init__(self, path: Path) -> None:
        self._rpc = RpcClient(path)

    async def _call(
        self, kind: type[T], name: str, timeout_s: float = CALL_TIMEOUT_S, **params: Any
    ) -> T:
        built = {key: msgspec.to_builtins(value, str_keys=True) for key, value in params.items()}
        result = await self._rpc.call(name, built, timeout_s=timeout_s)
        return msgspec.convert(result, kind, str_keys=True)

    async def _do(self, name: str, timeout_s: float = CALL_TIMEOUT_S, **params: Any) -> None:
        await self._call(object, name, timeout_s, **params)

    async def status(self) -> EngineStatus:
        return await self._call(EngineStatus, "status")

    async def open_epoch(self, epoch: Epoch, rank: Rank, world_size: int) -> dict[str, Any]:
        return await self._call(
            dict[str, Any], "open_epoch", epoch=epoch, rank=rank, world_size=world_size
        )

    async def connect_epoch(
        self, topology: Topology, endpoints: dict[WorkerId, dict[str, Any]], *, timeout_s: float
    ) -> None:
        deadline_s = timeout_s + _MARGIN_S
        params = {"topology": topology, "endpoints": endpoints}
        built = {key: msgspec.to_builtins(value, str_keys=True) for key, value in params.items()}
        await self._rpc.call(
            "connect_epoch", {**built, "timeout_s": timeout_s}, timeout_s=deadline_s
        )

    async def load_weights(self, experts: Sequence[int]) -> PushReport:
        return await self._call(PushReport, "load_weights", BULK_TIMEOUT_S, experts=list(experts))

    async def push_dense(
        self, epoch: Epoch, sources: Sequence[WorkerId], joiners: Sequence[WorkerId]
    ) -> PushReport:
        return await self._call(
            PushReport,
            "push_dense",
            BULK_TIMEOUT_S,
            epoch=epoch,
            sources=list(sources),
            joiners=list(joiners),
        )

    async def push_experts(
        self, epoch: Epoch, worker_id: WorkerId, moves: Sequence[ExpertMove]
    ) -> PushReport:
        return await self._call(
            PushReport,
            "push_experts",
            BULK_TIMEOUT_S,
            epoch=epoch,
            worker_id=worker_id,
            moves=list(moves),
        )

    async def check(self, digests: dict[str, str]) -> dict[str, Any]:
        return await self._call(dict[str, Any], "check", BULK_TIMEOUT_S, digests=digests)

    async def install(self, topology: Topology, digests: dict[str, str]) -> None:
        await self._do("install", BULK_TIMEOUT_S, topology=topology, digests=digests)

    async def decide(self, epoch: Epoch) -> None:
        await self._do("decide", epoch=epoch)

    async def wait_switched(self, epoch: Epoch, *, timeout_s: float) -> SwitchReport:
        params = {"epoch": epoch, "timeout_s": timeout_s}
        result = await self._rpc.call("wait_switched", params, timeout_s=timeout_s + _MARGIN_S)
        return msgspec.convert(result, SwitchReport)

    async def canary(self) -> tuple[int, ...]:
        return await self._call(tuple[int, ...], "canary")

    async def freeze(self, frozen: bool) -> None:
        await self._do("freeze", frozen=frozen)

    async def drain(self, *, short_tokens: int, timeout_s: float) -> int:
        params = {"short_tokens": short_tokens, "timeout_s": timeout_s}
        moved = await self._rpc.call("drain", params, timeout_s=timeout_s + CALL_TIMEOUT_S)
        return int(moved)

    async def readmit(self) -> None:
        await self._do("readmit")

    async def disconnect(self, epoch: Epoch) -> None:
        await self._do("disconnect", epoch=epoch)

    async def abort_epoch(self, epoch: Epoch) -> None:
        await self._do("abort_epoch", epoch=epoch)

    async def detach(self) -> None:
        await self._do("detach")

    async def submit(self, request: Request) -> None:
        await self._do("submit", request=request)

    async def cancel(self, request_id: str) -> None:
        await self._do("cancel", request_id=request_id)

    async def outputs(self) -> AsyncIterator[Output]:
        async with self._rpc.stream(OUTPUTS, {}) as steps:
            async for step in steps:
                for output in msgspec.convert(step, list[Output]):
                    yield output
        raise EngineGone("the stream of outputs ended")

    async def close(self) -> None:
        await self._rpc.close()
