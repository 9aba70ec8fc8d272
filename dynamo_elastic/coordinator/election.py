"""Leadership of a deployment: one key on a lease; its create revision is the fencing token."""

from __future__ import annotations

import asyncio
import uuid

from dynamo_elastic.coordinator.session import Session
from dynamo_elastic.coordinator.store import Delete, Guard, Leadership, Put, Store, Watch
from dynamo_elastic.errors import ElasticError, GuardFailed, OutcomeUnknown, StoreUnavailable
from dynamo_elastic.types import FencingToken

_PAUSE_S = 0.2


class Election:
    """One candidate for the leader's `key`, for the life of one session."""

    def __init__(self, store: Store, key: str, session: Session, name: str) -> None:
        self._store = store
        self._key = key
        self._session = session
        # Unique, so that a claim whose reply was lost is known again.
        self._value = f"{name} {uuid.uuid4().hex[:12]}".encode()

    async def campaign(self) -> Leadership:
        """Wait until nobody leads, then lead. The leadership ends with the session at the latest.

        Raises SessionLost. Cancelled or failed, it leaves no claim behind.
        """
        try:
            return await self._session.run(self._win())
        except (asyncio.CancelledError, ElasticError):
            await self._withdraw()
            raise

    async def resign(self, leadership: Leadership) -> None:
        """Let the next candidate lead. Fine if the leadership is gone already."""
        try:
            await self._store.txn([leadership.guard()], [Delete(self._key)])
        except GuardFailed:
            return

    async def _win(self) -> Leadership:
        while True:
            try:
                async with self._store.watch(self._key) as watch:
                    held = [v for v in watch.snapshot if v.key == self._key]
                    if held and held[0].value == self._value:
                        return Leadership(self._key, FencingToken(held[0].mod_revision))
                    if not held:
                        await self._claim()
                    else:
                        await self._until_gone(watch)
            except StoreUnavailable:
                await asyncio.sleep(_PAUSE_S)

    async def _claim(self) -> None:
        """Try to create the key. Whether that worked is seen by reading it, like a lost reply."""
        put = Put(self._key, self._value, self._session.lease)
        claim = asyncio.ensure_future(self._store.txn([Guard(self._key, 0)], [put]))
        try:
            await asyncio.shield(claim)
        except (GuardFailed, OutcomeUnknown):
            return
        except asyncio.CancelledError:
            # What was sent may be applied still: end it before anybody looks for what it left.
            await asyncio.wait({claim})
            claim.exception()
            raise

    async def _until_gone(self, watch: Watch) -> None:
        async for event in watch:
            if event.key == self._key and event.value is None:
                return

    async def _withdraw(self) -> None:
        try:
            stored = await self._store.get(self._key)
            if stored is not None and stored.value == self._value:
                guard = Guard(self._key, stored.mod_revision)
                await self._store.txn([guard], [Delete(self._key)])
        except (StoreUnavailable, OutcomeUnknown, GuardFailed):
            return  # the key goes with the session
