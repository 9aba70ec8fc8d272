"""Asking for a width, and waiting for the coordinator's answer: used by the CLI and the planner."""

from __future__ import annotations

import asyncio
import time
import uuid

from dynamo_elastic.coordinator.records import (
    Keys,
    OutcomeStatus,
    TargetOutcome,
    TargetRecord,
    encode,
)
from dynamo_elastic.coordinator.status import Status, status_of
from dynamo_elastic.coordinator.store import Put, Store
from dynamo_elastic.errors import OutcomeUnknown, StoreUnavailable

_PAUSE_S = 0.2


async def request_scale(store: Store, keys: Keys, ranks: int, source: str) -> str:
    """Ask for `ranks` ranks; returns the request id. The newest request wins.

    Whether the width is legal is for the coordinator to say: see wait_outcome(). Raises
    StoreUnavailable, or OutcomeUnknown if it may still be acted on.
    """
    target = TargetRecord(uuid.uuid4().hex, ranks, source, time.time())
    await store.txn([], [Put(keys.target, encode(target))])
    return target.request_id


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
    while True:
        async with store.watch(keys.prefix) as watch:
            outcome = _outcome(status_of(watch.snapshot, keys), request_id)
            if outcome is not None:
                return outcome
            async for event in watch:
                if event.key in (keys.outcome, keys.target):
                    break


def _outcome(status: Status, request_id: str) -> TargetOutcome | None:
    if status.outcome is not None and status.outcome.request_id == request_id:
        return status.outcome
    target = status.target
    if target is not None and target.request_id != request_id:
        reason = f"a newer target of {target.ranks} ranks came from {target.source}"
        return TargetOutcome(request_id, target.ranks, OutcomeStatus.SUPERSEDED, reason)
    return None
