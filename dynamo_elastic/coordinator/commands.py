"""Commands to participants, and their acks: one step of one operation at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynamo_elastic.coordinator.fenced import FencedStore
from dynamo_elastic.coordinator.missing import LEASE_RAN_OUT, Missing
from dynamo_elastic.coordinator.payloads import endpoints_of, named
from dynamo_elastic.coordinator.records import (
    AckRecord,
    AckStatus,
    CommandRecord,
    Keys,
    MemberRecord,
    decode,
    encode,
)
from dynamo_elastic.coordinator.store import MOST_BYTES, MOST_OPS, Guard, Put, Versioned
from dynamo_elastic.errors import LeadershipLost, StoreUnavailable
from dynamo_elastic.failpoints import failpoint
from dynamo_elastic.phases import Step
from dynamo_elastic.topology import Topology
from dynamo_elastic.types import Epoch, OperationId, WorkerId

log = logging.getLogger(__name__)

_GRACE_S = 1.0
"""A participant's own deadline passes so much before ours: a reason is worth more than silence."""
_REWATCH_PAUSE_S = 0.1
_BATCH_COMMANDS = MOST_OPS * 3 // 4
_BATCH_BYTES = MOST_BYTES * 3 // 4
"""Of one transaction: the rest is for guards, names and what frames them."""


@dataclass(frozen=True, slots=True)
class Bodies:
    """What a step says: to each worker for itself, and to all of them."""

    own: Mapping[WorkerId, dict[str, Any]]
    common: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Order:
    """One step for the workers of `bodies.own`."""

    step: Step
    bodies: Bodies
    timeout_s: float
    fail_fast: bool
    """Return at the first failure: the rest does not matter any more."""


@dataclass(slots=True)
class Answers:
    """What became of an order. A worker that is in none of these has not answered."""

    done: dict[WorkerId, AckRecord] = field(default_factory=dict)
    failed: dict[WorkerId, str] = field(default_factory=dict)
    """It says so itself, with its reason."""
    lost: dict[WorkerId, str] = field(default_factory=dict)
    """Its lease ran out and it has not come back, or its engine is gone."""
    silent: tuple[WorkerId, ...] = ()
    """Did not answer before the deadline."""
    acks: dict[WorkerId, AckRecord] = field(default_factory=dict)
    """Every answer, done and failed."""


class Commander:
    """Commands of one operation; `seq` rises with each step, over coordinators too."""

    def __init__(
        self, fenced: FencedStore, keys: Keys, operation_id: OperationId, epoch: Epoch
    ) -> None:
        self._fenced = fenced
        self._keys = keys
        self._operation_id = operation_id
        self._epoch = epoch
        self._missing = Missing(asyncio.get_running_loop().time)
        self._seq = 0

    async def run(self, order: Order, under: Guard) -> Answers:
        """Command, and wait for every answer or the deadline.

        `under` holds while the operation is the one stored: a command whose request was thought
        lost must not turn up after its end. Raises LeadershipLost, StoreError.
        """
        identity = (self._operation_id, self._fenced.token)
        waiting = _Waiting(order, self._keys, identity, self._missing)
        deadline_s = asyncio.get_running_loop().time() + order.timeout_s + _GRACE_S
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._converse(order, under, waiting)
        except TimeoutError:
            waiting.answers.silent = tuple(waiting.unanswered)
        answers = waiting.answers
        # By rank, not by who was faster.
        answers.done = {w: answers.done[w] for w in order.bodies.own if w in answers.done}
        return answers

    async def endpoints(self, topology: Topology) -> dict[WorkerId, Any]:
        """How its members are to be reached; {} if each rank must read that for itself."""
        return await endpoints_of(self._fenced.store, self._keys, topology)

    async def _converse(self, order: Order, under: Guard, waiting: _Waiting) -> None:
        """Send the order once, and feed `waiting` until it is over.

        The watch is open before the commands go out: etcd tells a watch that begins behind its
        newest revision only every 100 ms.
        """
        sent = False
        while not waiting.over():
            try:
                async with self._fenced.store.watch(self._keys.prefix) as watch:
                    if not sent:
                        waiting.seq = await self._send(order, under, watch.snapshot)
                        sent = True
                        failpoint(f"scale.{order.step}.commanded")
                    waiting.look({v.key: v.value for v in watch.snapshot})
                    if waiting.over():
                        return
                    async with asyncio.timeout(None) as patience:
                        patience.reschedule(waiting.until_s)
                        async for event in watch:
                            waiting.see(event.key, event.value)
                            if waiting.over():
                                return
                            patience.reschedule(waiting.until_s)
            except TimeoutError:
                waiting.give_up()
            except StoreUnavailable as exc:
                log.warning("watching for acks of %s: %s", order.step, exc)
                await asyncio.sleep(_REWATCH_PAUSE_S)
            await self._fenced.check()

    async def _send(self, order: Order, under: Guard, snapshot: Sequence[Versioned]) -> int:
        """Write the common payload, if it is not there yet, and then the commands, in as many
        transactions as it takes: who is commanded late is late, no more."""
        revisions = {v.key: v.mod_revision for v in snapshot}
        if not self._seq:
            # Commands of a coordinator before us count: the sequence is the operation's.
            before = [v for v in snapshot if v.key.startswith(self._keys.commands)]
            commands = [decode(CommandRecord, v.value) for v in before]
            ours = [c.seq for c in commands if c.operation_id == self._operation_id]
            self._seq = max(ours, default=0)
        self._seq = seq = self._seq + 1
        common, raw = named(order.bodies.common)
        if common and self._keys.payload(common) not in revisions:
            await self._write([under], {self._keys.payload(common): raw}, revisions)
        commands_by_key = {
            self._keys.command(worker): encode(
                CommandRecord(
                    self._operation_id,
                    self._epoch,
                    self._fenced.token,
                    seq,
                    order.step,
                    order.timeout_s,
                    own,
                    common,
                )
            )
            for worker, own in order.bodies.own.items()
        }
        for batch in _batches(commands_by_key):
            await self._write([under], batch, revisions)
        return seq

    async def _write(
        self, guards: Sequence[Guard], values: Mapping[str, bytes], revisions: Mapping[str, int]
    ) -> None:
        """Put `values` in the place of those with `revisions`. What we write is unlike anything
        that was there: it has our token and a sequence number, or its content for a name."""
        first, value = next(iter(values.items()))

        async def applied() -> int | None:
            read = await self._fenced.store.get(first)
            return read.mod_revision if read is not None and read.value == value else None

        await self._fenced.write(
            [*guards, *(Guard(key, revisions.get(key, 0)) for key in values)],
            [Put(key, value) for key, value in values.items()],
            applied=applied,
        )


