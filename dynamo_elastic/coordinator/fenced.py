"""The one door for a coordinator's writes: each carries the fencing token."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from dynamo_elastic.coordinator.store import Guard, Leadership, Op, Store
from dynamo_elastic.errors import GuardFailed, LeadershipLost, OutcomeUnknown, StoreUnavailable
from dynamo_elastic.types import FencingToken

Applied = Callable[[], Awaitable[int | None]]
"""Reads back whether a write took effect, by its identity: its revision, or None if it did not."""

_PATIENCE_S = 8.0
_PAUSE_S = 0.1


class FencedStore:
    """A Store that only the leader with this token can write to."""

    def __init__(self, store: Store, leadership: Leadership) -> None:
        self.store = store
        self._leadership = leadership

    @property
    def token(self) -> FencingToken:
        return self._leadership.token

    async def write(self, guards: Sequence[Guard], ops: Sequence[Op], *, applied: Applied) -> int:
        """Apply `ops` once, if we lead and `guards` hold; returns the revision.

        `guards` must hold no more once `ops` are applied: that is what makes it safe to try again
        after a lost reply, and what lets `applied` be asked only when a guard then fails. Raises
        LeadershipLost, GuardFailed (nothing applied), or, when the store stays away, the last
        StoreUnavailable or OutcomeUnknown.
        """
        clock = asyncio.get_running_loop().time
        give_up_s = clock() + _PATIENCE_S
        unknown: OutcomeUnknown | None = None
        while True:
            try:
                return await self.store.txn([self._leadership.guard(), *guards], ops)
            except OutcomeUnknown as exc:
                unknown = exc
            except StoreUnavailable as exc:
                if clock() >= give_up_s:
                    raise unknown or exc from exc
            except GuardFailed:
                revision = await applied() if unknown else None
                if revision is not None:
                    return revision
                await self.check()
                raise
            if unknown and clock() >= give_up_s:
                raise unknown
            await asyncio.sleep(_PAUSE_S)

    async def check(self) -> None:
        """Raise LeadershipLost unless the leader's key is still ours."""
        stored = await self.store.get(self._leadership.key)
        if stored is None or stored.mod_revision != self.token:
            raise LeadershipLost(f"fencing token {self.token} is stale")
