"""Decisions of Dynamo's planner, made into targets of ours and acknowledged.

The acknowledgement is on no lease: it outlives us, and is written again if somebody takes it away.
How each fault of Dynamo's virtual environment is survived: docs/planner.md.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from dynamo_elastic.coordinator.records import (
    Keys,
    OutcomeStatus,
    TargetOutcome,
    WarningRecord,
    encode,
)
from dynamo_elastic.coordinator.store import Changed, Delete, Put, Store, Versioned
from dynamo_elastic.coordinator.targets import request_scale, wait_outcome
from dynamo_elastic.dynamo.decisions import Decision, PlannerKeys, pending_decision
from dynamo_elastic.errors import OutcomeUnknown, StoreError, TargetRefused
from dynamo_elastic.topology import EngineShape, ScaleLimits, legal_width, refusal

log = logging.getLogger(__name__)

_RETRY_S = 0.5
_OUTCOME_TIMEOUT_S = 600.0
_UNMET, _RIVALS = "planner", "planners"
"""Names of our warnings."""


@dataclass(frozen=True, slots=True)
class Widths:
    """Which widths are legal; the arguments of topology.refusal()."""

    shape: EngineShape
    limits: ScaleLimits
    slots: int


class PlannerWatcher:
    """Follows the planner until cancelled. Safe to run twice: requests are named by decision."""

    def __init__(
        self,
        store: Store,
        keys: Keys,
        planner: PlannerKeys,
        widths: Widths,
        on_unreached: Callable[[str], Awaitable[None]],
        on_gone: Callable[[str], Awaitable[None]],
        *,
        look_every_s: float,
        rivals_after_s: float,
    ) -> None:
        """Looks at who runs every `look_every_s`. Planners that are both instances for
        `rivals_after_s`, which is more than their lease lasts, are rivals. `on_gone` is told when
        the planner that ran is no instance any more.

        `on_unreached(reason)` is told when a decision ended at another width than it wanted.
        Dynamo's planner then decides nothing until the width is what it wanted, or until it is
        restarted."""
        self._store = store
        self._keys = keys
        self._planner = planner
        self._widths = widths
        self._on_unreached = on_unreached
        self._on_gone = on_gone
        self._look_every_s = look_every_s
        self._rivals_after_s = rivals_after_s

    async def run(self) -> None:
        """Act on every decision, the newest first of all. Never returns."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._look_at_planners())
            tasks.create_task(self._keep_following())

    async def _keep_following(self) -> None:
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
                elif decision is not None and acting is not None and acting.done():
                    # Not to be acted on again: others may have scaled since.
                    await self._acknowledge(decision)
                change = await anext(events)
                stored[change.key] = change

    async def _look_at_planners(self) -> None:
        """Warn of two planners in one namespace for as long as there are; and have one restarted
        that has lost its lease: it lives on, sees no rank any more and decides nothing.

        One that was killed has its key until its lease runs out, and its successor has none until
        it is up: so nothing is said of what has only just come, and two looks in a row must find
        nobody.
        """
        since_s: dict[str, float] = {}
        clock = asyncio.get_running_loop().time
        warned, seen, nobody = False, False, 0
        while True:
            await asyncio.sleep(self._look_every_s)
            try:
                found = [v.key for v in await self._store.get_prefix(self._planner.instances)]
                since_s = {key: since_s.get(key, clock()) for key in found}
                settled = [k for k in found if clock() - since_s[k] >= self._rivals_after_s]
                rivals = _rivals(sorted(settled))
                if bool(rivals) is not warned:
                    await self._warn(_RIVALS, rivals)
                    warned = bool(rivals)
            except StoreError:
                continue
            seen, nobody = seen or bool(found), 0 if found else nobody + 1
            if seen and nobody == 2:
                await self._on_gone("the planner has lost its lease")
                seen = False

    async def _act(self, decision: Decision) -> None:
        """Ask for the nearest legal width, and acknowledge when it has ended either way."""
        while True:
            try:
                shortfall = await self._scale(decision)
                wanted = f"planner decision {decision.decision_id} wanted {decision.ranks} ranks"
                await self._warn(_UNMET, shortfall and f"{wanted}: {shortfall}")
                await self._acknowledge(decision)
                break
            except StoreError as exc:
                log.warning("decision %s is not settled yet: %s", decision.decision_id, exc)
                await asyncio.sleep(_RETRY_S)
        if shortfall:
            await self._on_unreached(shortfall)

    async def _acknowledge(self, decision: Decision) -> None:
        put = Put(self._planner.acknowledged, decision.decision_id.encode())
        await self._store.txn([], [put])

    async def _warn(self, name: str, text: str) -> None:
        """Show `text` in the status, '' for nothing any more. Raises StoreError."""
        key = self._keys.warning(name)
        if text:
            log.warning("%s", text)
            await self._store.txn([], [Put(key, encode(WarningRecord(text, time.time())))])
        else:
            await self._store.txn([], [Delete(key)])

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


def _rivals(planners: Sequence[str]) -> str:
    if len(planners) < 2:
        return ""
    names = ", ".join(key.rpartition("/")[2] for key in planners)
    return f"{len(planners)} planners decide in one namespace (instances {names}); keep one"
