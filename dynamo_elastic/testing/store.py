"""FakeStore: the Store in memory, linearizable. FaultyStore: any Store, with scripted faults."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum

from dynamo_elastic.coordinator.store import (
    MOST_BYTES,
    MOST_OPS,
    Changed,
    DeletePrefix,
    Guard,
    Op,
    Put,
    Store,
    Versioned,
    Watch,
)
from dynamo_elastic.errors import GuardFailed, OutcomeUnknown, SessionLost, StoreUnavailable
from dynamo_elastic.types import LeaseId


@dataclass(slots=True)
class _Lease:
    ttl_s: int
    timer: asyncio.TimerHandle
    keys: set[str] = field(default_factory=set)


class FakeStore:
    """A Store of one event loop; leases run on the loop's clock."""

    def __init__(self) -> None:
        self.revision = 0
        self.data: dict[str, Versioned] = {}
        self.down = False
        """While true every call raises StoreUnavailable. See also break_watches()."""
        self._leases: dict[LeaseId, _Lease] = {}
        self._granted = 0
        self._watches: set[_FakeWatch] = set()

    async def get(self, key: str) -> Versioned | None:
        await self._answer()
        return self.data.get(key)

    async def get_prefix(self, prefix: str) -> tuple[Versioned, ...]:
        await self._answer()
        return self._under(prefix)

    async def txn(self, guards: Sequence[Guard], ops: Sequence[Op]) -> int:
        await self._answer()
        _check_size(guards, ops)
        _check_distinct(ops)
        return self._apply(guards, ops)

    @asynccontextmanager
    async def watch(self, prefix: str) -> AsyncIterator[Watch]:
        await self._answer()
        watch = _FakeWatch(prefix, self._under(prefix))
        self._watches.add(watch)
        try:
            yield watch
        finally:
            self._watches.discard(watch)

    async def grant_lease(self, ttl_s: int) -> LeaseId:
        await self._answer()
        self._granted += 1
        lease = LeaseId(self._granted)
        self._leases[lease] = _Lease(ttl_s, self._timer(lease, ttl_s))
        return lease

    async def keep_alive(self, lease: LeaseId) -> None:
        await self._answer()
        held = self._leases.get(lease)
        if held is None:
            raise SessionLost(f"lease {lease:x} has run out")
        held.timer.cancel()
        held.timer = self._timer(lease, held.ttl_s)

    async def revoke_lease(self, lease: LeaseId) -> None:
        await self._answer()
        self.expire(lease)

    async def close(self) -> None:
        self.break_watches()

    def expire(self, lease: LeaseId) -> None:
        """Let a lease run out now. One that is gone already is fine."""
        held = self._leases.pop(lease, None)
        if held is None:
            return
        held.timer.cancel()
        if held.keys:
            self.revision += 1
            self._publish([self._delete(key) for key in sorted(held.keys)])

    def break_watches(self) -> None:
        """End every watch, as a lost connection does."""
        for watch in self._watches:
            watch.push(None)

    def _timer(self, lease: LeaseId, ttl_s: int) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(ttl_s, self.expire, lease)

    async def _answer(self) -> None:
        await asyncio.sleep(0)
        if self.down:
            raise StoreUnavailable("scripted: the store is down")

    def _failed_guards(self, guards: Sequence[Guard]) -> list[str]:
        stored = {g.key: self.data.get(g.key) for g in guards}
        return [
            g.key for g in guards if g.mod_revision != getattr(stored[g.key], "mod_revision", 0)
        ]

    def _apply(self, guards: Sequence[Guard], ops: Sequence[Op]) -> int:
        failed = self._failed_guards(guards)
        if failed:
            raise GuardFailed(f"guards failed: {', '.join(failed)}")
        for op in ops:
            if isinstance(op, Put) and op.lease is not None and op.lease not in self._leases:
                raise SessionLost(f"lease {op.lease:x} not found")
        # As in etcd, a transaction that changes nothing has no revision of its own.
        pending = self.revision + 1
        changes = [change for op in ops for change in self._apply_op(op, pending)]
        if changes:
            self.revision = pending
            self._publish(changes)
        return self.revision

    def _apply_op(self, op: Op, revision: int) -> list[Changed]:
        if isinstance(op, Put):
            self._detach(op.key)
            old = self.data.get(op.key)
            created = old.create_revision if old else revision
            self.data[op.key] = Versioned(op.key, op.value, created, revision)
            if op.lease is not None:
                self._leases[op.lease].keys.add(op.key)
            return [Changed(op.key, op.value, revision)]
        if isinstance(op, DeletePrefix):
            keys = [v.key for v in self._under(op.prefix)]
        else:
            keys = [op.key] if op.key in self.data else []
        return [self._delete(key, revision) for key in keys]

    def _delete(self, key: str, revision: int | None = None) -> Changed:
        self._detach(key)
        del self.data[key]
        return Changed(key, None, self.revision if revision is None else revision)

    def _detach(self, key: str) -> None:
        for lease in self._leases.values():
            lease.keys.discard(key)

    def _under(self, prefix: str) -> tuple[Versioned, ...]:
        return tuple(v for k, v in sorted(self.data.items()) if k.startswith(prefix))

    def _publish(self, changes: Sequence[Changed]) -> None:
        for watch in self._watches:
            for change in changes:
                if change.key.startswith(watch.prefix):
                    watch.push(change)


