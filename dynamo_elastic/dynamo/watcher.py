"""Decisions of Dynamo's planner, made into targets of ours and acknowledged.

v1/{namespace}/planner/
  num_decode_workers   replicas that the planner wants (lease of the planner)
  decision_id          written after it; counts up, and may start at 0 again with a new planner
  scaled_decision_id   our acknowledgement; without one the planner decides nothing more

A decision is named by the mod_revision of its id, which never repeats, and counts as acknowledged
if the acknowledgement is younger. The acknowledgement is on no lease, so it outlives us.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from dynamo_elastic.coordinator.records import Keys, OutcomeStatus, TargetOutcome
from dynamo_elastic.coordinator.store import Changed, Put, Store, Versioned
from dynamo_elastic.coordinator.targets import request_scale, wait_outcome
from dynamo_elastic.errors import OutcomeUnknown, StoreError, TargetRefused
from dynamo_elastic.topology import EngineShape, ScaleLimits, legal_width, refusal

log = logging.getLogger(__name__)

_RETRY_S = 0.5
_OUTCOME_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class PlannerKeys:
    """Where Dynamo's planner and its environment meet, in etcd."""

    namespace: str

    @property
    def prefix(self) -> str:
        return f"v1/{self.namespace}/planner/"

    @property
    def ranks(self) -> str:
        return f"{self.prefix}num_decode_workers"

    @property
    def decision(self) -> str:
        return f"{self.prefix}decision_id"

    @property
    def acknowledged(self) -> str:
        return f"{self.prefix}scaled_decision_id"


@dataclass(frozen=True, slots=True)
class Widths:
    """Which widths are legal; the arguments of topology.refusal()."""

    shape: EngineShape
    limits: ScaleLimits
    slots: int


@dataclass(frozen=True, slots=True)
class Decision:
    """The planner wants `ranks` ranks."""

    decision_id: str
    revision: int
    ranks: int

    @property
    def request_id(self) -> str:
        return f"planner-{self.decision_id}-{self.revision}"


def pending_decision(stored: dict[str, Versioned | Changed], keys: PlannerKeys) -> Decision | None:
    """The decision in `stored` that has not been acknowledged. Pure."""
    named, ranks, ack = (stored.get(k) for k in (keys.decision, keys.ranks, keys.acknowledged))
    if named is None or ranks is None or named.value is None or ranks.value is None:
        return None
    if ack is not None and ack.mod_revision > named.mod_revision:
        return None
    try:
        return Decision(named.value.decode(), named.mod_revision, int(ranks.value))
    except ValueError:
        log.error("planner decision %r wants %r ranks: ignored", named.value, ranks.value)
        return None


class PlannerWatcher:
    """Follows the planner until cancelled. Safe to run twice: requests are named by decision."""

    def __init__(
        self,
        store: Store,
        keys: Keys,
        planner: PlannerKeys,
        widths: Widths,
        on_unreached: Callable[[str], Awaitable[None]],
    ) -> None:
        """`on_unreached(reason)` is told when a decision ended at another width than it wanted.
        Dynamo's planner then decides nothing until the width is what it wanted, or until it is
        restarted."""
        self._store = store
        self._keys = keys
        self._planner = planner
        self._widths = widths
        self._on_unreached = on_unreached

    async def run(self) -> None:
        """Act on every decision, the newest first of all. Never returns."""
        while True:
            try:
                await self._follow()
            except* StoreError as group:
                log.warning("planner decisions are not seen: %s", group.exceptions[0])
                await asyncio.sleep(_RETRY_S)

    async def _follow(self) -> None:
        acting: asyncio.Task[None] | None = None
        of: Decision | None = None
        async with self._store.watch(self._planner.prefix) as watch, asyncio.TaskGroup() as tasks:
            stored: dict[str, Versioned | Changed] = {v.key: v for v in watch.snapshot}
            events = aiter(watch)
            while True:
                decision = pending_decision(stored, self._planner)
                if decision is not None and decision != of:
                    if acting is not None:
                        acting.cancel()
                        await asyncio.wait([acting])
                    acting, of = tasks.create_task(self._act(decision)), decision
                change = await anext(events)
                stored[change.key] = change

    async def _act(self, decision: Decision) -> None:
        """Ask for the nearest legal width, and acknowledge when it has ended either way."""
        while True:
            try:
                shortfall = await self._scale(decision)
                await self._store.txn(
                    [], [Put(self._planner.acknowledged, decision.decision_id.encode())]
                )
                break
            except StoreError as exc:
                log.warning("decision %s is not settled yet: %s", decision.decision_id, exc)
                await asyncio.sleep(_RETRY_S)
        if shortfall:
            log.warning("planner decision %s: %s", decision.decision_id, shortfall)
            await self._on_unreached(shortfall)

    async def _scale(self, decision: Decision) -> str:
        """Why `decision` did not get what it wanted; '' if it did. Raises StoreError."""
        w = self._widths
        try:
            width = legal_width(decision.ranks, w.shape, w.limits, w.slots)
        except TargetRefused as exc:
            return exc.reason
        log.info("planner decision %s: %d ranks", decision.decision_id, width)
        outcome = await self._request(decision, width)
        if outcome.status not in (OutcomeStatus.REACHED, OutcomeStatus.UNCHANGED):
            return f"{width} ranks were not reached: {outcome.reason}"
        return refusal(decision.ranks, w.shape, w.limits, w.slots) or ""

    async def _request(self, decision: Decision, width: int) -> TargetOutcome:
        await request_scale(
            self._store,
            self._keys,
            width,
            "planner",
            detail=f"decision {decision.decision_id}",
            request_id=decision.request_id,
        )
        while True:
            try:
                return await wait_outcome(
                    self._store, self._keys, decision.request_id, timeout_s=_OUTCOME_TIMEOUT_S
                )
            except OutcomeUnknown as exc:
                log.warning("planner decision %s: %s", decision.decision_id, exc)
