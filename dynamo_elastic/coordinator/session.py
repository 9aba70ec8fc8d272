"""Session: a lease that is kept alive, and an event with the cause once it is not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from dynamo_elastic.coordinator.store import Store
from dynamo_elastic.errors import ElasticError, SessionLost, StoreError, StoreUnavailable
from dynamo_elastic.types import LeaseId

T = TypeVar("T")
log = logging.getLogger(__name__)

_GOLDEN = 0x9E3779B97F4A7C15
"""Spreads neighbouring lease ids evenly."""


class Lost:
    """An event that is set once, with the cause."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.cause = ""

    def is_set(self) -> bool:
        return self._event.is_set()

    def set(self, cause: str) -> None:
        """Set it. Only the first cause is kept."""
        if not self._event.is_set():
            self.cause = cause
            self._event.set()

    async def wait(self) -> str:
        """The cause, once there is one."""
        await self._event.wait()
        return self.cause


class Session:
    """A lease, renewed by a task of its own until it is closed, orphaned or lost.

    `lost` is set as soon as the lease may have run out: when the store says so, or when no renewal
    was answered for a whole TTL. From then on every key on the lease must be taken for gone.
    """

    def __init__(self, store: Store, lease: LeaseId, ttl_s: int, granted_at_s: float) -> None:
        self._store = store
        self.lease = lease
        self.ttl_s = ttl_s
        self.lost = Lost()
        self._renewals = asyncio.create_task(self._renew(granted_at_s))

    @classmethod
    async def open(cls, store: Store, ttl_s: int) -> Session:
        """A new session. Raises StoreUnavailable."""
        asked_at_s = asyncio.get_running_loop().time()
        return cls(store, await store.grant_lease(ttl_s), ttl_s, asked_at_s)

    def check(self) -> None:
        """Raise SessionLost if this session is over."""
        if self.lost.is_set():
            raise SessionLost(self.lost.cause)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which is cancelled, and SessionLost raised, if the session is lost
        first."""
        task = asyncio.ensure_future(work)
        lost = asyncio.ensure_future(self.lost.wait())
        try:
            await asyncio.wait({task, lost}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise SessionLost(self.lost.cause)
            return task.result()
        finally:
            lost.cancel()
            if task.cancel():
                with suppress(asyncio.CancelledError, ElasticError):
                    await task

    async def close(self) -> None:
        """End the lease and delete its keys. Idempotent; with the store away the keys go when the
        lease runs out."""
        await self.orphan("closed")
        with suppress(StoreError):
            await self._store.revoke_lease(self.lease)

    async def orphan(self, cause: str = "orphaned") -> None:
        """Stop renewing and leave the lease to run out: its keys stay until then."""
        self.lost.set(cause)
        self._renewals.cancel()
        with suppress(asyncio.CancelledError):
            await self._renewals

    def _pause_s(self) -> float:
        """Between two renewals: a third of the TTL at most, and for each lease another. A thousand
        shells that started together must not renew together for ever."""
        spread = self.lease * _GOLDEN % (1 << 64) / (1 << 64)
        return self.ttl_s / 3 * (0.5 + spread / 2)

    async def _renew(self, renewed_at_s: float) -> None:
        clock = asyncio.get_running_loop().time
        pause_s = self._pause_s()
        while True:
            # Counted from when a renewal was asked for, so that we give up before the store does.
            left_s = renewed_at_s + self.ttl_s - clock()
            if left_s <= 0:
                return self.lost.set(f"no answer from the store for {self.ttl_s} s")
            await asyncio.sleep(min(pause_s, left_s))
            asked_at_s = clock()
            try:
                async with asyncio.timeout_at(renewed_at_s + self.ttl_s):
                    await self._store.keep_alive(self.lease)
                renewed_at_s, pause_s = asked_at_s, self._pause_s()
            except SessionLost as exc:
                return self.lost.set(exc.cause)
            except (StoreUnavailable, TimeoutError) as exc:
                log.warning("lease %x was not renewed: %s", self.lease, exc)
                pause_s = self.ttl_s / 10
