"""Faults of Dynamo's virtual environment, brought about with its own coordinator and client, and
our watcher beside them. docs/planner.md names each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from dynamo_elastic.coordinator.etcd import EtcdStore
from dynamo_elastic.coordinator.records import (
    Keys,
    OutcomeStatus,
    TargetOutcome,
    TargetRecord,
    WarningRecord,
    decode,
    encode,
)
from dynamo_elastic.coordinator.store import Delete, Put
from dynamo_elastic.coordinator.targets import request_scale
from dynamo_elastic.dynamo.decisions import PlannerKeys
from dynamo_elastic.dynamo.environment import dynamo_environment
from dynamo_elastic.dynamo.watcher import PlannerWatcher, Widths
from dynamo_elastic.testing.deployments import asyncio_test
from dynamo_elastic.testing.dynamo_processes import dynamo_deployment
from dynamo_elastic.testing.etcd_process import etcd_process
from dynamo_elastic.topology import EngineShape, ScaleLimits

pytestmark = [pytest.mark.etcd, pytest.mark.dynamo]

KEYS, PLANNER = Keys("test"), PlannerKeys("dynamo")
CHECK_S, MAX_WAIT_S = 1, 3
"""What Dynamo has as 10 s and 1800 s."""


class Planner:
    """The planner's side: Dynamo's own coordinator of the virtual environment, on a lease."""

    def __init__(self) -> None:
        from dynamo._core import VirtualConnectorCoordinator
        from dynamo.runtime import DistributedRuntime

        self.runtime = DistributedRuntime(asyncio.get_running_loop(), "etcd", "tcp")
        retries = MAX_WAIT_S // CHECK_S
        self.coordinator = VirtualConnectorCoordinator(
            self.runtime, PLANNER.namespace, CHECK_S, MAX_WAIT_S, retries
        )

    async def decide(self, ranks: int) -> int:
        """Decide, unless it is still held up by the last decision; the id of the newest."""
        await self.coordinator.update_scaling_decision(None, ranks)
        state: Any = self.coordinator.read_state()
        return int(state.decision_id)

    async def ready(self) -> bool:
        """What a watch has told the planner so far: a moment behind what is stored."""
        return bool(await self.coordinator.is_scaling_ready())

    async def held_up(self) -> bool:
        return not await self.ready()

    async def serve(self) -> None:
        """What makes a planner an instance: the endpoint that it serves once it is up."""
        endpoint = self.runtime.endpoint(f"{PLANNER.namespace}.Planner.generate")
        await endpoint.serve_endpoint(_nothing)

    def end(self) -> None:
        self.runtime.shutdown()


async def _nothing(request: Any) -> AsyncIterator[Any]:
    yield {}


class World:
    """etcd, a coordinator of ours that is a script, and the watcher while it runs."""

    def __init__(self, store: EtcdStore) -> None:
        self.store = store
        self.targets: list[TargetRecord] = []
        self.answering = True
        self.coordinating = asyncio.Event()

    async def start_planner(self) -> Planner:
        planner = Planner()
        await planner.coordinator.async_init()
        return planner

    async def coordinate(self) -> None:
        async with self.store.watch(KEYS.target) as watch:
            self.coordinating.set()
            async for change in watch:
                if change.value is not None:
                    self.targets.append(decode(TargetRecord, change.value))
                    if self.answering:
                        await self.answer()

    async def answer(self) -> None:
        target = self.targets[-1]
        outcome = TargetOutcome(target.request_id, target.ranks, OutcomeStatus.REACHED)
        await self.store.txn([], [Put(KEYS.outcome, encode(outcome))])

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        widths = Widths(EngineShape(8, 8), ScaleLimits(1, 4), slots=4)
        watcher = PlannerWatcher(
            self.store,
            KEYS,
            PLANNER,
            widths,
            on_unreached=self._unexpected,
            on_gone=self._unexpected,
            look_every_s=0.3,
            rivals_after_s=0.3,
        )
        tasks = [asyncio.create_task(self.coordinate())]
        await self.coordinating.wait()
        tasks.append(asyncio.create_task(watcher.run()))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _unexpected(self, reason: str) -> None:
        raise AssertionError(reason)

    async def stored(self, key: str) -> str | None:
        found = await self.store.get(key)
        return None if found is None else found.value.decode()

    async def warnings(self) -> list[str]:
        found = await self.store.get_prefix(KEYS.warnings)
        return [decode(WarningRecord, v.value).text for v in found]

    @property
    def widths(self) -> list[int]:
        return [t.ranks for t in self.targets]


async def until(holds: Callable[[], Any], timeout_s: float = 5.0) -> None:
    """Return once `holds()`, or what it is awaited to, is true."""
    async with asyncio.timeout(timeout_s):
        while True:
            result = holds()
            if await result if asyncio.iscoroutine(result) else result:
                return
            await asyncio.sleep(0.02)


@asynccontextmanager
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    with etcd_process(tmp_path / "etcd") as etcd:
        config = dynamo_deployment(tmp_path, etcd, slots=4)
        for name, value in dynamo_environment(config).items():
            monkeypatch.setenv(name, value)
        store = EtcdStore(config.etcd.urls)
        try:
            yield World(store)
        finally:
            await store.close()


@asyncio_test
async def test_ids_that_start_at_0_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(tmp_path, monkeypatch) as w:
        first = await w.start_planner()
        async with w.watching():
            for decision_id, ranks in ((0, 4), (1, 2)):
                assert await first.decide(ranks) == decision_id
                await until(first.ready)
            first.end()
            await until(lambda: gone(w, PLANNER.decision))
            second = await w.start_planner()
            w.answering = False
            assert await second.decide(3) == 0
            # The fault: the old acknowledgement covers id 0, and Dynamo's client sees nothing new.
            assert await w.stored(PLANNER.acknowledged) == "1"
            assert await second.ready()
            assert not await client_wakes()
            await until(lambda: w.widths == [4, 2, 3])
            await w.answer()
            await until(lambda: acknowledged(w, "0"))
        second.end()


async def gone(w: World, key: str) -> bool:
    return await w.stored(key) is None


async def acknowledged(w: World, decision_id: str) -> bool:
    return await w.stored(PLANNER.acknowledged) == decision_id


async def client_wakes() -> bool:
    """True if Dynamo's own client of the environment is told of a decision."""
    from dynamo._core import VirtualConnectorClient
    from dynamo.runtime import DistributedRuntime

    runtime = DistributedRuntime(asyncio.get_running_loop(), "etcd", "tcp")
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await VirtualConnectorClient(runtime, PLANNER.namespace).wait()
                return True
        return False
    finally:
        runtime.shutdown()


