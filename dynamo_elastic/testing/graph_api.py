"""Dynamo's two kinds of objects on an API server, as far as the planner and we use them, and a
namespace with the manifests of deploy/kubernetes.

These definitions are ours, not NVIDIA's: any field is kept, none is checked.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from dynamo_elastic.kubernetes.api import connect
from dynamo_elastic.kubernetes.pods import API_VERSION, GROUP, KIND, VERSION
from dynamo_elastic.testing.apiserver import ApiServer, apiserver
from dynamo_elastic.testing.etcd_process import EtcdProcess, etcd_process
from dynamo_elastic.testing.kubelet import Api

MANIFESTS = Path(__file__).parents[2] / "deploy" / "kubernetes"
NAMESPACE = "dynamo"
GRAPH, COMPONENT = "moe", "decode"
CONTROLLER = f"system:serviceaccount:{NAMESPACE}:dynamo-elastic"
PLANNER = f"system:serviceaccount:{NAMESPACE}:dynamo-planner"

_SCALE = {"specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas"}
_KINDS: dict[str, dict[str, Any]] = {
    KIND: {"status": {}},
    "DynamoGraphDeploymentScalingAdapter": {"status": {}, "scale": _SCALE},
}
_COLLECTIONS = {
    "ServiceAccount": "api/v1/{ns}/serviceaccounts",
    "ConfigMap": "api/v1/{ns}/configmaps",
    "Service": "api/v1/{ns}/services",
    "Role": "apis/rbac.authorization.k8s.io/v1/{ns}/roles",
    "RoleBinding": "apis/rbac.authorization.k8s.io/v1/{ns}/rolebindings",
    "Deployment": "apis/apps/v1/{ns}/deployments",
    "DaemonSet": "apis/apps/v1/{ns}/daemonsets",
    "PodDisruptionBudget": "apis/policy/v1beta1/{ns}/poddisruptionbudgets",
    KIND: f"apis/{API_VERSION}/{{ns}}/dynamographdeployments",
}


@dataclass(frozen=True, slots=True)
class Site:
    """An API server with both kinds, and the etcd that it and our coordinator keep things in."""

    server: ApiServer
    etcd: EtcdProcess
    directory: Path

    @asynccontextmanager
    async def api(self, user: str = "admin") -> AsyncIterator[Api]:
        """Plain calls as `user`."""
        headers = {"Authorization": f"Bearer {self.server.tokens[user]}"}
        tls = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=str(self.server.ca)))
        async with aiohttp.ClientSession(headers=headers, connector=tls) as http:
            yield Api(http, self.server.url)

    def kubeconfig(self, user: str) -> Path:
        path = self.directory / f"kubeconfig-{user.rpartition(':')[2]}"
        return self.server.kubeconfig(user, path)

    @asynccontextmanager
    async def client(self, user: str) -> AsyncIterator[Any]:
        """The adapter's client, with the rights of `user`."""
        with _environment("KUBECONFIG", str(self.kubeconfig(user))):
            client = await connect()
        try:
            yield client
        finally:
            await client.close()


@contextmanager
def installed_site(directory: Path) -> Iterator[Site]:
    """Everything running, with both kinds, the namespace, and the roles of rbac.yaml."""
    with (
        etcd_process(directory / "etcd") as etcd,
        apiserver(directory / "apiserver", etcd, (CONTROLLER, PLANNER)) as server,
    ):
        site = Site(server, etcd, directory)
        asyncio.run(_install(site))
        yield site


async def _install(site: Site) -> None:
    async with site.api() as api:
        await _install_as_admin(api)


async def _install_as_admin(api: Api) -> None:
    for kind, subresources in _KINDS.items():
        definition = _definition(kind, subresources)
        path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        await api.must("POST", path, definition)
        served = f"/apis/{API_VERSION}/namespaces/{NAMESPACE}/{kind.lower()}s"
        while (await api.call("GET", served))[0] != 200:
            await asyncio.sleep(0.05)
    await api.must("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    for body in manifest("rbac.yaml"):
        await api.must("POST", collection(body), body)


def manifest(name: str) -> list[dict[str, Any]]:
    """The objects in one file of deploy/kubernetes."""
    return [d for d in yaml.safe_load_all((MANIFESTS / name).read_text()) if d]


def collection(body: dict[str, Any]) -> str:
    """Where an object of its kind is created."""
    return "/" + _COLLECTIONS[body["kind"]].format(ns=f"namespaces/{NAMESPACE}")


def graph_path() -> str:
    return f"/{_COLLECTIONS[KIND].format(ns=f'namespaces/{NAMESPACE}')}/{GRAPH}"


async def make_graph(api: Api, replicas: int) -> None:
    """The graph of deploy/kubernetes/graph.yaml with another wish; one there before goes, and every
    pod with it, as the garbage collector would have it."""
    await api.call("DELETE", graph_path())
    pods = f"/api/v1/namespaces/{NAMESPACE}/pods"
    for pod in (await api.must("GET", pods))["items"]:
        await api.call("DELETE", f"{pods}/{pod['metadata']['name']}", {"gracePeriodSeconds": 0})
    body = manifest("graph.yaml")[0]
    body["spec"]["components"][0]["replicas"] = replicas
    await api.must("POST", collection(body), body)


def _definition(kind: str, subresources: dict[str, Any]) -> dict[str, Any]:
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    schema = {"type": "object", "properties": {"spec": anything, "status": anything}}
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "subresources": subresources,
    }
    names = {"kind": kind, "plural": f"{kind.lower()}s", "singular": kind.lower()}
    return {
        "metadata": {"name": f"{names['plural']}.{GROUP}"},
        "spec": {"group": GROUP, "scope": "Namespaced", "names": names, "versions": [version]},
    }


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
