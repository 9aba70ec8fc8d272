"""The durable record of the operation under way: every write that a scale operation makes of it.

Each write is one transaction, guarded by the fencing token and by the record's own revision, so it
takes effect once or not at all; whether it did is read back by operation id, token and revision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dynamo_elastic.coordinator.fenced import FencedStore
from dynamo_elastic.coordinator.records import (
    Keys,
    OperationRecord,
    OutcomeStatus,
    TargetOutcome,
    decode,
    encode,
)
from dynamo_elastic.coordinator.status import Status
from dynamo_elastic.coordinator.store import Delete, DeletePrefix, Guard, Op, Put
from dynamo_elastic.phases import TERMINAL, Phase, check_move
from dynamo_elastic.topology import Topology
from dynamo_elastic.types import Epoch


class Journal:
    """The stored operation. `record` is what is stored, as far as we know."""

    def __init__(
        self,
        fenced: FencedStore,
        keys: Keys,
        record: OperationRecord,
        revision: int,
        topology_revision: int,
    ) -> None:
        self._fenced = fenced
        self._keys = keys
        self.record = record
        self._revision = revision
        self._topology_revision = topology_revision

    @classmethod
    async def open(
        cls, fenced: FencedStore, keys: Keys, record: OperationRecord, status: Status
    ) -> Journal:
        """Store a new operation, planned from `status`, and use up its epoch.

        Raises GuardFailed if there is an operation already, or if topology or epoch have moved
        since `status` was read; then nothing was stored.
        """

        async def applied() -> int | None:
            stored = await fenced.store.get(keys.operation)
            if stored is None:
                return None
            found = decode(OperationRecord, stored.value)
            return stored.mod_revision if found.operation_id == record.operation_id else None

        revision = await fenced.write(
            [
                Guard(keys.operation, 0),
                Guard(keys.topology, record.topology_revision),
                Guard(keys.epoch, status.revision(keys.epoch)),
            ],
            [
                Put(keys.operation, encode(record)),
                # The epoch of a rebalance is in force; others may have been used up since.
                Put(keys.epoch, encode(max(status.epoch, int(record.plan.after.epoch)))),
            ],
            applied=applied,
        )
        return cls(fenced, keys, record, revision, record.topology_revision)

    @classmethod
    async def resume(cls, fenced: FencedStore, keys: Keys, status: Status) -> Journal | None:
        """Take over the operation that is stored, if there is one."""
        if status.operation is None:
            return None
        journal = cls(
            fenced,
            keys,
            status.operation,
            status.revision(keys.operation),
            status.revision(keys.topology),
        )
        await journal.save(replace(status.operation, token=fenced.token))
        return journal

    def guard(self) -> Guard:
        """Holds while the stored operation is the one we wrote last."""
        return Guard(self._keys.operation, self._revision)

    async def save(self, record: OperationRecord) -> None:
        """Store `record`. Raises IllegalTransition if its phase may not follow the stored one."""
        await self._write(record, [])

    async def commit(self, record: OperationRecord) -> None:
        """The decision: store the next topology, and the record in COMMIT, at once.

        Raises GuardFailed if the topology is not the one that the plan was made from.
        """
        after = record.plan.after
        ops = [
            Put(self._keys.topology, encode(after)),
            Put(self._keys.decided, encode(int(after.epoch))),
        ]
        await self._write(record, ops, Guard(self._keys.topology, record.topology_revision))
        self._topology_revision = self._revision

    async def close(self, record: OperationRecord) -> None:
        """Move the operation to `last`: none is under way after this.

        In the same transaction go its commands, the endpoints of every epoch that is not in force,
        the expert placement that was reached, and the answer to the target if it was reached.
        """
        check_move(record.kind, self.record.phase, record.phase)
        in_force = record.plan.after if record.phase is Phase.DONE else record.plan.before
        ops: list[Op] = [
            Delete(self._keys.operation),
            Put(self._keys.last, encode(record)),
            DeletePrefix(self._keys.commands),
            DeletePrefix(self._keys.payloads),
            *await self._stale_endpoints(in_force.epoch),
            *self._placement(record, in_force),
            *self._answer(record),
        ]
        guards = [self.guard(), Guard(self._keys.topology, self._topology_revision)]
        await self._fenced.write(guards, ops, applied=self._closed)
        self.record = record

    async def _write(self, record: OperationRecord, ops: Sequence[Op], *guards: Guard) -> None:
        if record.phase is not self.record.phase:
            check_move(record.kind, self.record.phase, record.phase)
        self._revision = await self._fenced.write(
            [self.guard(), *guards],
            [Put(self._keys.operation, encode(record)), *ops],
            applied=self._moved,
        )
        self.record = record

    async def _moved(self) -> int | None:
        """The record's revision, if it has moved on from ours by our own hand."""
        stored = await self._fenced.store.get(self._keys.operation)
        if stored is None or stored.mod_revision <= self._revision:
            return None
        found = decode(OperationRecord, stored.value)
        ours = (self.record.operation_id, self._fenced.token)
        return stored.mod_revision if (found.operation_id, found.token) == ours else None

    async def _closed(self) -> int | None:
        stored = await self._fenced.store.get(self._keys.last)
        if stored is None:
            return None
        found = decode(OperationRecord, stored.value)
        same = found.operation_id == self.record.operation_id and found.phase in TERMINAL
        return stored.mod_revision if same else None

    async def _stale_endpoints(self, in_force: Epoch) -> list[Op]:
        stored = await self._fenced.store.get_prefix(self._keys.all_endpoints)
        epochs = {v.key.rpartition("/")[0] + "/" for v in stored}
        return [DeletePrefix(e) for e in sorted(epochs - {self._keys.endpoints(in_force)})]

    def _placement(self, record: OperationRecord, in_force: Topology) -> list[Op]:
        """The write of the placement that was reached, if experts have moved."""
        if record.served is not None or record.current is None:
            return []
        if record.current.epoch != in_force.epoch:
            return []
        return [Put(self._keys.topology, encode(record.current))]

    def _answer(self, record: OperationRecord) -> list[Op]:
        reached = record.phase is Phase.DONE and not record.lost and record.served is None
        if not reached or not record.request_id:
            return []
        outcome = TargetOutcome(
            record.request_id,
            record.plan.after.world_size,
            OutcomeStatus.REACHED,
            operation_id=record.operation_id,
        )
        return [Put(self._keys.outcome, encode(outcome))]
