"""A Cluster in memory: objects have versions, writes are guarded, pods are deleted in two steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from dynamo_elastic.kubernetes.base import (
    ClusterConflict,
    ClusterView,
    GraphView,
    PodView,
    Report,
    Role,
)
from dynamo_elastic.kubernetes.pods import pod_name

COMPONENT = "decode"


class FakeCluster:
    """The API server's part, and what a test does in place of the kubelet and of people."""

    def __init__(self, replicas: int, *, now: Callable[[], float] = lambda: 0.0) -> None:
        self.graph = GraphView("moe", "graph-uid", "1", 1, replicas)
        self.pods: dict[str, PodView] = {}
        self._now = now
        self._version = 1
        self._changed = asyncio.Event()

    # What the controller calls.

    async def read(self) -> ClusterView:
        return self.view()

    def view(self) -> ClusterView:
        pods = sorted(self.pods.values(), key=lambda p: p.slot)
        return ClusterView(self.graph, tuple(pods), (str(self._version), ""))

    async def changed(self, since: ClusterView) -> None:
        while since.cursor[0] == str(self._version):
            self._changed.clear()
            await self._changed.wait()

    async def create_pod(self, graph: GraphView, slot: int) -> None:
        self.create(slot)

    def create(self, slot: int) -> None:
        name = pod_name(self.graph.name, COMPONENT, slot)
        if name in self.pods:
            raise ClusterConflict(f"pods {name} already exists")
        version = self._next()
        self.pods[name] = PodView(name, f"uid-{version}", version, slot, since_s=self._now())

    async def set_role(self, pod: PodView, role: Role) -> None:
        self._current(pod)
        self.update(pod, role=role)

    async def delete_pod(self, pod: PodView) -> None:
        self._current(pod)
        self.update(pod, deleting=True)

    async def set_replicas(self, graph: GraphView, replicas: int) -> None:
        self._current_graph(graph)
        self.wish(replicas)

    async def write_report(self, graph: GraphView, report: Report) -> None:
        self._current_graph(graph)
        self.graph = replace(self.graph, report=report, version=self._next())

    async def close(self) -> None:
        return

    # What a test does.

    def wish(self, replicas: int) -> None:
        """Somebody patches the graph's replicas."""
        if replicas != self.graph.replicas:
            self.graph = replace(
                self.graph,
                replicas=replicas,
                generation=self.graph.generation + 1,
                version=self._next(),
            )

    def update(
        self,
        pod: PodView,
        *,
        role: Role | None = None,
        deleting: bool | None = None,
        failed: bool | None = None,
    ) -> None:
        """The pod as it is now, changed."""
        known = self.pods[pod.name]
        self.pods[pod.name] = replace(
            known,
            version=self._next(),
            role=known.role if role is None else role,
            deleting=known.deleting if deleting is None else deleting,
            failed=known.failed if failed is None else failed,
        )

    def remove(self, name: str) -> None:
        """The kubelet has ended the pod's containers, and the pod is gone."""
        del self.pods[name]
        self._next()

    def _current(self, pod: PodView) -> None:
        known = self.pods.get(pod.name)
        if known is None or (known.uid, known.version) != (pod.uid, pod.version):
            raise ClusterConflict(f"pod {pod.name} is not what it was")

    def _current_graph(self, graph: GraphView) -> None:
        if self.graph.version != graph.version:
            raise ClusterConflict(f"graph {graph.name} is not what it was")

    def _next(self) -> str:
        self._version += 1
        self._changed.set()
        return str(self._version)
