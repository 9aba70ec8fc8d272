"""Decisions in a row, for percentiles: the transaction of Journal.commit() with the records of the
operation that has just been done on all ranks, under keys of its own, to watches that every rank
holds."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from dynamo_elastic.coordinator.election import Election
from dynamo_elastic.coordinator.fenced import FencedStore
from dynamo_elastic.coordinator.journal import Journal
from dynamo_elastic.coordinator.records import Keys, OperationRecord, encode
from dynamo_elastic.coordinator.session import Session
from dynamo_elastic.coordinator.store import Put, Store
from dynamo_elastic.phases import Phase
from dynamo_elastic.types import Epoch

FIRST_EPOCH = 1_000_000
_PAUSE_S = 0.15


def probe_keys(deployment: str) -> Keys:
    return Keys(f"{deployment}-probe")


async def decide_again(
    store: Store, deployment: str, done: OperationRecord, count: int, *, lease_ttl_s: int
) -> dict[int, tuple[float, float]]:
    """Commit `done`, an UP, `count` times over; epoch -> when each was sent and answered (wall
    clock)."""
    keys = probe_keys(deployment)
    session = await Session.open(store, lease_ttl_s)
    try:
        leadership = await Election(store, keys.leader, session, "probe").campaign()
        fenced = FencedStore(store, leadership)
        checked = replace(done, phase=Phase.CHECK, token=fenced.token)
        revision = await store.txn(
            [],
            [
                Put(keys.operation, encode(checked)),
                Put(keys.topology, encode(done.plan.before)),
            ],
        )
        times = {}
        for epoch in range(FIRST_EPOCH, FIRST_EPOCH + count):
            plan = replace(done.plan, after=replace(done.plan.after, epoch=Epoch(epoch)))
            record = replace(checked, plan=plan, topology_revision=revision)
            journal = Journal(fenced, keys, record, revision, revision)
            sent_s = time.time()
            await journal.commit(replace(record, phase=Phase.COMMIT))
            times[epoch] = sent_s, time.time()
            revision = journal.guard().mod_revision
            await asyncio.sleep(_PAUSE_S)
        return times
    finally:
        await session.close()
