"""Coordinator: lead, recover, then boot, evict and follow the target, one operation at a time."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field, replace

from dynamo_elastic.config import ScaleConfig
from dynamo_elastic.coordinator.decide import (
    EVICTION_SOURCE,
    Answer,
    Idle,
    Operate,
    decide,
    wanted,
)
from dynamo_elastic.coordinator.election import Election
from dynamo_elastic.coordinator.fenced import FencedStore
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
from dynamo_elastic.coordinator.store import Guard, Leadership, Op, Put, Store, Watch
from dynamo_elastic.coordinator.timeline import Timeline
from dynamo_elastic.errors import (
    GuardFailed,
    LeadershipLost,
    ScaleAborted,
    SessionLost,
    StoreError,
)
from dynamo_elastic.topology import EngineShape

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
_FIRST_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 10.0
_TERM_PAUSE_S = 0.5


@dataclass(frozen=True, slots=True)
class Deployment:
    """What a coordinator needs to know of its deployment."""

    keys: Keys
    config: ScaleConfig
    shape: EngineShape
    timeline: Timeline = field(default_factory=lambda: Timeline(None))


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
            await session.close()


class _Term:
    """What the leader does while it leads."""

    def __init__(self, store: Store, leadership: Leadership, deployment: Deployment) -> None:
        self._keys = deployment.keys
        self._config = deployment.config
        self._shape = deployment.shape
        self._fenced = FencedStore(store, leadership)
        self._scaler = Scaler(self._fenced, self._keys, self._config, deployment.timeline)
        self._retries = _Retries()
        self._waiting_for = ""

    async def lead(self) -> None:
        """Recover what was left behind, then act on every change. Never returns."""
        recovered = await self._scaler.recover()
        if recovered is not None:
            log.info("recovered %s: %s", recovered.operation_id, recovered.phase)
        while True:
            async with self._fenced.store.watch(self._keys.prefix) as watch:
                status = status_of(watch.snapshot, self._keys)
                action = decide(status, self._shape, self._config)
                if isinstance(action, Operate):
                    pause_s = self._retries.pause_s(action.request)
                else:
                    pause_s = None
                if isinstance(action, Idle) or pause_s:
                    self._say(action.reason if isinstance(action, Idle) else "backing off")
                    await self._next_change(watch, pause_s)
                    continue
            if isinstance(action, Answer):
                await self._answer(action, status)
            elif isinstance(action, Operate):
                await self._operate(action.request, status)

    async def _operate(self, request: ScaleRequest, status: Status) -> None:
        if request.request_id and self._retries.failures(request) >= MAX_ATTEMPTS:
            return await self._give_up(request, status)
        self._say(f"{request.plan.kind} to {request.plan.after.world_size} ranks")
        try:
            record = await self._scaler.scale(request, status)
        except ScaleAborted as exc:
            log.warning("aborted: %s", exc)
            self._retries.failed(request, exc.reason)
            return
        if record.lost and record.lost != request.lost:
            self._retries.failed(request, _losses(record))
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
        singles = {keys.target, keys.topology, keys.leader, keys.operation}
        try:
            async with asyncio.timeout(timeout_s):
                async for event in watch:
                    if event.key == keys.leader:
                        raise LeadershipLost("the leader's key changed")
                    if event.key in singles or event.key.startswith(keys.members):
                        return
        except TimeoutError:
            return

    def _say(self, reason: str) -> None:
        """Log what is waited for, when that changes."""
        if reason != self._waiting_for:
            self._waiting_for = reason
            log.info("%s", reason)


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