def _batches(values: Mapping[str, bytes]) -> Iterator[dict[str, bytes]]:
    """`values` in parts that etcd takes in one transaction."""
    batch: dict[str, bytes] = {}
    size = 0
    for key, value in values.items():
        if batch and (len(batch) == _BATCH_COMMANDS or size + len(value) > _BATCH_BYTES):
            yield batch
            batch, size = {}, 0
        batch[key] = value
        size += len(value)
    yield batch


class _Waiting:
    """What an order waits for: fed with stored values, it fills `answers`."""

    def __init__(
        self, order: Order, keys: Keys, identity: tuple[OperationId, int], missing: Missing
    ) -> None:
        self.order = order
        self.answers = Answers()
        self.seq = 0
        self._keys = keys
        self._identity = identity
        self._missing = missing
        self._members = {keys.member(w): w for w in order.bodies.own}
        self._acks = {keys.ack(w): w for w in order.bodies.own}
        self.unanswered = dict.fromkeys(order.bodies.own)
        """Those that are waited for, by rank."""

    def over(self) -> bool:
        failed = bool(self.answers.failed or self.answers.lost)
        return (failed and self.order.fail_fast) or not self.unanswered

    def look(self, stored: Mapping[str, bytes]) -> None:
        """Take in everything that is stored, acks first: who answered and died has answered."""
        for key in self._acks:
            self.see(key, stored.get(key))
        for key in self._members:
            self.see(key, stored.get(key))
        self.give_up()

    @property
    def until_s(self) -> float | None:
        """When the next of those that are missing will not come back any more; None if nobody is
        missing."""
        return self._missing.until_s(self.unanswered)

    def give_up(self) -> None:
        """Who has been missing for too long is lost."""
        for worker in self._missing.lost(self.unanswered):
            self._lose(worker, LEASE_RAN_OUT)

    def see(self, key: str, value: bytes | None) -> None:
        if key in self._acks and value is not None:
            self._see_ack(self._acks[key], decode(AckRecord, value))
        elif key in self._members:
            self._see_member(self._members[key], value)
        elif key == self._keys.leader:
            raise LeadershipLost("the leader's key changed")

    def _see_member(self, worker: WorkerId, value: bytes | None) -> None:
        if value is None and not self.order.fail_fast:
            return self._missing.gone(worker)
        self._missing.back(worker)
        reason = LEASE_RAN_OUT if value is None else decode(MemberRecord, value).lost_reason
        if reason:
            self._lose(worker, reason)

    def _lose(self, worker: WorkerId, reason: str) -> None:
        if worker in self.unanswered:
            del self.unanswered[worker]
            self.answers.lost[worker] = reason

    def _see_ack(self, worker: WorkerId, ack: AckRecord) -> None:
        expected = (*self._identity, self.seq)
        if (ack.operation_id, ack.token, ack.seq) != expected or worker not in self.unanswered:
            return
        del self.unanswered[worker]
        self.answers.acks[worker] = ack
        if ack.status is AckStatus.DONE:
            self.answers.done[worker] = ack
        else:
            self.answers.failed[worker] = ack.reason or "no reason given"
