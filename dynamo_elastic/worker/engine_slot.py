"""The one engine of a shell's GPU slot: started and ended through the agent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from dynamo_elastic.agent.base import StartedEngine, Tier
from dynamo_elastic.engine.base import Engine
from dynamo_elastic.types import Epoch, Incarnation, OperationId
from dynamo_elastic.worker.base import ShellParts


class EngineSlot:
    """Owns the client of the engine, and the task that reads what it says."""

    def __init__(
        self, parts: ShellParts, read: Callable[[Engine, StartedEngine], Awaitable[None]]
    ) -> None:
        """`read` runs beside everything else for as long as there is an engine."""
        self._parts = parts
        self._read = read
        self._operation_id: OperationId | None = None
        self._starting: asyncio.Task[StartedEngine] | None = None
        self._reading: asyncio.Future[None] | None = None
        self.engine: Engine | None = None

    def holds_other(self, operation_id: OperationId) -> bool:
        """True if an engine of another operation is here, or on its way."""
        return self._starting is not None and self._operation_id != operation_id

    async def start(
        self,
        operation_id: OperationId,
        epoch: Epoch,
        *,
        tiers: tuple[Tier, ...] = tuple(Tier),
        founds: bool = False,
        timeout_s: float,
    ) -> StartedEngine:
        """An attached engine of this operation, from the first of `tiers` that works; asked again,
        the same one. Raises EngineError.

        A start that outlives this call goes on; end() waits for it.
        """
        if self._starting is None:
            self._operation_id = operation_id
            start = self._parts.agent.start_engine(
                self._parts.slot,
                self._parts.worker_id,
                operation_id,
                epoch,
                tiers=tiers,
                founds=founds,
                timeout_s=timeout_s,
            )
            self._starting = asyncio.create_task(start)
        started = await asyncio.shield(self._starting)
        self._connect(started)
        return started

    async def adopt(self, incarnation: Incarnation) -> bool:
        """Take over the engine of this slot, which an earlier shell of it started, if it is
        `incarnation`. Raises EngineError."""
        for slot in await self._parts.agent.slots():
            if slot.slot != self._parts.slot or slot.incarnation != incarnation:
                continue
            started = StartedEngine(
                incarnation, slot.pid, slot.socket_path, Tier(slot.tier), 0.0, slot.fell_through
            )
            self._starting = asyncio.create_task(_done(started))
            self._connect(started)
            return True
        return False

    def _connect(self, started: StartedEngine) -> None:
        if self.engine is None:
            self.engine = self._parts.connect(started.socket_path)
            self._reading = asyncio.ensure_future(self._read(self.engine, started))

    async def end(self, *, park_s: float = 0.0) -> str:
        """No engine serves in the slot, an earlier shell's neither. With `park_s` seconds for it,
        the agent is asked to park it; returns '' if it did, else why it was ended. Idempotent;
        raises EngineError."""
        reason = ""
        await self.close()
        if self._starting is not None:
            await asyncio.gather(asyncio.shield(self._starting), return_exceptions=True)
            self._starting = None
        for slot in await self._parts.agent.slots():
            if slot.slot != self._parts.slot or not slot.incarnation:
                continue
            if park_s:
                reason = await self._parts.agent.park_engine(
                    slot.slot, slot.incarnation, timeout_s=park_s
                )
            else:
                await self._parts.agent.stop_engine(slot.slot, slot.incarnation)
        return reason

    async def close(self) -> None:
        """Let go of the engine, which lives on. Idempotent."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
            self._reading = None
        if self.engine is not None:
            await self.engine.close()
            self.engine = None


async def _done(started: StartedEngine) -> StartedEngine:
    return started
