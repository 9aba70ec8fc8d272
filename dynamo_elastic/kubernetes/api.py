"""Cluster on the API server: the one importer of `kubernetes_asyncio`.

The library finds and renews credentials; objects stay JSON, so nothing depends on which version's
models it ships. A view is listed anew in each round and watches only say that there is a new one:
a watch that ended or was too old (410) is answered like an event.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from kubernetes_asyncio import config as kube_config
from kubernetes_asyncio.client.api_client import ApiClient
from kubernetes_asyncio.client.configuration import Configuration
from kubernetes_asyncio.config import ConfigException

from dynamo_elastic.errors import ConfigError
from dynamo_elastic.kubernetes.base import (
    ClusterConflict,
    ClusterError,
    ClusterRefused,
    ClusterUnavailable,
    ClusterView,
    GraphView,
    PodView,
    Report,
    Role,
)
from dynamo_elastic.kubernetes.pods import (
    GROUP,
    ROLE,
    VERSION,
    Served,
    graph_view,
    labels,
    pod_body,
    pod_view,
    status_body,
)

_CALL_TIMEOUT_S = 10.0
_WATCH_S = 240
_MERGE = "application/merge-patch+json"
_JSON_PATCH = "application/json-patch+json"
_CONFLICTS = (404, 409, 410)
_REFUSALS = (400, 401, 403, 422)


async def connect() -> ApiClient:
    """A client with the pod's service account or, outside a cluster, the kubeconfig. Raises
    ConfigError."""
    settings = Configuration()
    try:
        kube_config.load_incluster_config(client_configuration=settings)
    except ConfigException:
        path = os.environ.get("KUBECONFIG")
        try:
            await kube_config.load_kube_config(path, client_configuration=settings)
        except (ConfigException, OSError) as exc:
            fault = f"no cluster: {exc}; run in a pod with a service account, or set KUBECONFIG"
            raise ConfigError([fault]) from exc
    return ApiClient(settings)


class ApiCluster:
    """See Cluster. Owns `client`."""

    def __init__(
        self, client: ApiClient, namespace: str, graph: str, component: str, served: Served
    ) -> None:
        self._client = client
        self._component = component
        self._served = served
        self._pods = f"/api/v1/namespaces/{namespace}/pods"
        self._graphs = f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/dynamographdeployments"
        self._graph_name = graph
        self._graph = f"{self._graphs}/{graph}"
        ours = ",".join(f"{k}={v}" for k, v in labels(graph, component).items())
        self._select = {
            self._graphs: {"fieldSelector": f"metadata.name={graph}"},
            self._pods: {"labelSelector": ours},
        }

    async def read(self) -> ClusterView:
        graphs = await self._call("GET", self._graphs, query=self._select[self._graphs])
        pods = await self._call("GET", self._pods, query=self._select[self._pods])
        found = graph_view(graphs["items"][0], self._component) if graphs["items"] else None
        if found is None:
            raise ClusterConflict(
                f"{self._graph_name}: no such graph, or no component {self._component} in it"
            )
        views = [v for v in map(pod_view, pods["items"]) if v is not None]
        cursor = (graphs["metadata"]["resourceVersion"], pods["metadata"]["resourceVersion"])
        return ClusterView(found, tuple(sorted(views, key=lambda p: p.slot)), cursor)

    async def changed(self, since: ClusterView) -> None:
        paths = (self._graphs, self._pods)
        watches = [
            asyncio.create_task(self._event(path, version))
            for path, version in zip(paths, since.cursor, strict=True)
        ]
        try:
            done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in watches:
                task.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    async def create_pod(self, graph: GraphView, slot: int) -> None:
        await self._call("POST", self._pods, body=pod_body(graph, self._component, slot))

    async def set_role(self, pod: PodView, role: Role) -> None:
        metadata = {"resourceVersion": pod.version, "uid": pod.uid, "labels": {ROLE: role.value}}
        await self._call("PATCH", f"{self._pods}/{pod.name}", body={"metadata": metadata})

    async def delete_pod(self, pod: PodView) -> None:
        only_if = {"uid": pod.uid, "resourceVersion": pod.version}
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": only_if}
        await self._call("DELETE", f"{self._pods}/{pod.name}", body=body)

    async def set_replicas(self, graph: GraphView, replicas: int) -> None:
        at = f"/spec/components/{graph.index}"
        patch = [
            {"op": "test", "path": f"{at}/name", "value": self._component},
            {"op": "replace", "path": "/metadata/resourceVersion", "value": graph.version},
            {"op": "add", "path": f"{at}/replicas", "value": replicas},
        ]
        await self._call("PATCH", self._graph, body=patch, content_type=_JSON_PATCH)

    async def write_report(self, graph: GraphView, report: Report) -> None:
        body = {
            "metadata": {"resourceVersion": graph.version},
            "status": status_body(report, self._component, self._served, graph),
        }
        await self._call("PATCH", f"{self._graph}/status", body=body)

    async def close(self) -> None:
        await self._client.close()

    async def _event(self, path: str, version: str) -> None:
        """Return at the first event after `version`, or when the watch has ended."""
        query = self._select[path] | {
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(_WATCH_S),
        }
        try:
            async with self._send(
                "GET", path, query, timeout_s=_WATCH_S + _CALL_TIMEOUT_S
            ) as answer:
                async for line in answer.content:
                    if json.loads(line).get("type") != "BOOKMARK":
                        return
        except ClusterConflict:
            return  # too old: what there is now has to be read

    async def _call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "",
    ) -> Any:
        """The answer's JSON. Raises ClusterError."""
        kind = content_type or (_MERGE if method == "PATCH" else "application/json")
        async with self._send(method, path, query or {}, body, kind) as answer:
            return json.loads(await answer.text())

    @asynccontextmanager
    async def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Any = None,
        content_type: str = "application/json",
        *,
        timeout_s: float = _CALL_TIMEOUT_S,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer, if it is a success, its body still to be read. Raises ClusterError, also for
        what goes wrong while it is read."""
        try:
            answer = await self._client.call_api(
                path,
                method,
                query_params=list(query.items()),
                header_params={"Accept": "application/json", "Content-Type": content_type},
                body=body,
                auth_settings=["BearerToken"],
                _preload_content=False,
                _return_http_data_only=True,
                _request_timeout=aiohttp.ClientTimeout(total=timeout_s, connect=_CALL_TIMEOUT_S),
            )
            async with answer:
                if not answer.ok:
                    raise _error(answer.status, await answer.text())
                yield answer
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as exc:
            raise ClusterUnavailable(f"{method} {path}: {exc!r}") from exc


def _error(status: int, body: str) -> ClusterError:
    """ClusterError of an answer that is not a success, with the server's own words."""
    try:
        message = str(json.loads(body).get("message") or body)
    except (ValueError, AttributeError):
        message = str(body)
    if status in _CONFLICTS:
        return ClusterConflict(message)
    if status in _REFUSALS:
        return ClusterRefused(message)
    return ClusterUnavailable(f"{status}: {message}")
