"""What every Cluster does: the fake one, and the adapter on a real API server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from dynamo_elastic.kubernetes.api import ApiCluster
from dynamo_elastic.kubernetes.base import Cluster, ClusterConflict, Condition, Report, Role
from dynamo_elastic.kubernetes.pods import Served
from dynamo_elastic.testing.cluster import FakeCluster
from dynamo_elastic.testing.deployments import asyncio_test
from dynamo_elastic.testing.graph_api import (
    COMPONENT,
    CONTROLLER,
    GRAPH,
    NAMESPACE,
    Site,
    make_graph,
)

Make = Callable[[], AbstractAsyncContextManager[Cluster]]
REPORT = Report(1, 2, 1, (Condition("Ready", True, "Ok", "fine", 1_700_000_000.0),))


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.etcd)])
def make(request: pytest.FixtureRequest) -> Make:
    """A cluster with the wish for two ranks and no pod."""
    if request.param == "fake":
        return _fake
    here: Site = request.getfixturevalue("kubernetes_site")

    @asynccontextmanager
    async def made() -> AsyncIterator[Cluster]:
        async with here.api() as api:
            await make_graph(api, 2)
        async with here.client(CONTROLLER) as client:
            yield ApiCluster(client, NAMESPACE, GRAPH, COMPONENT, Served("dynamo-moe", "moe"))

    return made


@asynccontextmanager
async def _fake() -> AsyncIterator[Cluster]:
    yield FakeCluster(2)


@asyncio_test
async def test_a_pod_is_held_is_released_and_goes(make: Make) -> None:
    async with make() as cluster:
        view = await cluster.read()
        assert (view.graph.replicas, view.pods) == (2, ())
        await cluster.create_pod(view.graph, 3)
        (pod,) = (await cluster.read()).pods
        assert (pod.slot, pod.worker_id, pod.role, pod.live) == (3, "slot3", Role.HELD, True)
        await cluster.set_role(pod, Role.RELEASED)
        (released,) = (await cluster.read()).pods
        assert (released.role, released.uid) == (Role.RELEASED, pod.uid)
        await cluster.delete_pod(released)
        assert not any(p.live for p in (await cluster.read()).pods)


@asyncio_test
async def test_a_slot_has_one_pod(make: Make) -> None:
    async with make() as cluster:
        graph = (await cluster.read()).graph
        await cluster.create_pod(graph, 0)
        with pytest.raises(ClusterConflict):
            await cluster.create_pod(graph, 0)


@asyncio_test
async def test_nothing_is_done_to_a_pod_that_has_changed(make: Make) -> None:
    async with make() as cluster:
        await cluster.create_pod((await cluster.read()).graph, 0)
        (before,) = (await cluster.read()).pods
        await cluster.set_role(before, Role.RELEASED)
        for act in (cluster.delete_pod(before), cluster.set_role(before, Role.HELD)):
            with pytest.raises(ClusterConflict):
                await act
        (pod,) = (await cluster.read()).pods
        assert (pod.live, pod.role) == (True, Role.RELEASED)


@asyncio_test
async def test_the_wish_is_overwritten_only_if_it_is_the_one_that_was_read(make: Make) -> None:
    async with make() as cluster:
        before = (await cluster.read()).graph
        await cluster.set_replicas(before, 4)
        now = (await cluster.read()).graph
        assert (now.replicas, now.generation) == (4, before.generation + 1)
        with pytest.raises(ClusterConflict):
            await cluster.set_replicas(before, 3)
        assert (await cluster.read()).graph.replicas == 4


@asyncio_test
async def test_a_report_is_read_back_and_is_no_new_wish(make: Make) -> None:
    async with make() as cluster:
        graph = (await cluster.read()).graph
        await cluster.write_report(graph, REPORT)
        now = (await cluster.read()).graph
        assert now.report == REPORT
        assert now.generation == graph.generation
        assert now.report.conditions[0].since_s == REPORT.conditions[0].since_s
        with pytest.raises(ClusterConflict):
            await cluster.write_report(graph, REPORT)


@asyncio_test
async def test_every_change_since_a_view_ends_the_wait(make: Make) -> None:
    async with make() as cluster:
        view = await cluster.read()
        waiting = asyncio.create_task(cluster.changed(view))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        await cluster.set_replicas(view.graph, 4)
        await asyncio.wait_for(waiting, 5)
        await asyncio.wait_for(cluster.changed(view), 5)
        later = await cluster.read()
        await cluster.create_pod(later.graph, 1)
        await asyncio.wait_for(cluster.changed(later), 5)
