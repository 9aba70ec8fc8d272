"""More ranks than etcd takes writes in one transaction; what they have in common is stored once."""

from __future__ import annotations

import asyncio
import random

import pytest

from dynamo_elastic.config_sections import ScaleConfig
from dynamo_elastic.coordinator.main_loop import Coordinator, Deployment
from dynamo_elastic.coordinator.payloads import CommonPayloads, endpoints_of, named
from dynamo_elastic.coordinator.records import CommandRecord, EndpointRecord, Keys, encode
from dynamo_elastic.coordinator.store import MOST_BYTES, MOST_OPS, Delete, Put, Versioned
from dynamo_elastic.coordinator.targets import request_scale, wait_outcome
from dynamo_elastic.coordinator.timeline import Timeline
from dynamo_elastic.errors import StaleCommand
from dynamo_elastic.phases import Step
from dynamo_elastic.testing import virtual_time
from dynamo_elastic.testing.coordination import SHAPE, world
from dynamo_elastic.testing.store import FakeStore
from dynamo_elastic.testing.virtual_time import wall_clock
from dynamo_elastic.topology import Member, Topology
from dynamo_elastic.types import Epoch, FencingToken, Incarnation, OperationId, WorkerId

RANKS = MOST_OPS + 7
CONFIG = ScaleConfig(initial_ranks=RANKS, max_ranks=RANKS, lease_ttl_s=30, step_timeout_s=60)
KEYS = Keys("test")


class CountingStore(FakeStore):
    """Keeps which prefixes were read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []

    async def get_prefix(self, prefix: str) -> tuple[Versioned, ...]:
        self.read.append(prefix)
        return await super().get_prefix(prefix)


def test_more_ranks_than_a_transaction_takes_boot_leave_and_come_back() -> None:
    async def main() -> None:
        store = CountingStore()
        async with world(store, RANKS) as here:
            deployment = Deployment(KEYS, CONFIG, SHAPE, Timeline(None), wall_clock)
            coordinator = asyncio.create_task(Coordinator(store, deployment, "one").run())
            await here.until(RANKS, timeout_s=600)
            assert store.read.count(KEYS.endpoints(Epoch(1))) == 1, "by the coordinator, for all"
            request_id = await request_scale(store, KEYS, 4, "test")
            await wait_outcome(store, KEYS, request_id, timeout_s=600)
            await here.until(4, timeout_s=600)
            assert await here.faults() == []
            assert await store.get_prefix(KEYS.payloads) == ()
            coordinator.cancel()
            await asyncio.wait({coordinator})

    virtual_time.run(main())


def command(common: str) -> CommandRecord:
    own = {"mine": 1}
    return CommandRecord(
        *(OperationId("up-1"), Epoch(1), FencingToken(1), 1, Step.OPEN, 10.0, own, common)
    )


def test_a_command_is_completed_and_what_is_common_is_read_once() -> None:
    async def main() -> None:
        store = FakeStore()
        name, raw = named({"topology": "all"})
        await store.txn([], [Put(KEYS.payload(name), raw)])
        payloads = CommonPayloads(store, KEYS)
        whole = await payloads.completed(command(name))
        assert whole.payload == {"topology": "all", "mine": 1}
        store.down = True
        assert (await payloads.completed(command(name))).payload == whole.payload
        assert (await payloads.completed(command(""))).payload == {"mine": 1}

    virtual_time.run(main())


def test_it_waits_for_a_store_that_is_away_and_refuses_what_is_over() -> None:
    async def main() -> None:
        store = FakeStore()
        name, raw = named({"topology": "all"})
        await store.txn([], [Put(KEYS.payload(name), raw)])
        store.down = True
        waiting = asyncio.create_task(CommonPayloads(store, KEYS).completed(command(name)))
        await asyncio.sleep(5.0)
        assert not waiting.done()
        store.down = False
        assert (await waiting).payload["topology"] == "all"
        with pytest.raises(StaleCommand, match="up-1 is over"):
            await CommonPayloads(store, KEYS).completed(command("gone"))

    virtual_time.run(main())


def test_the_same_content_has_one_name_and_nothing_has_none() -> None:
    assert named({"a": 1}) == named({"a": 1})
    assert named({"a": 1}) != named({"a": 2})
    assert named({}) == ("", encode({}))


TWO = Topology(
    Epoch(3),
    (Member(WorkerId("slot0"), Incarnation("a")), Member(WorkerId("slot1"), Incarnation("b"))),
)


def test_endpoints_are_told_to_all_at_once_or_each_reads_for_itself() -> None:
    def published(slot: int, incarnation: str, endpoint: dict[str, str]) -> Put:
        worker = WorkerId(f"slot{slot}")
        record = EndpointRecord(worker, Incarnation(incarnation), TWO.epoch, endpoint)
        return Put(KEYS.endpoint(TWO.epoch, worker), encode(record))

    async def main() -> None:
        store, last = FakeStore(), KEYS.endpoint(TWO.epoch, WorkerId("slot1"))
        await store.txn([], [published(0, "a", {"at": "0"}), published(1, "b", {"at": "1"})])
        both = {"slot0": {"at": "0"}, "slot1": {"at": "1"}}
        assert await endpoints_of(store, KEYS, TWO) == both
        for of_another_life in (published(1, "older", {"at": "1"}), Delete(last)):
            await store.txn([], [of_another_life])
            assert await endpoints_of(store, KEYS, TWO) == {}
        # As random as the metadata of a transport: it does not shrink.
        large = random.Random(1).randbytes(MOST_BYTES // 2).hex()
        await store.txn([], [published(1, "b", {"at": large})])
        assert await endpoints_of(store, KEYS, TWO) == {}
        await store.txn([], [Put(last, b"{}")])
        assert await endpoints_of(store, KEYS, TWO) == {}
        store.down = True
        assert await endpoints_of(store, KEYS, TWO) == {}

    virtual_time.run(main())
