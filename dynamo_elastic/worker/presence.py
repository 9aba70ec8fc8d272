"""How others see this shell: its member record, and every other key on its lease."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from dynamo_elastic.coordinator.records import Keys, MemberRecord, MemberState, encode
from dynamo_elastic.coordinator.session import Session
from dynamo_elastic.coordinator.store import Delete, Guard, Op, Put, Store
from dynamo_elastic.errors import GuardFailed, IllegalTransition, SessionLost, StoreError
from dynamo_elastic.types import NO_INCARNATION, Epoch, Incarnation, WorkerId

log = logging.getLogger(__name__)

_RETRY_S = 0.1

MEMBER_MOVES = {
    MemberState.STANDBY: {MemberState.JOINING},
    MemberState.JOINING: {MemberState.SERVING, MemberState.STANDBY},
    MemberState.SERVING: {MemberState.LEAVING, MemberState.STANDBY},
    MemberState.LEAVING: {MemberState.SERVING, MemberState.STANDBY},
}
"""A joiner serves or is dropped; a rank leaves or is evicted; a leaver leaves or comes back."""


def check_member_move(before: MemberState, after: MemberState) -> None:
    """Raise IllegalTransition unless a shell may go from `before` to `after`. Staying is fine."""
    if after is not before and after not in MEMBER_MOVES[before]:
        raise IllegalTransition("worker shell", before, after)


class Presence:
    """The member record and the lease that it is on. Writes are repeated until they are stored,
    or until the session is lost; then they raise SessionLost."""

    def __init__(self, store: Store, keys: Keys, record: MemberRecord) -> None:
        self._store = store
        self._keys = keys
        self._session: Session | None = None
        self._endpoint: str | None = None
        self.record = record

    @property
    def state(self) -> MemberState:
        return self.record.state

    async def claim(self, session: Session) -> None:
        """Put the member key on `session`, once no other shell of this slot holds it any more."""
        key = self._keys.member(self.record.worker_id)
        while True:
            session.check()
            try:
                put = Put(key, encode(self.record), session.lease)
                await self._store.txn([Guard(key, 0)], [put])
            except GuardFailed:
                log.info("%s is held by another shell; waiting for its lease to end", key)
                await asyncio.sleep(1.0)
            except StoreError as exc:
                log.warning("%s was not claimed: %s", key, exc)
                await asyncio.sleep(_RETRY_S)
            else:
                self._session = session
                self._endpoint = None
                return

    def adopts(self, incarnation: Incarnation) -> None:
        """Before the first claim: the engine that an earlier shell of this slot served with is
        ours."""
        self.record = replace(self.record, state=MemberState.SERVING, incarnation=incarnation)

    async def move(self, after: MemberState, incarnation: Incarnation | None = None) -> None:
        """Go to `after` and publish it. STANDBY means no engine, and nothing lost."""
        check_member_move(self.state, after)
        if after is MemberState.STANDBY:
            incarnation = NO_INCARNATION
        self.record = replace(
            self.record,
            state=after,
            incarnation=self.record.incarnation if incarnation is None else incarnation,
            lost_reason="" if after is MemberState.STANDBY else self.record.lost_reason,
        )
        await self._publish_member()

    async def lose(self, reason: str) -> None:
        """Publish that the engine is dead; the rank stays until it is taken from us."""
        self.record = replace(self.record, lost_reason=reason)
        await self._publish_member()

    async def mask(self, epoch: Epoch, workers: tuple[WorkerId, ...]) -> None:
        """Publish whom the engine steps without in `epoch`, if that is news."""
        if workers or self.record.masks:
            now = replace(self.record, masks=workers, masks_in=epoch)
            if now != self.record:
                self.record = now
                await self._publish_member()

    async def put(self, key: str, record: object, *, instead_of: str | None = None) -> None:
        """Publish `record` on the lease, in place of the one under `instead_of`."""
        ops: list[Op] = [Put(key, encode(record), self._lease_session().lease)]
        if instead_of not in (None, key):
            ops.append(Delete(str(instead_of)))
        await self._write(ops)

    async def put_endpoint(self, epoch: Epoch, record: object) -> None:
        """Publish how the engine is reached in `epoch`, in place of the last epoch's endpoint."""
        key = self._keys.endpoint(epoch, self.record.worker_id)
        ops: list[Op] = [Put(key, encode(record), self._lease_session().lease)]
        if self._endpoint not in (None, key):
            ops.append(Delete(str(self._endpoint)))
        await self._write(ops)
        self._endpoint = key

    async def drop_endpoint(self) -> None:
        """Take the endpoint away. Idempotent."""
        if self._endpoint is not None:
            await self._write([Delete(self._endpoint)])
            self._endpoint = None

    async def _publish_member(self) -> None:
        await self.put(self._keys.member(self.record.worker_id), self.record)

    def _lease_session(self) -> Session:
        if self._session is None:
            raise SessionLost("there is no session yet")
        self._session.check()
        return self._session

    async def _write(self, ops: list[Op]) -> None:
        while True:
            session = self._lease_session()
            try:
                await self._store.txn([], ops)
            except StoreError as exc:
                log.warning("write of %d keys is repeated: %s", len(ops), exc)
                await asyncio.sleep(_RETRY_S)
            else:
                session.check()
                return
