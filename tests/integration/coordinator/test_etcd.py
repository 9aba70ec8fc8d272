"""EtcdStore when etcd is away, hung, back again, or one of several endpoints."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from dynamo_elastic.coordinator.etcd import EtcdStore, txn_request
from dynamo_elastic.coordinator.etcd_channel import MAYBE_APPLIED, mapped
from dynamo_elastic.coordinator.session import Session
from dynamo_elastic.coordinator.store import MOST_BYTES, MOST_OPS, Delete, Put
from dynamo_elastic.errors import ConfigError, OutcomeUnknown, SessionLost, StoreUnavailable
from dynamo_elastic.testing.etcd_process import EtcdProcess, etcd_missing, etcd_process, free_port
from dynamo_elastic.types import LeaseId

pytestmark = pytest.mark.etcd


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdProcess]:
    if etcd_missing():
        pytest.skip(etcd_missing())
    with etcd_process(tmp_path) as process:
        yield process


def test_a_hung_etcd_leaves_a_write_unknown_and_a_read_unanswered(etcd: EtcdProcess) -> None:
    async def main() -> None:
        store = EtcdStore([etcd.url], timeout_s=0.5)
        await store.txn([], [Put("/t/a", b"1")])
        etcd.pause()
        with pytest.raises(OutcomeUnknown):
            await store.txn([], [Put("/t/a", b"2")])
        with pytest.raises(StoreUnavailable):
            await store.get("/t/a")
        etcd.resume()
        assert await store.get("/t/a") is not None
        await store.close()

    asyncio.run(main())


def test_an_etcd_that_went_away_took_no_write_and_is_found_again(etcd: EtcdProcess) -> None:
    async def main() -> None:
        store = EtcdStore([etcd.url], timeout_s=1.5)
        revision = await store.txn([], [Put("/t/a", b"1")])
        async with store.watch("/t/") as watch:
            etcd.kill()
            with pytest.raises(StoreUnavailable):
                await anext(aiter(watch))
        with pytest.raises(StoreUnavailable):
            await store.txn([], [Put("/t/a", b"2")])
        etcd.start()
        read = await store.get("/t/a")
        assert read is not None
        assert (read.value, read.mod_revision) == (b"1", revision)
        await store.close()

    asyncio.run(main())


def test_the_next_endpoint_is_used_when_one_is_away(etcd: EtcdProcess) -> None:
    async def main() -> None:
        store = EtcdStore([f"http://127.0.0.1:{free_port()}", etcd.url], timeout_s=2.0)
        await store.txn([], [Put("/t/a", b"1")])
        started_s = asyncio.get_running_loop().time()
        assert await store.get("/t/a") is not None
        assert asyncio.get_running_loop().time() - started_s < 0.5, "it remembers which one works"
        await store.close()

    asyncio.run(main())


def test_a_session_is_lost_with_its_cause(etcd: EtcdProcess) -> None:
    async def main() -> None:
        store = EtcdStore([etcd.url], timeout_s=0.5)
        revoked, silent = await Session.open(store, 2), await Session.open(store, 2)
        await store.revoke_lease(revoked.lease)
        assert "run out" in await asyncio.wait_for(revoked.lost.wait(), 5)
        etcd.pause()
        assert "no answer" in await asyncio.wait_for(silent.lost.wait(), 5)
        etcd.resume()
        with pytest.raises(SessionLost, match="no answer"):
            silent.check()
        await silent.close()
        await revoked.close()
        await store.close()

    asyncio.run(main())


def streams(etcd: EtcdProcess) -> int:
    """Of renewals that etcd has been asked for."""
    with urllib.request.urlopen(f"{etcd.url}/metrics", timeout=10) as reply:
        lines = reply.read().decode().splitlines()
    started = 'grpc_server_started_total{grpc_method="LeaseKeepAlive"'
    return next(int(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(started))


def test_leases_of_a_client_are_renewed_on_one_stream(etcd: EtcdProcess) -> None:
    async def main() -> None:
        store = EtcdStore([etcd.url], timeout_s=1.0)
        leases = [await store.grant_lease(60) for _ in range(3)]
        gone = await store.grant_lease(60)
        await store.revoke_lease(gone)
        for _ in range(5):
            await asyncio.gather(*map(store.keep_alive, leases))
        with pytest.raises(SessionLost):
            await store.keep_alive(gone)
        await store.keep_alive(leases[0])
        assert streams(etcd) == 1
        await store.close()

    asyncio.run(main())


async def keep_asking(store: EtcdStore, lease: LeaseId) -> None:
    """The threads of an etcd that is paused stop one after another."""
    for _ in range(10):
        await store.keep_alive(lease)


def test_a_stream_that_does_not_answer_is_given_up_for_another(etcd: EtcdProcess) -> None:
    async def main() -> None:
        store = EtcdStore([etcd.url], timeout_s=0.5)
        lease = await store.grant_lease(60)
        await store.keep_alive(lease)
        etcd.pause()
        with pytest.raises(StoreUnavailable):
            await keep_asking(store, lease)
        etcd.resume()
        await store.keep_alive(lease)
        assert streams(etcd) == 2
        etcd.kill()
        with pytest.raises(StoreUnavailable):
            await store.keep_alive(lease)
        etcd.start()
        await store.keep_alive(lease)
        assert streams(etcd) == 1, "of the etcd that has come back"
        await store.close()

    asyncio.run(main())


def test_what_decides_reads_itself_back_and_so_is_answered_at_once() -> None:
    small, large, larger = (Put(f"/t/{n}", b"x" * n) for n in (999, 1000, 2000))

    def read_back(*ops: Put) -> list[bytes]:
        request = txn_request([], ops)
        return [op.request_range.key for op in request.success if op.HasField("request_range")]

    assert read_back(small) == []
    assert read_back(small, larger, large) == [b"/t/1000"]
    full = [Put(f"/t/{i}", b"x" * 1000) for i in range(MOST_OPS)]
    assert read_back(*full) == [], "no room for it"
    assert read_back(*full[1:]) == [b"/t/1"]


def test_the_largest_transactions_pass_with_what_they_read_back(etcd: EtcdProcess) -> None:
    async def main() -> None:
        store = EtcdStore([etcd.url])
        for count in (MOST_OPS - 1, MOST_OPS):
            await store.txn([], [Put(f"/t/{i}", b"x" * 1000) for i in range(count)])
        await store.txn([], [Put("/t/a", b"x" * (MOST_BYTES - 1000)), Delete("/t/b")])
        await store.close()

    asyncio.run(main())


@pytest.mark.parametrize("code", list(grpc.StatusCode))
def test_every_grpc_code_is_mapped(code: grpc.StatusCode) -> None:
    error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="why")
    for write in (False, True):
        expected: type[Exception] = StoreUnavailable
        if write and code in MAYBE_APPLIED:
            expected = OutcomeUnknown
        if code is grpc.StatusCode.NOT_FOUND:
            expected = SessionLost
        if code is grpc.StatusCode.INVALID_ARGUMENT:
            expected = ValueError
        with pytest.raises(expected, match="why"), mapped(write=write):
            raise error


@pytest.mark.parametrize("url", ["localhost:2379", "https://h:1", "http://h", "http://:2379", ""])
def test_a_bad_endpoint_is_named(url: str) -> None:
    with pytest.raises(ConfigError, match=r"etcd\.endpoints"):
        EtcdStore([url])
