"""The seam to etcd: what the control plane needs of a store, and no more."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from dynamo_elastic.errors import StoreRefused, StoreUnavailable
from dynamo_elastic.types import FencingToken, LeaseId

MOST_OPS = 128
"""Guards, and writes, of one transaction: what etcd takes unless it is told otherwise."""
MOST_BYTES = 3 << 19
"""Of one transaction."""


@dataclass(frozen=True, slots=True)
class Versioned:
    """A stored value with the revisions that guards compare."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int


@dataclass(frozen=True, slots=True)
class Guard:
    """Holds while `key` has this mod_revision (0: while it does not exist)."""

    key: str
    mod_revision: int


@dataclass(frozen=True, slots=True)
class Put:
    """Write `value`. With a lease the key goes when the lease does."""

    key: str
    value: bytes
    lease: LeaseId | None = None


@dataclass(frozen=True, slots=True)
class Delete:
    key: str


@dataclass(frozen=True, slots=True)
class DeletePrefix:
    prefix: str


Op = Put | Delete | DeletePrefix


@dataclass(frozen=True, slots=True)
class Changed:
    """One event of a watch. `value` is None if the key was deleted or its lease ran out."""

    key: str
    value: bytes | None
    mod_revision: int


class Watch(Protocol):
    """Events under a prefix, from the revision after `snapshot` was read, none lost."""

    @property
    def snapshot(self) -> tuple[Versioned, ...]:
        """What was stored under the prefix when the watch began."""
        ...

    def __aiter__(self) -> AsyncIterator[Changed]:
        """Events in order. Raises StoreUnavailable when the watch can't go on: make a new one."""
        ...


class Store(Protocol):
    """A linearizable key-value store with leases. Keys are absolute.

    Every call has its own deadline inside the implementation; a call that can't be answered raises
    StoreUnavailable (nothing happened) or OutcomeUnknown (a write may have happened).
    """

    async def get(self, key: str) -> Versioned | None:
        """The value of `key`, or None. Raises StoreUnavailable."""
        ...

    async def get_prefix(self, prefix: str) -> tuple[Versioned, ...]:
        """Everything under `prefix`, in key order, at one revision. Raises StoreUnavailable."""
        ...

    async def txn(self, guards: Sequence[Guard], ops: Sequence[Op]) -> int:
        """Apply all of `ops` if all `guards` hold, and return the new revision.

        Raises GuardFailed (nothing applied), StoreUnavailable (nothing applied) or OutcomeUnknown.
        A Put on a lease that has run out raises SessionLost (nothing applied), more than MOST_OPS
        or MOST_BYTES a ValueError (nothing applied).
        """
        ...

    def watch(self, prefix: str) -> AbstractAsyncContextManager[Watch]:
        """Watch `prefix`; leaving the context ends the watch."""
        ...

    async def grant_lease(self, ttl_s: int) -> LeaseId:
        """A new lease that runs out `ttl_s` after its last keep-alive. Raises StoreUnavailable."""
        ...

    async def keep_alive(self, lease: LeaseId) -> None:
        """Renew once. Raises SessionLost if it has run out, StoreUnavailable if unanswered."""
        ...

    async def revoke_lease(self, lease: LeaseId) -> None:
        """End the lease and delete its keys; a lease that is gone already is fine."""
        ...

    async def close(self) -> None:
        """Close connections. Idempotent."""
        ...


async def check_admitted(store: Store, key: str) -> None:
    """Return if the store lets us read `key`, or is away: that may pass. Raises StoreRefused."""
    try:
        await store.get(key)
    except StoreRefused:
        raise
    except StoreUnavailable:
        return


@dataclass(frozen=True, slots=True)
class Leadership:
    """The right to write, as a guard that travels in each transaction."""

    key: str
    token: FencingToken

    def guard(self) -> Guard:
        """Holds while the leader's key is the one we created."""
        return Guard(self.key, self.token)
