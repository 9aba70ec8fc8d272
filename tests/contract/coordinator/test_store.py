"""What every Store does, checked on the fake and on a real etcd alike."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from dynamo_elastic.coordinator.etcd import EtcdStore
from dynamo_elastic.coordinator.store import (
    MOST_BYTES,
    MOST_OPS,
    Changed,
    Delete,
    DeletePrefix,
    Guard,
    Put,
    Store,
)
from dynamo_elastic.errors import GuardFailed, SessionLost, StoreUnavailable
from dynamo_elastic.testing import virtual_time
from dynamo_elastic.testing.etcd_process import EtcdProcess, etcd_missing, etcd_process
from dynamo_elastic.testing.store import FakeStore

Test = Callable[[Store], Awaitable[None]]
Runner = Callable[[Test], None]


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdProcess]:
    if etcd_missing():
        pytest.skip(etcd_missing())
    directory: Path = tmp_path_factory.mktemp("etcd")
    with etcd_process(directory) as process:
        yield process


@pytest.fixture(params=["fake", pytest.param("etcd", marks=pytest.mark.etcd)])
def on_store(request: pytest.FixtureRequest) -> Runner:
    """Runs a test coroutine on a store whose keys under /t/ are new to it."""

    async def main(test: Test) -> None:
        store: Store
        if request.param == "fake":
            store = FakeStore()
        else:
            store = EtcdStore([request.getfixturevalue("etcd").url])
            await store.txn([], [DeletePrefix("/t/")])
        try:
            async with asyncio.timeout(30):
                await test(store)
        finally:
            await store.close()

    if request.param == "fake":
        return lambda test: virtual_time.run(main(test))
    request.getfixturevalue("etcd")
    return lambda test: asyncio.run(main(test))


def test_a_put_is_read_back_with_its_revisions(on_store: Runner) -> None:
    async def body(store: Store) -> None:
        assert await store.get("/t/a") is None
        first = await store.txn([], [Put("/t/a", b"1")])
        second = await store.txn([], [Put("/t/a", b"2")])
        read = await store.get("/t/a")
        assert read is not None
        assert (read.key, read.value) == ("/t/a", b"2")
        assert (read.create_revision, read.mod_revision) == (first, second)
        assert first < second

    on_store(body)


def test_a_prefix_is_read_in_key_order(on_store: Runner) -> None:
    async def body(store: Store) -> None:
        await store.txn([], [Put("/t/p/b", b"2"), Put("/t/p/a", b"1"), Put("/t/q", b"3")])
        assert [v.key for v in await store.get_prefix("/t/p/")] == ["/t/p/a", "/t/p/b"]

    on_store(body)


def test_guards_decide_about_the_whole_transaction(on_store: Runner) -> None:
    async def body(store: Store) -> None:
        revision = await store.txn([Guard("/t/a", 0)], [Put("/t/a", b"1")])
        for guard in (Guard("/t/a", 0), Guard("/t/a", revision + 1), Guard("/t/none", 1)):
            with pytest.raises(GuardFailed):
                await store.txn([guard, Guard("/t/none", 0)], [Delete("/t/a"), Put("/t/b", b"x")])
        assert [v.value for v in await store.get_prefix("/t/")] == [b"1"]
        await store.txn([Guard("/t/a", revision)], [Delete("/t/a"), Put("/t/b", b"x")])
        assert [v.key for v in await store.get_prefix("/t/")] == ["/t/b"]

    on_store(body)


def test_deleting_what_is_not_there_is_fine(on_store: Runner) -> None:
    async def body(store: Store) -> None:
        before = await store.txn([], [Put("/t/a", b"1")])
        assert await store.txn([], [Delete("/t/none"), DeletePrefix("/t/none/")]) == before
        assert await store.txn([], [DeletePrefix("/t/")]) == before + 1
        assert await store.get_prefix("/t/") == ()

    on_store(body)


def test_a_key_that_comes_back_is_a_new_one(on_store: Runner) -> None:
    async def body(store: Store) -> None:
        first = await store.txn([], [Put("/t/a", b"1")])
        await store.txn([], [Delete("/t/a")])
        second = await store.txn([], [Put("/t/a", b"1")])
        read = await store.get("/t/a")
        assert read is not None
        assert read.create_revision == second
        with pytest.raises(GuardFailed):
            await store.txn([Guard("/t/a", first)], [Delete("/t/a")])

    on_store(body)


def test_touching_a_key_twice_in_one_transaction_is_a_mistake(on_store: Runner) -> None:
    async def body(store: Store) -> None:
        for other in (Put("/t/a", b"2"), Delete("/t/a"), DeletePrefix("/t/")):
            with pytest.raises(ValueError, match="duplicate key"):
                await store.txn([], [Put("/t/a", b"1"), other])
        assert await store.get("/t/a") is None

    on_store(body)


@pytest.mark.parametrize(
    "ops",
    [
        [Put(f"/t/{i}", b"") for i in range(MOST_OPS + 1)],
        [Put("/t/a", b""), Put("/t/large", b"x" * (MOST_BYTES + 1))],
    ],
    ids=["writes", "bytes"],
)
def test_a_transaction_that_is_too_large_is_a_mistake(on_store: Runner, ops: list[Put]) -> None:
    async def body(store: Store) -> None:
        with pytest.raises(ValueError, match=r"too|transaction"):
            await store.txn([], ops)
        assert await store.get_prefix("/t/") == ()
        await store.txn([], [Put(f"/t/{i}", b"") for i in range(MOST_OPS)])

    on_store(body)


def test_a_watch_has_the_snapshot_and_then_every_event_in_order(on_store: Runner) -> None:
    async def body(store: Store) -> None:
        await store.txn([], [Put("/t/a", b"0")])
        async with store.watch("/t/") as watch:
            assert [(v.key, v.value) for v in watch.snapshot] == [("/t/a", b"0")]
            revisions = [await store.txn([], [Put("/t/a", b"%d" % n)]) for n in range(20)]
            gone = await store.txn([], [Delete("/t/a"), Put("/u/a", b"not under the prefix")])
            events: list[Changed] = []
            async for event in watch:
                events.append(event)
                if event.value is None:
                    break
        expected = [Changed("/t/a", b"%d" % n, r) for n, r in enumerate(revisions)]
        assert events == [*expected, Changed("/t/a", None, gone)]

    on_store(body)


def test_no_event_is_lost_between_snapshot_and_watch(on_store: Runner) -> None:
    """A writer goes on all the time: snapshot and events together have every value."""

    async def body(store: Store) -> None:
        async def write() -> None:
            for n in range(100):
                await store.txn([], [Put("/t/n", b"%d" % n)])

        writer = asyncio.create_task(write())
        for _ in range(5):
            async with store.watch("/t/") as watch:
                last = int(watch.snapshot[0].value) if watch.snapshot else -1
                if last == 99:
                    break
                async for event in watch:
                    assert int(event.value or b"-1") == last + 1
                    last += 1
                    if last % 20 == 19:
                        break
        await writer

    on_store(body)


def test_keys_go_with_their_lease(on_store: Runner) -> None:
    async def body(store: Store) -> None:
        lease = await store.grant_lease(60)
        await store.txn([], [Put("/t/a", b"1", lease), Put("/t/b", b"2")])
        await store.keep_alive(lease)
        async with store.watch("/t/") as watch:
            await store.revoke_lease(lease)
            event = await anext(aiter(watch))
            assert (event.key, event.value) == ("/t/a", None)
        assert [v.key for v in await store.get_prefix("/t/")] == ["/t/b"]
        await store.revoke_lease(lease)

    on_store(body)


def test_a_lease_that_is_gone_is_told_apart(on_store: Runner) -> None:
    async def body(store: Store) -> None:
        lease = await store.grant_lease(60)
        await store.revoke_lease(lease)
        with pytest.raises(SessionLost):
            await store.keep_alive(lease)
        with pytest.raises(SessionLost):
            await store.txn([], [Put("/t/b", b"1"), Put("/t/a", b"1", lease)])
        assert await store.get_prefix("/t/") == ()

    on_store(body)


def test_a_lease_runs_out_unless_it_is_kept_alive(on_store: Runner) -> None:
    async def body(store: Store) -> None:
        kept, left = await store.grant_lease(2), await store.grant_lease(2)
        await store.txn([], [Put("/t/kept", b"", kept), Put("/t/left", b"", left)])
        renewals = asyncio.create_task(_renew(store, kept, 0.5))
        async with store.watch("/t/") as watch:
            assert (await anext(aiter(watch))).key == "/t/left"
        assert [v.key for v in await store.get_prefix("/t/")] == ["/t/kept"]
        renewals.cancel()

    async def _renew(store: Store, lease: int, every_s: float) -> None:
        while True:
            await store.keep_alive(lease)  # type: ignore[arg-type]
            await asyncio.sleep(every_s)

    on_store(body)


def test_a_key_written_again_without_its_lease_stays(on_store: Runner) -> None:
    async def body(store: Store) -> None:
        lease = await store.grant_lease(60)
        await store.txn([], [Put("/t/a", b"1", lease)])
        await store.txn([], [Put("/t/a", b"2")])
        await store.revoke_lease(lease)
        read = await store.get("/t/a")
        assert read is not None

    on_store(body)


def test_close_ends_watches_and_is_idempotent(on_store: Runner) -> None:
    async def body(store: Store) -> None:
        async with store.watch("/t/") as watch:
            await store.close()
            await store.close()
            with pytest.raises(StoreUnavailable):
                await anext(aiter(watch))

    on_store(body)
