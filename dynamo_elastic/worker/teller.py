"""After each operation: tells the coordinator what tokens passed through this shell around it."""

from __future__ import annotations

import asyncio
import time

from dynamo_elastic.coordinator.records import CommandRecord
from dynamo_elastic.types import OperationId
from dynamo_elastic.worker.base import ShellParts
from dynamo_elastic.worker.presence import Presence
from dynamo_elastic.worker.traffic import TokenMeter

LEAD_S = 2.0
TAIL_S = 1.0
"""What is told begins so long before the operation's first command and ends so long after it."""


class TrafficTeller:
    """One shell's; see() comes before tell()."""

    def __init__(self, parts: ShellParts, presence: Presence, meter: TokenMeter) -> None:
        self._parts = parts
        self._presence = presence
        self._meter = meter
        self._operation: OperationId | None = None
        self._since_s = 0.0
        self._told: str | None = None

    def see(self, command: CommandRecord) -> None:
        """A command has come: its operation is under way."""
        if command.operation_id != self._operation:
            self._operation = command.operation_id
            self._since_s = time.time() - LEAD_S

    async def tell(self) -> None:
        """The operation that was under way is over. Raises SessionLost."""
        operation, since_s, self._operation = self._operation, self._since_s, None
        if operation is None:
            return
        await asyncio.sleep(TAIL_S)
        worker = self._parts.worker_id
        traffic = self._meter.window(worker, since_s, time.time())
        if traffic is not None:
            # Who is told late has given up, and nobody but us takes the last one away.
            key = self._parts.keys.traffic(operation, worker)
            await self._presence.put(key, traffic, instead_of=self._told)
            self._told = key
