"""Asking for a width, and waiting for the coordinator's answer: used by CLI, API and planner.

The newest target wins, whoever wrote it, and says whose place it took: one writer at a time, and
the others see why.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import replace
from datetime import UTC, datetime

from dynamo_elastic.coordinator.records import (
    EarlierTarget,
    Keys,
    OutcomeStatus,
    TargetOutcome,
    TargetRecord,
    decode,
    encode,
)
from dynamo_elastic.coordinator.store import Guard, Put, Store
from dynamo_elastic.errors import GuardFailed, OutcomeUnknown, RequestIdTaken, StoreUnavailable
from dynamo_elastic.types import WorkerId

_PAUSE_S = 0.2
_REMEMBERED = 8
"""Targets back. A request that is sent again after so many others counts as a new one."""


async def request_scale(
    store: Store,
    keys: Keys,
    ranks: int,
    source: str,
    *,
    detail: str = "",
    request_id: str = "",
    leaving: WorkerId | None = None,
) -> str:
    """Ask for `ranks` ranks; returns the request id. The newest request wins. `leaving` is the
    first to go if ranks leave.

    With a `request_id` that was used already nothing is written: asking twice is asking once.
    Whether the width is legal is for the coordinator to say: see wait_outcome(). Raises
    RequestIdTaken, StoreUnavailable, or OutcomeUnknown if it may still be acted on.
    """
    wanted = TargetRecord(
        request_id or uuid.uuid4().hex, ranks, source, time.time(), detail, leaving=leaving
    )
    while True:
        stored = await store.get(keys.target)
        before = decode(TargetRecord, stored.value) if stored is not None else None
        if before is not None:
            known = await _known_ranks(store, keys, before, wanted.request_id)
            if known is not None:
                if known != ranks:
                    raise RequestIdTaken(
                        f"request id {wanted.request_id} asked for {known} ranks, not {ranks}"
                    )
                return wanted.request_id
            wanted = replace(wanted, supersedes=_earlier(before))
        guard = Guard(keys.target, stored.mod_revision if stored is not None else 0)
        try:
            await store.txn([guard], [Put(keys.target, encode(wanted))])
        except GuardFailed:
            continue  # somebody else was faster: it is theirs that we take the place of
        return wanted.request_id


async def _known_ranks(
    store: Store, keys: Keys, newest: TargetRecord, request_id: str
) -> int | None:
    """What was asked for under `request_id`, None if nothing was."""
    stored = await store.get(keys.outcome)
    outcome = decode(TargetOutcome, stored.value) if stored is not None else None
    # Not the target's own: the coordinator puts the width in force there if it refuses.
    asked = {} if outcome is None else {outcome.request_id: outcome.ranks}
    known = {newest.request_id: newest.ranks}
    known |= {t.request_id: t.ranks for t in newest.supersedes}
    return (known | asked).get(request_id)


def _earlier(before: TargetRecord) -> tuple[EarlierTarget, ...]:
    it = EarlierTarget(
        before.request_id, before.ranks, before.source, before.requested_at_s, before.detail
    )
    return (it, *before.supersedes)[:_REMEMBERED]


def wish(target: TargetRecord | EarlierTarget) -> str:
    """'3 by planner decision 17 at 2026-11-30T07:12:09Z'."""
    at = datetime.fromtimestamp(target.requested_at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    who = f"{target.source} {target.detail}".strip()
    return f"{target.ranks} by {who}" + (f" at {at}" if target.requested_at_s else "")


def succession(target: TargetRecord, of: EarlierTarget | None = None) -> str:
    """'target 3 by planner decision 17 at ... supersedes 4 by cli at ...': the last one before it,
    or `of`."""
    before = of or next(iter(target.supersedes), None)
    return f"target {wish(target)}" + (f" supersedes {wish(before)}" if before else "")


async def wait_outcome(
    store: Store, keys: Keys, request_id: str, *, timeout_s: float
) -> TargetOutcome:
    """The coordinator's answer. Raises OutcomeUnknown after `timeout_s`: it may still act."""
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    return await _watch_outcome(store, keys, request_id)
                except StoreUnavailable:
                    await asyncio.sleep(_PAUSE_S)
    except TimeoutError as exc:
        raise OutcomeUnknown(
            f"no answer in {timeout_s:g} s; the request may still be acted on"
        ) from exc


async def _watch_outcome(store: Store, keys: Keys, request_id: str) -> TargetOutcome:
    async with store.watch(keys.prefix) as watch:
        values: dict[str, bytes | None] = {v.key: v.value for v in watch.snapshot}
        events = aiter(watch)
        while True:
            # After every single event: an answer may be overwritten by the next one's at once.
            target, outcome = values.get(keys.target), values.get(keys.outcome)
            answer = answer_to(
                request_id,
                decode(TargetRecord, target) if target is not None else None,
                decode(TargetOutcome, outcome) if outcome is not None else None,
            )
            if answer is not None:
                return answer
            change = await anext(events)
            values[change.key] = change.value


def answer_to(
    request_id: str, newest: TargetRecord | None, outcome: TargetOutcome | None
) -> TargetOutcome | None:
    """What became of a request, by the newest target and outcome; None if that is still open."""
    if outcome is not None and outcome.request_id == request_id:
        return outcome
    if newest is None or newest.request_id == request_id:
        return None
    mine = next((t for t in newest.supersedes if t.request_id == request_id), None)
    ranks = mine.ranks if mine is not None else newest.ranks
    reason = succession(newest, mine) if mine is not None else f"target {wish(newest)}"
    return TargetOutcome(request_id, ranks, OutcomeStatus.SUPERSEDED, reason)
