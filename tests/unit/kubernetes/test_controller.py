"""The loop on fakes: conflicts, an API server that is away, a leader that stops."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from dynamo_elastic.coordinator.main_loop import Coordinator
from dynamo_elastic.coordinator.main_loop import Deployment as Coordinated
from dynamo_elastic.coordinator.records import Keys
from dynamo_elastic.coordinator.status import read_status
from dynamo_elastic.failpoint_table import FAILPOINTS, Actor
from dynamo_elastic.failpoints import Act, error_at, set_hook
from dynamo_elastic.kubernetes.base import (
    ClusterConflict,
    ClusterRefused,
    ClusterUnavailable,
    ClusterView,
    GraphView,
    PodView,
    Report,
    Role,
)
from dynamo_elastic.kubernetes.controller import Controller, Deployment
from dynamo_elastic.kubernetes.decide import Limits
from dynamo_elastic.kubernetes.report import DEGRADED, READY, SETTLED
from dynamo_elastic.testing.cluster import FakeCluster
from dynamo_elastic.testing.coordination import CONFIG, SHAPE
from dynamo_elastic.testing.participants import FakeShell
from dynamo_elastic.testing.store import FakeStore
from dynamo_elastic.testing.virtual_time import run, wall_clock

KEYS = Keys("test")
LIMITS = Limits(SHAPE, CONFIG)


def in_virtual_time(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Runs it with a deadline that costs no time."""

    async def main() -> None:
        async with asyncio.timeout(600):
            await test()

    @functools.wraps(test)
    def within() -> None:
        run(main())

    return within


class UnluckyCluster(FakeCluster):
    """Each kind of write meets a conflict the first time, and each kind of read no answer."""

    def __init__(self, replicas: int) -> None:
        super().__init__(replicas, now=wall_clock)
        self.met: list[str] = []

    def _meet(self, name: str, error: Exception) -> None:
        if name not in self.met:
            self.met.append(name)
            raise error

    async def read(self) -> ClusterView:
        self._meet("read", ClusterUnavailable("away"))
        return await super().read()

    async def changed(self, since: ClusterView) -> None:
        self._meet("changed", ClusterUnavailable("away"))
        await super().changed(since)

    async def create_pod(self, graph: GraphView, slot: int) -> None:
        self._meet("create_pod", ClusterConflict("409"))
        await super().create_pod(graph, slot)

    async def set_role(self, pod: PodView, role: Role) -> None:
        self._meet("set_role", ClusterConflict("409"))
        await super().set_role(pod, role)

    async def delete_pod(self, pod: PodView) -> None:
        self._meet("delete_pod", ClusterConflict("409"))
        await super().delete_pod(pod)

    async def set_replicas(self, graph: GraphView, replicas: int) -> None:
        self._meet("set_replicas", ClusterConflict("409"))
        await super().set_replicas(graph, replicas)

    async def write_report(self, graph: GraphView, report: Report) -> None:
        self._meet("write_report", ClusterConflict("409"))
        await super().write_report(graph, report)


async def kubelet(cluster: FakeCluster, store: FakeStore) -> None:
    """Runs a shell in each pod, and ends it with the pod."""
    running: dict[str, asyncio.Task[None]] = {}
    try:
        while True:
            for pod in list(cluster.pods.values()):
                if pod.deleting:
                    running.pop(pod.uid).cancel()
                    cluster.remove(pod.name)
                elif pod.uid not in running:
                    shell = FakeShell(store, KEYS, pod.slot, ttl_s=3)
                    running[pod.uid] = asyncio.create_task(shell.run())
            await asyncio.sleep(0.05)
    finally:
        for task in running.values():
            task.cancel()
        await asyncio.gather(*running.values(), return_exceptions=True)


@asynccontextmanager
async def deployed(cluster: FakeCluster, store: FakeStore) -> AsyncIterator[None]:
    """Coordinator and kubelet."""
    coordinator = Coordinator(store, Coordinated(KEYS, CONFIG, SHAPE, now=wall_clock), "c")
    async with _background(coordinator.run()), _background(kubelet(cluster, store)):
        yield


@asynccontextmanager
async def controlling(cluster: FakeCluster, store: FakeStore, name: str) -> AsyncIterator[None]:
    controller = Controller(store, cluster, Deployment(KEYS, LIMITS, wall_clock), name)
    async with _background(controller.run()):
        yield


