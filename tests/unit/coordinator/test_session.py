"""A session is lost when its lease may be gone, and says why; leadership goes with it."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from dynamo_elastic.coordinator.election import Election
from dynamo_elastic.coordinator.fenced import FencedStore
from dynamo_elastic.coordinator.session import Session
from dynamo_elastic.coordinator.store import Delete, Guard, Put
from dynamo_elastic.errors import GuardFailed, LeadershipLost, OutcomeUnknown, SessionLost
from dynamo_elastic.testing import virtual_time
from dynamo_elastic.testing.store import FakeStore, Fault, FaultKind, FaultyStore
from dynamo_elastic.types import LeaseId

KEY = "/leader"


async def never() -> int | None:
    raise AssertionError("nobody asks whether a write that was answered was applied")


def test_a_lease_is_kept_for_as_long_as_the_session_is_open() -> None:
    async def main() -> None:
        store = FakeStore()
        session = await Session.open(store, 5)
        await store.txn([], [Put("/a", b"", session.lease)])
        await asyncio.sleep(3600)
        session.check()
        assert await store.get("/a") is not None
        await session.close()
        await session.close()
        assert await store.get("/a") is None
        assert session.lost.cause == "closed"

    virtual_time.run(main())


def test_an_orphan_leaves_its_keys_until_the_lease_runs_out() -> None:
    async def main() -> None:
        store = FakeStore()
        session = await Session.open(store, 5)
        await store.txn([], [Put("/a", b"", session.lease)])
        await session.orphan()
        assert await store.get("/a") is not None
        await asyncio.sleep(6)
        assert await store.get("/a") is None

    virtual_time.run(main())


def test_a_session_is_lost_no_later_than_its_lease() -> None:
    async def main() -> None:
        store = FakeStore()
        session = await Session.open(store, 5)
        await asyncio.sleep(10.5)
        store.down = True
        went_s = asyncio.get_running_loop().time()
        assert await session.lost.wait() == "no answer from the store for 5 s"
        assert asyncio.get_running_loop().time() - went_s <= 5
        with pytest.raises(SessionLost, match="no answer"):
            session.check()

    virtual_time.run(main())


def test_a_short_outage_of_the_store_is_survived() -> None:
    async def main() -> None:
        store = FakeStore()
        session = await Session.open(store, 5)
        store.down = True
        await asyncio.sleep(3)
        store.down = False
        await asyncio.sleep(60)
        session.check()
        await session.close()

    virtual_time.run(main())


def test_work_ends_with_the_session() -> None:
    async def main() -> None:
        store = FakeStore()
        session = await Session.open(store, 5)
        assert await session.run(asyncio.sleep(1, "result")) == "result"
        work = asyncio.ensure_future(asyncio.sleep(3600))
        running = asyncio.ensure_future(session.run(asyncio.wait_for(work, None)))
        await asyncio.sleep(1)
        store.expire(session.lease)
        with pytest.raises(SessionLost, match="run out"):
            await running
        assert work.cancelled()

    virtual_time.run(main())


def test_one_leads_and_the_next_has_a_larger_token() -> None:
    async def main() -> None:
        store = FakeStore()
        first, second = await Session.open(store, 5), await Session.open(store, 5)
        one = await Election(store, KEY, first, "one").campaign()
        waiting = asyncio.ensure_future(Election(store, KEY, second, "two").campaign())
        await asyncio.sleep(60)
        assert not waiting.done()
        fenced = FencedStore(store, one)
        await fenced.write([Guard("/a", 0)], [Put("/a", b"1")], applied=never)
        store.expire(first.lease)
        two = await waiting
        assert two.token > one.token
        with pytest.raises(LeadershipLost):
            await fenced.write([], [Put("/a", b"2")], applied=never)
        await second.close()

    virtual_time.run(main())


def test_resigning_lets_the_next_one_lead() -> None:
    async def main() -> None:
        store = FakeStore()
        session = await Session.open(store, 5)
        election = Election(store, KEY, session, "one")
        leadership = await election.campaign()
        await election.resign(leadership)
        await election.resign(leadership)
        assert await store.get(KEY) is None
        await session.close()

    virtual_time.run(main())


@pytest.mark.parametrize("fault", list(FaultKind))
def test_a_claim_is_known_again_whatever_becomes_of_its_reply(fault: FaultKind) -> None:
    async def main() -> None:
        inner = FakeStore()
        store = FaultyStore(inner, [Fault(fault, at_write=0, delay_s=0.3)])
        session = await Session.open(store, 5)
        leadership = await Election(store, KEY, session, "one").campaign()
        stored = await store.get(KEY)
        assert stored is not None
        assert stored.create_revision == stored.mod_revision == leadership.token
        await session.close()

    virtual_time.run(main())


@pytest.mark.parametrize("steps", range(12))
def test_a_cancelled_campaign_leaves_no_claim(steps: int) -> None:
    async def main() -> None:
        store = FakeStore()
        session = await Session.open(store, 5)
        campaign = asyncio.ensure_future(Election(store, KEY, session, "one").campaign())
        for _ in range(steps):
            await asyncio.sleep(0)
        if campaign.done():
            return
        campaign.cancel()
        await asyncio.wait({campaign})
        await asyncio.sleep(1)
        if campaign.cancelled():
            assert await store.get(KEY) is None
        await session.close()

    virtual_time.run(main())


def test_a_campaign_ends_with_its_session() -> None:
    async def main() -> None:
        store = FakeStore()
        await store.txn([], [Put(KEY, b"somebody else")])
        session = await Session.open(store, 5)
        campaign = asyncio.ensure_future(Election(store, KEY, session, "one").campaign())
        await asyncio.sleep(1)
        store.expire(session.lease)
        with pytest.raises(SessionLost):
            await campaign

    virtual_time.run(main())


def test_a_failed_guard_is_told_from_lost_leadership() -> None:
    async def main() -> None:
        store = FakeStore()
        session = await Session.open(store, 5)
        fenced = FencedStore(store, await Election(store, KEY, session, "one").campaign())
        with pytest.raises(GuardFailed):
            await fenced.write([Guard("/a", 7)], [Put("/a", b"")], applied=never)
        await store.txn([], [Delete(KEY)])
        with pytest.raises(LeadershipLost):
            await fenced.write([Guard("/a", 7)], [Put("/a", b"")], applied=never)
        await session.close()

    virtual_time.run(main())


def test_a_write_gives_up_on_a_store_that_stays_away() -> None:
    async def main() -> None:
        inner = FakeStore()
        session = await Session.open(inner, 60)
        leadership = await Election(inner, KEY, session, "one").campaign()
        lost = [Fault(FaultKind.LOSE_REQUEST, at_write=n) for n in range(200)]
        fenced = FencedStore(FaultyStore(inner, lost), leadership)
        with pytest.raises(OutcomeUnknown):
            await fenced.write([Guard("/a", 0)], [Put("/a", b"")], applied=never)
        await session.close()

    virtual_time.run(main())


def test_shells_that_started_together_do_not_renew_together() -> None:
    class Counting(FakeStore):
        renewals: list[float]

        async def keep_alive(self, lease: LeaseId) -> None:
            self.renewals.append(asyncio.get_running_loop().time())
            await super().keep_alive(lease)

    async def main() -> None:
        store = Counting()
        store.renewals = []
        began_s = asyncio.get_running_loop().time()
        sessions = [await Session.open(store, 9) for _ in range(100)]
        await asyncio.sleep(30)
        busiest = Counter(int(10 * (at_s - began_s)) for at_s in store.renewals)
        assert max(busiest.values()) <= 15
        assert min(store.renewals) - began_s >= 1.5
        for session in sessions:
            session.check()
            await session.close()

    virtual_time.run(main())