class FaultKind(StrEnum):
    REFUSE = "refuse"
    """StoreUnavailable; nothing is applied."""
    LOSE_REPLY = "lose_reply"
    """Applied, then OutcomeUnknown."""
    LOSE_REQUEST = "lose_request"
    """OutcomeUnknown; nothing is applied."""
    APPLY_LATE = "apply_late"
    """OutcomeUnknown at once; applied `delay_s` later, if its guards hold then."""
    DELAY = "delay"
    """Answered `delay_s` late."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Hits one transaction: number `at_write` (0-based), or the first that touches `key`."""

    kind: FaultKind
    at_write: int | None = None
    key: str | None = None
    delay_s: float = 1.0


class FaultyStore:
    """`inner`, as one client sees it: each of `faults` hits one transaction of this client."""

    def __init__(self, inner: Store, faults: Sequence[Fault] = ()) -> None:
        self._inner = inner
        self.faults = list(faults)
        self.writes = 0
        self._late: set[asyncio.Task[None]] = set()

    async def get(self, key: str) -> Versioned | None:
        return await self._inner.get(key)

    async def get_prefix(self, prefix: str) -> tuple[Versioned, ...]:
        return await self._inner.get_prefix(prefix)

    async def txn(self, guards: Sequence[Guard], ops: Sequence[Op]) -> int:
        fault = self._next_fault(ops)
        self.writes += 1
        if fault is None:
            return await self._inner.txn(guards, ops)
        if fault.kind is FaultKind.REFUSE:
            raise StoreUnavailable("scripted: refused")
        if fault.kind is FaultKind.LOSE_REQUEST:
            raise OutcomeUnknown("scripted: request lost")
        if fault.kind is FaultKind.APPLY_LATE:
            task = asyncio.create_task(self._apply_late(fault.delay_s, guards, ops))
            self._late.add(task)
            raise OutcomeUnknown("scripted: applied late")
        if fault.kind is FaultKind.DELAY:
            await asyncio.sleep(fault.delay_s)
        revision = await self._inner.txn(guards, ops)
        if fault.kind is FaultKind.LOSE_REPLY:
            raise OutcomeUnknown("scripted: reply lost")
        return revision

    def watch(self, prefix: str) -> AbstractAsyncContextManager[Watch]:
        return self._inner.watch(prefix)

    async def grant_lease(self, ttl_s: int) -> LeaseId:
        return await self._inner.grant_lease(ttl_s)

    async def keep_alive(self, lease: LeaseId) -> None:
        await self._inner.keep_alive(lease)

    async def revoke_lease(self, lease: LeaseId) -> None:
        await self._inner.revoke_lease(lease)

    async def close(self) -> None:
        await self._inner.close()

    def _next_fault(self, ops: Sequence[Op]) -> Fault | None:
        touched = [op.prefix if isinstance(op, DeletePrefix) else op.key for op in ops]
        for fault in self.faults:
            if fault.at_write == self.writes or fault.key in touched:
                self.faults.remove(fault)
                return fault
        return None

    async def _apply_late(self, delay_s: float, guards: Sequence[Guard], ops: Sequence[Op]) -> None:
        await asyncio.sleep(delay_s)
        with suppress(GuardFailed):
            await self._inner.txn(guards, ops)


class _FakeWatch:
    def __init__(self, prefix: str, snapshot: tuple[Versioned, ...]) -> None:
        self.prefix = prefix
        self._snapshot = snapshot
        self._events: asyncio.Queue[Changed | None] = asyncio.Queue()

    @property
    def snapshot(self) -> tuple[Versioned, ...]:
        return self._snapshot

    def push(self, event: Changed | None) -> None:
        """Queue an event; None ends the watch."""
        self._events.put_nowait(event)

    async def __aiter__(self) -> AsyncIterator[Changed]:
        while True:
            event = await self._events.get()
            if event is None:
                raise StoreUnavailable("scripted: the watch broke")
            yield event


def _check_size(guards: Sequence[Guard], ops: Sequence[Op]) -> None:
    """Raise ValueError, as etcd does, if a transaction is too large."""
    if max(len(guards), len(ops)) > MOST_OPS:
        raise ValueError(f"a transaction of {len(guards)} guards and {len(ops)} writes")
    size_bytes = sum(len(op.value) for op in ops if isinstance(op, Put))
    if size_bytes > MOST_BYTES:
        raise ValueError(f"a transaction of {size_bytes} bytes")


def _check_distinct(ops: Sequence[Op]) -> None:
    """Raise ValueError, as etcd does, if a transaction touches a key twice with a put among it."""
    puts = [op.key for op in ops if isinstance(op, Put)]
    deletes = [op for op in ops if not isinstance(op, Put)]
    for key in puts:
        covered = any(
            key.startswith(d.prefix) if isinstance(d, DeletePrefix) else key == d.key
            for d in deletes
        )
        if covered or puts.count(key) > 1:
            raise ValueError(f"duplicate key in a transaction: {key}")
