"""Coordinator: lead, recover, then boot, evict and follow the target, one operation at a time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from dynamo_elastic.config_sections import ScaleConfig
from dynamo_elastic.coordinator.capacity import capacity_of
from dynamo_elastic.coordinator.decide import (
    AS_WANTED,
    EVICTION_SOURCE,
    Action,
    Answer,
    Idle,
    Operate,
    decide,
    wanted,
)
from dynamo_elastic.coordinator.election import Election
from dynamo_elastic.coordinator.fenced import FencedStore
from dynamo_elastic.coordinator.missing import LEASE_RAN_OUT, Missing
from dynamo_elastic.coordinator.observe import Observer
from dynamo_elastic.coordinator.records import (
    Keys,
    OperationRecord,
    OutcomeStatus,
    TargetOutcome,
    decode,
    encode,
)
from dynamo_elastic.coordinator.scale import Scaler, ScaleRequest
from dynamo_elastic.coordinator.session import Session
from dynamo_elastic.coordinator.status import Status, status_of
from dynamo_elastic.coordinator.store import Delete, Guard, Leadership, Op, Put, Store, Watch
from dynamo_elastic.errors import (
    GuardFailed,
    LeadershipLost,
    ScaleAborted,
    SessionLost,
    StoreError,
)
from dynamo_elastic.failpoints import failpoint
from dynamo_elastic.topology import EngineShape

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
_FIRST_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 10.0
_TERM_PAUSE_S = 0.5
_MIN_PAUSE_S = 0.01
_GATHER_S = 0.02


@dataclass(frozen=True, slots=True)
class Deployment:
    """What a coordinator needs to know of its deployment."""

    keys: Keys
    config: ScaleConfig
    shape: EngineShape
    observer: Observer = field(default_factory=Observer)
    now: Callable[[], float] = time.time
    """Wall clock."""


class Coordinator:
    """One candidate; any number may run, the leader alone acts."""

    def __init__(self, store: Store, deployment: Deployment, name: str) -> None:
        self._store = store
        self._deployment = deployment
        self._name = name

    async def run(self) -> None:
        """Lead whenever we can, until cancelled."""
        while True:
            try:
                await self._serve_a_term()
            except (SessionLost, LeadershipLost, StoreError) as exc:
                log.warning("stopped leading: %s", exc)
                await asyncio.sleep(_TERM_PAUSE_S)

    async def _serve_a_term(self) -> None:
        session = await Session.open(self._store, self._deployment.config.lease_ttl_s)
        try:
            election = Election(self._store, self._deployment.keys.leader, session, self._name)
            leadership = await election.campaign()
            log.info("leading with fencing token %d", leadership.token)
            await session.run(_Term(self._store, leadership, self._deployment).lead())
        finally:
            self._deployment.observer.status(None)
            await session.close()


class _Term:
    """What the leader does while it leads."""

    def __init__(self, store: Store, leadership: Leadership, deployment: Deployment) -> None:
        self._keys = deployment.keys
        self._config = deployment.config
        self._shape = deployment.shape
        self._fenced = FencedStore(store, leadership)
        self._now = deployment.now
        self._observer = deployment.observer
        self._scaler = Scaler(
            self._fenced, self._keys, self._config, deployment.observer, deployment.now
        )
        self._retries = _Retries()
        self._clock = asyncio.get_running_loop().time
        self._missing = Missing(self._clock)
        self._waiting_for = ""

    async def lead(self) -> None:
        """Recover what was left behind, then act on every change. Never returns."""
        failpoint("coordinator.elected")
        recovered = await self._scaler.recover()
        if recovered is not None:
            log.info("recovered %s: %s", recovered.operation_id, recovered.phase)
        while True:
            async with self._fenced.store.watch(self._keys.prefix) as watch:
                status = status_of(watch.snapshot, self._keys)
                self._observer.status(status)
                capacity = capacity_of(status, self._shape, self._config, self._now())
                if capacity != status.capacity:
                    await self._show(self._keys.capacity, encode(capacity), status)
                in_force = status.in_force.worker_ids if status.in_force else ()
                self._missing.look(in_force, status.members)
                action = self._held_back(decide(status, self._shape, self._config, self._now()))
                if isinstance(action, Idle):
                    await self._say(action.reason, status)
                    await self._next_change(watch, self._pause_s(action.until_s, capacity.until_s))
                    continue
            if isinstance(action, Answer):
                await self._answer(action, status)
            elif isinstance(action, Operate):
                await self._operate(action.request, status)

    def _held_back(self, action: Action) -> Action:
        """`action`, or a pause before it if it has failed just now, or if somebody who is missing
        may come back."""
        if not isinstance(action, Operate):
            return action
        until_s = self._missing.until_s()
        if until_s is not None:
            reason = f"{self._missing}: {LEASE_RAN_OUT}; it may come back"
            return Idle(reason, self._now() + until_s - self._clock())
        pause_s = self._retries.pause_s(action.request)
        if not pause_s:
            return action
        return Idle(f"to be tried again: {self._retries.reason}", self._now() + pause_s)

    def _pause_s(self, *until_s: float | None) -> float | None:
        """Seconds to the first of these times; None if there is none."""
        first_s = min((t for t in until_s if t is not None), default=None)
        # Never nothing: the wall clock is coarser than the loop's.
        return None if first_s is None else max(_MIN_PAUSE_S, first_s - self._now())

    async def _operate(self, request: ScaleRequest, status: Status) -> None:
        if request.request_id and self._retries.failures(request) >= MAX_ATTEMPTS:
            return await self._give_up(request, status)
        log.info("%s to %d ranks", request.plan.kind, request.plan.after.world_size)
        self._waiting_for = ""
        try:
            record = await self._scaler.scale(request, status)
        except ScaleAborted as exc:
            log.warning("aborted: %s", exc)
            self._retries.failed(request, exc.reason)
            return
        if record.failure or set(record.lost) - set(request.lost):
            self._retries.failed(request, _losses(record) or record.failure)
        else:
            self._retries.succeeded(request)

    async def _give_up(self, request: ScaleRequest, status: Status) -> None:
        reason = (
            f"target {request.plan.after.world_size}: given up after {MAX_ATTEMPTS} attempts, "
            f"{status.width} ranks stay; last failure: {self._retries.reason}"
        )
        outcome = TargetOutcome(
            request.request_id, request.plan.after.world_size, OutcomeStatus.FAILED, reason
        )
        await self._answer(Answer(outcome, restore=True), status)

    async def _answer(self, answer: Answer, status: Status) -> None:
        """Store the answer, and the width in force as target if it is to be restored, unless a
        newer target has come meanwhile: then that one is looked at instead."""
        failpoint("coordinator.before_answer")
        log.info(
            "target %d: %s %s", answer.outcome.ranks, answer.outcome.status, answer.outcome.reason
        )
        ops: list[Op] = [Put(self._keys.outcome, encode(answer.outcome))]
        if answer.restore:
            target = replace(wanted(status, self._config), ranks=status.width)
            ops.append(Put(self._keys.target, encode(target)))

        async def applied() -> int | None:
            stored = await self._fenced.store.get(self._keys.outcome)
            if stored is None:
                return None
            found = decode(TargetOutcome, stored.value)
            return stored.mod_revision if found.request_id == answer.outcome.request_id else None

        guards = [
            Guard(key, status.revision(key)) for key in (self._keys.target, self._keys.outcome)
        ]
        try:
            await self._fenced.write(guards, ops, applied=applied)
        except GuardFailed:
            log.info("a newer target came before the answer")

    async def _next_change(self, watch: Watch, timeout_s: float | None) -> None:
        """Return when something that decide() looks at has changed, or after `timeout_s`."""
        keys = self._keys
        singles = {keys.target, keys.topology, keys.operation}
        try:
            async with asyncio.timeout(timeout_s):
                async for event in watch:
                    if event.key == keys.leader:
                        raise LeadershipLost("the leader's key changed")
                    if event.key in singles:
                        return
                    if event.key.startswith(keys.members):
                        # Shells come by the thousand, and each look reads all of them.
                        return await asyncio.sleep(_GATHER_S)
        except TimeoutError:
            return

    async def _say(self, reason: str, status: Status) -> None:
        """Log what is waited for, when that changes, and show it in the status."""
        if reason != self._waiting_for:
            self._waiting_for = reason
            log.info("%s", reason)
        notice = "" if reason == AS_WANTED else reason
        if notice != status.notice:
            await self._show(self._keys.notice, encode(notice) if notice else None, status)

    async def _show(self, key: str, value: bytes | None, status: Status) -> None:
        """Store `value` (None: nothing) for others to see."""

        async def applied() -> int | None:
            stored = await self._fenced.store.get(key)
            return stored.mod_revision if stored is not None else None

        op = Delete(key) if value is None else Put(key, value)
        with suppress(GuardFailed):
            await self._fenced.write([Guard(key, status.revision(key))], [op], applied=applied)


class _Retries:
    """Failures in a row of the newest request, and how long to wait before the next attempt."""

    def __init__(self) -> None:
        self._of = ""
        self._count = 0
        self._not_before_s = 0.0
        self.reason = ""

    def failures(self, request: ScaleRequest) -> int:
        return self._count if self._of == _name(request) else 0

    def pause_s(self, request: ScaleRequest) -> float:
        """Seconds until `request` may be tried; 0 for one that has not failed."""
        if not self.failures(request):
            return 0.0
        return max(0.0, self._not_before_s - asyncio.get_running_loop().time())

    def failed(self, request: ScaleRequest, reason: str) -> None:
        self._count = self.failures(request) + 1
        self._of = _name(request)
        self.reason = reason
        backoff_s = min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** (self._count - 1))
        self._not_before_s = asyncio.get_running_loop().time() + backoff_s

    def succeeded(self, request: ScaleRequest) -> None:
        """An eviction in between says nothing about whether the target can be had."""
        if request.source != EVICTION_SOURCE or self._of == _name(request):
            self._count = 0


def _name(request: ScaleRequest) -> str:
    return request.request_id or request.source


def _losses(record: OperationRecord) -> str:
    return "; ".join(f"{w}: {record.participants.get(w, 'lost')}" for w in record.lost)
