"""Misfortune in a simulated deployment: which process meets it, where, and of what kind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum

from dynamo_elastic.coordinator.store import Guard, Op, Store, Versioned, Watch
from dynamo_elastic.errors import EngineError, OutcomeUnknown, StoreUnavailable
from dynamo_elastic.failpoints import error_at
from dynamo_elastic.types import LeaseId


class Mishap(StrEnum):
    CRASH = "crash"
    """The process (or the engine) is gone; a process comes back after a while."""
    ERROR = "error"
    """The call fails, and nothing has happened."""
    DELAY = "delay"
    """What the process says or asks next takes longer than anybody waits for it."""
    LOST_REPLY = "lost_reply"
    """It has happened, and the answer is lost."""
    STUCK = "stuck"
    """The call fails again and again, for longer than a step may take."""


@dataclass(slots=True)
class Fault:
    """Hits `process` when it comes by `place` for the `nth` time (from 0), once."""

    process: str
    place: str
    mishap: Mishap
    nth: int = 0
    until_s: float = 0.0

    def here(self, process: str, place: str, lasts_s: float) -> Mishap | None:
        """What happens here and now."""
        if (process, place) != (self.process, self.place):
            return None
        now_s = asyncio.get_running_loop().time()
        self.nth -= 1
        if self.nth == -1:
            self.until_s = now_s + lasts_s
        if self.mishap is Mishap.STUCK:
            return self.mishap if now_s < self.until_s else None
        return self.mishap if self.nth == -1 else None


@dataclass(slots=True)
class Misfortune:
    """The faults of one schedule."""

    faults: list[Fault]
    delay_s: float
    met: list[str] = field(default_factory=list)
    """Places at which something has happened, in order."""
    over: bool = False

    def at(self, process: str, place: str) -> Mishap | None:
        """What happens to `process` at `place` now."""
        if self.over:
            return None
        for fault in self.faults:
            mishap = fault.here(process, place, self.delay_s)
            if mishap is not None:
                self.met.append(place)
                return mishap
        return None


PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)


@dataclass(slots=True)
class Process:
    """One process of the deployment, as the store and the failpoints see it."""

    name: str
    misfortune: Misfortune
    task: asyncio.Task[None] | None = None
    dead: bool = False
    next_store: Mishap | None = field(default=None)

    def crash(self) -> None:
        """Gone: nothing that it still does reaches anybody."""
        self.dead = True
        if self.task is not None:
            self.task.cancel()


def meet(name: str) -> None:
    """The hook for failpoints: what happens to the process that comes by one. What is no crash and
    no error happens to the next thing that it writes; who is stuck can't write, or does not know
    how to go on."""
    process = PROCESS.get()
    if process is None or process.dead:
        return
    mishap = process.misfortune.at(process.name, name)
    if mishap is Mishap.CRASH:
        process.crash()
        raise asyncio.CancelledError
    writes = name.startswith(("coordinator.", "scale."))
    if mishap is Mishap.ERROR or (mishap is Mishap.STUCK and not writes):
        raise error_at(name)
    if mishap is not None:
        process.next_store = mishap


class ProcessStore:
    """The store as one process sees it: slow at random, and away when its process is dead."""

    def __init__(self, inner: Store, process: Process, rng: random.Random) -> None:
        self._inner = inner
        self._process = process
        self._rng = rng

    async def get(self, key: str) -> Versioned | None:
        await self._pass()
        return await self._inner.get(key)

    async def get_prefix(self, prefix: str) -> tuple[Versioned, ...]:
        await self._pass()
        return await self._inner.get_prefix(prefix)

    async def txn(self, guards: Sequence[Guard], ops: Sequence[Op]) -> int:
        await self._pass()
        mishap = self._process.next_store
        self._process.next_store = None
        if mishap is Mishap.STUCK:
            raise StoreUnavailable("scripted: refused")
        if mishap is Mishap.DELAY:
            await asyncio.sleep(self._process.misfortune.delay_s)
        revision = await self._inner.txn(guards, ops)
        if mishap is Mishap.LOST_REPLY:
            raise OutcomeUnknown("scripted: reply lost")
        if self._process.dead:
            raise StoreUnavailable("scripted: the process is dead")
        return revision

    @asynccontextmanager
    async def watch(self, prefix: str) -> AsyncIterator[Watch]:
        await self._pass()
        async with self._inner.watch(prefix) as watch:
            yield watch

    async def grant_lease(self, ttl_s: int) -> LeaseId:
        await self._pass()
        return await self._inner.grant_lease(ttl_s)

    async def keep_alive(self, lease: LeaseId) -> None:
        if self._process.dead:
            raise StoreUnavailable("scripted: the process is dead")
        await self._inner.keep_alive(lease)

    async def revoke_lease(self, lease: LeaseId) -> None:
        await self._pass()
        await self._inner.revoke_lease(lease)

    async def close(self) -> None:
        return

    async def _pass(self) -> None:
        if self._process.dead:
            raise StoreUnavailable("scripted: the process is dead")
        if self._rng.random() < 0.2:
            await asyncio.sleep(self._rng.random() * 0.02)
            if self._process.dead:
                raise StoreUnavailable("scripted: the process is dead")


async def suffer(
    process: Process, place: str, die: Callable[[], None], work: Callable[[], Awaitable[object]]
) -> object:
    """`work`, as it goes for `process` at `place`: it may fail, hang, or its reply may be lost."""
    mishap = process.misfortune.at(process.name, place)
    if mishap in (Mishap.ERROR, Mishap.STUCK):
        raise EngineError(f"scripted: {place} refused")
    if mishap is Mishap.DELAY:
        await asyncio.sleep(process.misfortune.delay_s)
    if mishap is Mishap.CRASH:
        die()
    result = await work()
    if mishap is Mishap.LOST_REPLY:
        raise EngineError(f"scripted: the reply of {place} is lost", took_effect=True)
    return result