@asynccontextmanager
async def _background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def at_rest(cluster: FakeCluster, store: FakeStore, ranks: int) -> None:
    while True:
        status = await read_status(store, KEYS)
        report = cluster.graph.report
        holds = {c.kind: c.holds for c in report.conditions} if report else {}
        well = holds == {READY: True, SETTLED: True, DEGRADED: False}
        if well and status.width == len(cluster.pods) == ranks:
            return
        await asyncio.sleep(0.1)


@in_virtual_time
async def test_every_conflict_is_decided_anew() -> None:
    cluster, store = UnluckyCluster(2), FakeStore()
    async with deployed(cluster, store), controlling(cluster, store, "a"):
        await at_rest(cluster, store, 2)
        cluster.wish(4)
        await at_rest(cluster, store, 4)
        cluster.wish(0)
        await at_rest(cluster, store, 2)
    assert cluster.graph.replicas == 2, "the fewest that are legal"
    assert len(cluster.met) == 7, "each of its calls has failed once"


class Dead(BaseException):
    """What no handler sees: the process is gone."""


@asynccontextmanager
async def one_after_the_other(cluster: FakeCluster, store: FakeStore) -> AsyncIterator[None]:
    """A controller, and another one whenever it dies."""

    async def supervise() -> None:
        for life in itertools.count():
            deployment = Deployment(KEYS, LIMITS, wall_clock)
            with suppress(Dead):
                await Controller(store, cluster, deployment, f"life{life}").run()

    async with _background(supervise()):
        yield


PLACES = [f.name for f in FAILPOINTS if f.actor is Actor.CONTROLLER]


@pytest.mark.parametrize("act", [Act.ERROR, Act.KILL])
@pytest.mark.parametrize("place", PLACES)
def test_it_fails_or_dies_before_and_after_each_act(place: str, act: Act) -> None:
    """Every failpoint of the controller: no pod is made twice, and the wish comes true."""
    met: list[str] = []

    def hook(name: str) -> None:
        if name == place and place not in met:
            met.append(name)
            raise Dead if act is Act.KILL else error_at(name)

    @in_virtual_time
    async def story() -> None:
        cluster, store = FakeCluster(2, now=wall_clock), FakeStore()
        async with deployed(cluster, store), one_after_the_other(cluster, store):
            await at_rest(cluster, store, 2)
            for wish, ranks in ((4, 4), (0, 2)):
                cluster.wish(wish)
                await at_rest(cluster, store, ranks)
        assert cluster.graph.replicas == 2

    set_hook(hook)
    try:
        story()
    finally:
        set_hook(None)
    assert met == [place]


@in_virtual_time
async def test_the_second_goes_on_when_the_leader_stops() -> None:
    cluster, store = FakeCluster(2, now=wall_clock), FakeStore()
    async with deployed(cluster, store):
        async with controlling(cluster, store, "a"):
            await at_rest(cluster, store, 2)
            cluster.wish(4)
        async with controlling(cluster, store, "b"), controlling(cluster, store, "c"):
            await at_rest(cluster, store, 4)


@in_virtual_time
async def test_the_newest_of_many_wishes_is_the_one_that_comes_true() -> None:
    cluster, store = FakeCluster(2, now=wall_clock), FakeStore()
    async with deployed(cluster, store), controlling(cluster, store, "a"):
        await at_rest(cluster, store, 2)
        for ranks in (4, 2, 3, 4, 2, 4, 3):
            cluster.wish(ranks)
            await asyncio.sleep(0.07)
        await at_rest(cluster, store, 3)


class RefusingCluster(FakeCluster):
    """Its pod template is not valid from the third pod on."""

    asked = 0

    async def create_pod(self, graph: GraphView, slot: int) -> None:
        self.asked += 1
        if slot >= 2:
            raise ClusterRefused("spec.containers[0].image: required value")
        await super().create_pod(graph, slot)


@in_virtual_time
async def test_what_the_api_server_refuses_is_reported_and_not_asked_for_all_the_time() -> None:
    cluster, store = RefusingCluster(2, now=wall_clock), FakeStore()
    async with deployed(cluster, store), controlling(cluster, store, "a"):
        await at_rest(cluster, store, 2)
        before = cluster.asked
        cluster.wish(4)
        await asyncio.sleep(60)
        assert cluster.asked - before <= 2 * 15, "two pods, again after each pause"
        report = cluster.graph.report
        assert report is not None
        told = {c.kind: (c.holds, c.message) for c in report.conditions}
        assert told[DEGRADED][0]
        assert "image: required value" in told[DEGRADED][1]
        assert told[READY][0]
        cluster.wish(2)
        await at_rest(cluster, store, 2)