@asyncio_test
async def test_a_wait_that_spins_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(tmp_path, monkeypatch) as w:
        planner = await w.start_planner()
        async with w.watching():
            await planner.decide(4)
            await until(planner.ready)
            w.answering = False
            await planner.decide(2)
            # The fault: with an older acknowledgement there, the wait ends at once, unfinished.
            began_s = time.monotonic()
            await planner.coordinator.wait_for_scaling_completion()
            assert time.monotonic() - began_s < CHECK_S / 2
            assert not await planner.ready(), "not finished: we have not acknowledged"
            await until(lambda: w.widths == [4, 2])
            await w.answer()
            await until(planner.ready)
        assert w.widths == [4, 2], "acted on once"
        planner.end()


@asyncio_test
async def test_an_acknowledgement_that_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dynamo._core import VirtualConnectorClient
    from dynamo.runtime import DistributedRuntime

    async with world(tmp_path, monkeypatch) as w:
        planner = await w.start_planner()
        await planner.decide(4)
        consumer = DistributedRuntime(asyncio.get_running_loop(), "etcd", "tcp")
        client = VirtualConnectorClient(consumer, PLANNER.namespace)
        await client.wait()
        decision = await client.get()
        await client.complete(decision)
        await until(planner.ready)
        # The fault: Dynamo's own consumer takes its acknowledgement with it when it exits.
        consumer.shutdown()
        await until(planner.held_up)
        async with w.watching():
            await until(planner.ready)
            # Somebody scales by hand; then our acknowledgement goes, too. It comes back, and what
            # was done by hand stays.
            await request_scale(w.store, KEYS, 1, "cli")
            await until(lambda: w.widths == [4, 1])
            await w.store.txn([], [Delete(PLANNER.acknowledged)])
            await until(lambda: acknowledged(w, "0"))
            assert w.widths == [4, 1]
        assert await acknowledged(w, "0"), "ours outlives us"
        await until(planner.ready)
        planner.end()


@asyncio_test
async def test_a_planner_that_is_held_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(tmp_path, monkeypatch) as w:
        planner = await w.start_planner()
        assert await planner.decide(4) == 0
        # The fault: nobody acknowledges, and every new decision is dropped, for SCALING_MAX_WAIT.
        began_s = time.monotonic()
        assert await planner.decide(2) == 0
        async with asyncio.timeout(4 * MAX_WAIT_S):
            while await planner.decide(2) == 0:
                await asyncio.sleep(0.1)
        assert time.monotonic() - began_s > MAX_WAIT_S - CHECK_S
        # With us there it is held up for as long as the operation takes.
        async with w.watching():
            await until(planner.ready)
            assert await planner.decide(3) == 2
            await until(planner.ready)
        assert w.widths == [2, 3]
        planner.end()


@asyncio_test
async def test_count_and_id_are_written_at_one_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing rests on it (see pending_decision), but if it changes we want to know."""
    async with world(tmp_path, monkeypatch) as w:
        planner = await w.start_planner()
        await planner.decide(4)
        stored = {v.key: v for v in await w.store.get_prefix(PLANNER.prefix)}
        assert stored[PLANNER.ranks].mod_revision == stored[PLANNER.decision].mod_revision
        planner.end()


@asyncio_test
async def test_two_planners_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planners show themselves as instances; a killed one does until its lease runs out."""
    async with world(tmp_path, monkeypatch) as w:
        first, second = await w.start_planner(), await w.start_planner()
        serving = [asyncio.ensure_future(p.serve()) for p in (first, second)]
        async with w.watching():
            await until(w.warnings)
            (text,) = await w.warnings()
            assert text.startswith("2 planners decide in one namespace (instances ")
            second.end()
            await until(lambda: nothing(w))
        first.end()
        await asyncio.gather(*serving, return_exceptions=True)


async def nothing(w: World) -> bool:
    return await w.warnings() == []
