"""The controller, as its own process and with its own role, on a real API server, a real etcd and
our coordinator; Dynamo's KubernetesConnector writes the wish. Kubelet and engines are stand-ins."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from dynamo_elastic.config import parse_config
from dynamo_elastic.coordinator.etcd import EtcdStore
from dynamo_elastic.coordinator.main_loop import Coordinator, Deployment
from dynamo_elastic.coordinator.records import Keys
from dynamo_elastic.coordinator.status import Status, read_status
from dynamo_elastic.dynamo.launch import (
    PlannerControl,
    PlannerRefused,
    planner_environment,
    planner_settings,
)
from dynamo_elastic.failpoints import KILL_ONCE_DIR
from dynamo_elastic.kubernetes.api import ApiCluster
from dynamo_elastic.kubernetes.base import ClusterConflict
from dynamo_elastic.kubernetes.pods import Served
from dynamo_elastic.testing.coordination import CONFIG, SHAPE
from dynamo_elastic.testing.deployments import asyncio_test
from dynamo_elastic.testing.etcd_process import free_port
from dynamo_elastic.testing.graph_api import (
    COMPONENT,
    CONTROLLER,
    GRAPH,
    NAMESPACE,
    PLANNER,
    Site,
    collection,
    graph_path,
    make_graph,
    manifest,
)
from dynamo_elastic.testing.kubelet import Api, Kubelet

pytestmark = pytest.mark.etcd

TIMEOUT_S = 40.0
SCALE = CONFIG.model_copy(update={"min_ranks": 2, "lease_ttl_s": 2})
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
JSON_PATCH = "application/json-patch+json"


@dataclass
class Stage:
    """One deployment that runs, and what a test asks of it."""

    site: Site
    api: Api
    store: EtcdStore
    keys: Keys
    kubelet: Kubelet
    config: Path
    failpoints: Path

    async def status(self) -> Status:
        return await read_status(self.store, self.keys)

    async def pods(self) -> dict[int, Any]:
        listed = (await self.api.must("GET", PODS))["items"]
        return {int(p["metadata"]["name"].rpartition("-")[2]): p for p in listed}

    async def graph(self) -> Any:
        return await self.api.must("GET", graph_path())

    async def wish(self, ranks: int) -> None:
        """Patch the wish as somebody with kubectl would."""
        patch = [{"op": "add", "path": "/spec/components/0/replicas", "value": ranks}]
        await self.api.must("PATCH", graph_path(), patch, kind=JSON_PATCH)

    async def until(self, what: Callable[[Status, dict[int, Any]], bool]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not what(await self.status(), await self.pods()):
                await asyncio.sleep(0.1)

    async def at_rest(self, ranks: int) -> None:
        """`ranks` ranks serve, each in a pod, there is no other pod, and the graph says so."""
        await self.until(
            lambda s, p: s.width == len(p) == ranks and not s.operation and set(p) == slots_of(s)
        )
        async with asyncio.timeout(TIMEOUT_S):
            while not settled(await self.graph(), ranks):
                await asyncio.sleep(0.1)


def slots_of(status: Status) -> set[int]:
    members = status.topology.worker_ids if status.topology else ()
    return {int(w.removeprefix("slot")) for w in members}


def settled(graph: Any, ranks: int) -> bool:
    status = graph.get("status") or {}
    conditions = {c["type"]: c["status"] for c in status.get("conditions", ())}
    counts = (status.get("components") or {}).get(COMPONENT, {})
    return (
        status.get("observedGeneration") == graph["metadata"]["generation"]
        and conditions == {"Ready": "True", "ElasticSettled": "True", "ElasticDegraded": "False"}
        and [counts[k] for k in ("replicas", "updatedReplicas", "availableReplicas")] == [ranks] * 3
        and graph["spec"]["components"][0]["replicas"] == ranks
    )


@asynccontextmanager
async def stage(site: Site, directory: Path, name: str) -> AsyncIterator[Stage]:
    """Coordinator, kubelet and graph, the wish for two ranks, and no controller yet."""
    store = EtcdStore([site.etcd.url])
    keys = Keys(name)
    settings = {
        "deployment": name,
        "model": {"path": "model", "name": "moe"},
        "engine": {"slots_per_rank": SHAPE.slots_per_rank},
        "scale": SCALE.model_dump(),
        "etcd": {"start": False, "endpoints": [site.etcd.url]},
        "run_dir": str(directory),
    }
    config, failpoints = directory / "deployment.yaml", directory / "failpoints"
    config.write_text(yaml.safe_dump(settings))
    failpoints.mkdir()
    async with site.api() as api:
        await make_graph(api, 2)
        kubelet = Kubelet(api, NAMESPACE, store, keys)
        coordinator = Coordinator(store, Deployment(keys, SCALE, SHAPE), "test")
        tasks = [asyncio.create_task(t) for t in (kubelet.run(), coordinator.run())]
        try:
            yield Stage(site, api, store, keys, kubelet, config, failpoints)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await store.close()


@asynccontextmanager
async def controller(
    at: Stage, *flags: str
) -> AsyncIterator[Callable[[], asyncio.subprocess.Process]]:
    """The controller's process with the rights of its role; started again whenever it is killed.
    Gives the process that runs now."""
    environment = os.environ | {
        "KUBECONFIG": str(at.site.kubeconfig(CONTROLLER)),
        KILL_ONCE_DIR: str(at.failpoints),
        "PYTHONSAFEPATH": "1",
    }
    argv = [sys.executable, "-m", "dynamo_elastic.kubernetes", f"--elastic-config={at.config}"]
    argv += [f"--num-experts={SHAPE.num_experts}", f"--namespace={NAMESPACE}"]
    argv += [f"--graph={GRAPH}", f"--component={COMPONENT}", *flags]
    running: list[asyncio.subprocess.Process] = []

    async def keep_alive() -> None:
        with at.config.with_suffix(".log").open("ab") as log:
            while True:
                child = await asyncio.create_subprocess_exec(
                    *argv, env=environment, stdout=log, stderr=log
                )
                running.append(child)
                code = await child.wait()
                assert code == -signal.SIGKILL, at.config.with_suffix(".log").read_text()[-2000:]

    task = asyncio.create_task(keep_alive())
    try:
        yield lambda: running[-1]
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if running and running[-1].returncode is None:
            running[-1].kill()
            await running[-1].wait()


STEPS = ("createpod", "request", "setrole", "deletepod")


@asyncio_test
async def test_two_four_two_with_the_controller_killed_after_each_act(
    kubernetes_site: Site, tmp_path: Path
) -> None:
    async with stage(kubernetes_site, tmp_path, "killed") as at, controller(at) as running:
        await at.at_rest(2)
        first = running()
        for step in STEPS:
            (at.failpoints / f"kubernetes.after_{step}").touch()
        await at.wish(4)
        await at.at_rest(4)
        await at.wish(2)
        await at.at_rest(2)
        assert not list(at.failpoints.iterdir()), "it was killed at every one of them"
        assert first.returncode == -signal.SIGKILL
        assert [busy for _, busy in at.kubelet.deleted] == [False, False], "no pod of a rank"


@pytest.mark.dynamo
@asyncio_test
async def test_dynamos_connector_writes_the_wish_and_sees_it_come_true(
    kubernetes_site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_PARENT_DGD_K8S_NAME", GRAPH)
    async with stage(kubernetes_site, tmp_path, "planner") as at, controller(at):
        await at.at_rest(2)
        kubeconfig = at.site.kubeconfig(PLANNER)
        connector = await asyncio.to_thread(_connector, kubeconfig)
        await _scale(at, connector, 4)
        counts = [await connector.get_actual_worker_counts(decode_component_name=COMPONENT)]
        await at.at_rest(4)
        counts.append(await connector.get_actual_worker_counts(decode_component_name=COMPONENT))
        assert counts == [(0, 2, False), (0, 4, True)]
        for ranks in (2, 4, 2):  # it changes its mind faster than anybody can scale
            await _scale(at, connector, ranks)
        await at.at_rest(2)
        assert connector.get_model_name(require_prefill=False) == "moe"
        assert all(not busy for _, busy in at.kubelet.deleted)


def _connector(kubeconfig: Path) -> Any:
    from dynamo.planner.connectors.kubernetes import KubernetesConnector
    from kubernetes import config

    config.load_kube_config(str(kubeconfig))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "load_kube_config", lambda: None)
        return KubernetesConnector("dynamo-moe", k8s_namespace=NAMESPACE)


async def _scale(at: Stage, connector: Any, ranks: int) -> None:
    """What the planner does at each tick until its wish is written: while the status lags behind
    the graph, the connector writes nothing."""
    from dynamo.planner.config.defaults import SubComponentType, TargetReplica

    target = TargetReplica(
        sub_component_type=SubComponentType.DECODE,
        component_name=COMPONENT,
        desired_replicas=ranks,
    )
    while (await at.graph())["spec"]["components"][0]["replicas"] != ranks:
        await connector.set_component_replicas([target], blocking=False)
        await asyncio.sleep(0.1)


@pytest.mark.dynamo
@asyncio_test
async def test_dynamos_planner_decides_and_sees_its_decision_come_true(
    kubernetes_site: Site, tmp_path: Path
) -> None:
    """The planner's own process, with the role of rbac.yaml; its limits are what changes."""
    async with stage(kubernetes_site, tmp_path, "decided") as at, controller(at):
        await at.at_rest(2)
        ours = yaml.safe_load(at.config.read_text()) | {"namespace": "dynamo-moe"}
        kubernetes = {"environment": "kubernetes", "namespace": "dynamo-moe"}
        ours["planner"] = {
            "control_port": free_port(),
            "interval_s": 1,
            "constrain": False,
            "settings": kubernetes,
        }
        config = parse_config(ours)
        argv = [sys.executable, "-c", IN_A_POD, f"--config={json.dumps(planner_settings(config))}"]
        environment = os.environ | planner_environment(config)
        environment["KUBECONFIG"] = str(at.site.kubeconfig(PLANNER))
        environment["DYN_PARENT_DGD_K8S_NAME"] = GRAPH
        with (tmp_path / "planner.log").open("ab") as log:
            planner = await asyncio.create_subprocess_exec(
                *argv, env=environment, stdout=log, stderr=log
            )
        try:
            for ranks in (4, 3):
                await _limit(config.planner.control_port, ranks, planner)
                await at.at_rest(ranks)
        finally:
            planner.kill()
            await planner.wait()


IN_A_POD = f"""
import dynamo.planner.connectors.clients.kubernetes_api as api, runpy
api.get_current_k8s_namespace = lambda: {NAMESPACE!r}  # a pod has a file that says so
runpy.run_module("dynamo.planner", run_name="__main__")
"""


async def _limit(port: int, ranks: int, planner: asyncio.subprocess.Process) -> None:
    """Tell the planner to have `ranks` replicas, once it listens."""
    async with asyncio.timeout(TIMEOUT_S):
        while planner.returncode is None:
            try:
                await PlannerControl(port).set_limits(min_endpoint=ranks, max_gpu_budget=ranks)
                return
            except PlannerRefused:
                await asyncio.sleep(0.2)
    raise AssertionError("the planner has ended")


@asyncio_test
async def test_pods_that_never_come_up_start_no_operation_and_are_removed(
    kubernetes_site: Site, tmp_path: Path
) -> None:
    async with stage(kubernetes_site, tmp_path, "broken") as at, controller(at, "--pod-timeout=3"):
        await at.at_rest(2)
        at.kubelet.broken |= {2, 3}
        before = (await at.status()).last
        await at.wish(4)
        await at.until(lambda s, p: len(p) == 4)
        await at.at_rest(2)
        after = (await at.status()).last
        assert before is not None
        assert after is not None
        assert after.operation_id == before.operation_id, "no operation was started"
        assert "ImagePullBackOff" in at.config.with_suffix(".log").read_text()


@asyncio_test
async def test_a_lost_pod_is_replaced_and_its_rank_comes_back(
    kubernetes_site: Site, tmp_path: Path
) -> None:
    async with stage(kubernetes_site, tmp_path, "lost") as at, controller(at):
        await at.at_rest(2)
        await at.wish(4)
        await at.at_rest(4)
        lost = (await at.pods())[3]["metadata"]["uid"]
        await at.kubelet.crash(3)
        await at.until(lambda s, p: lost not in {x["metadata"]["uid"] for x in p.values()})
        await at.at_rest(4)


@asyncio_test
async def test_others_write_to_the_same_objects_all_the_time(
    kubernetes_site: Site, tmp_path: Path
) -> None:
    """Every write of the controller is guarded by a version, and somebody keeps changing them."""
    async with stage(kubernetes_site, tmp_path, "busy") as at, controller(at):
        await at.at_rest(2)
        task = asyncio.create_task(_meddle(at))
        await at.wish(4)
        await at.until(lambda s, p: s.width == 4)
        await at.wish(2)
        await at.until(lambda s, p: s.width == len(p) == 2)
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await at.at_rest(2)


async def _meddle(at: Stage) -> None:
    number = 0
    while True:
        number += 1
        note = {"metadata": {"annotations": {"somebody": str(number)}}}
        for path in (graph_path(), *(f"{PODS}/{GRAPH}-{COMPONENT}-{slot}" for slot in range(4))):
            await at.api.call("PATCH", path, note, kind="application/merge-patch+json")
        await asyncio.sleep(0.02)


@asyncio_test
async def test_a_watch_from_before_the_history_is_answered_by_reading_anew(
    kubernetes_site: Site,
) -> None:
    async with kubernetes_site.api() as api, kubernetes_site.client(CONTROLLER) as client:
        await make_graph(api, 2)
        graphs = graph_path().removesuffix(f"/{GRAPH}")
        async with api.stream(f"{graphs}?watch=true&resourceVersion=1") as lines:
            event = json.loads(await anext(lines))
        assert (event["type"], event["object"]["code"]) == ("ERROR", 410)
        cluster = ApiCluster(client, NAMESPACE, GRAPH, COMPONENT, Served("dynamo-moe", "moe"))
        view = await cluster.read()
        old = replace(view, cursor=("1", view.cursor[1]))
        await asyncio.wait_for(cluster.changed(old), 5)


@asyncio_test
async def test_a_graph_without_the_component_is_said_to_have_none(kubernetes_site: Site) -> None:
    async with kubernetes_site.api() as api, kubernetes_site.client(CONTROLLER) as client:
        await make_graph(api, 2)
        cluster = ApiCluster(client, NAMESPACE, GRAPH, "prefill", Served("dynamo-moe", "moe"))
        with pytest.raises(ClusterConflict, match="no component prefill"):
            await cluster.read()


@asyncio_test
async def test_all_manifests_are_taken_by_the_api_server(kubernetes_site: Site) -> None:
    async with kubernetes_site.api() as api:
        for name in (
            "config.yaml",
            "control-plane.yaml",
            "agent.yaml",
            "graph.yaml",
            "planner.yaml",
        ):
            for body in manifest(name):
                if body["kind"] == "PodDisruptionBudget":
                    body["apiVersion"] = "policy/v1beta1"  # the server here is older than policy/v1
                status, answer = await api.call("POST", f"{collection(body)}?dryRun=All", body)
                assert status in (200, 201, 409), (name, answer)


@asyncio_test
async def test_the_controllers_role_allows_nothing_else(kubernetes_site: Site) -> None:
    async with kubernetes_site.api(CONTROLLER) as api, kubernetes_site.api() as admin:
        await make_graph(admin, 2)
        assert (await api.call("DELETE", graph_path()))[0] == 403
        assert (await api.call("GET", "/api/v1/nodes"))[0] == 403
        assert (await api.call("GET", "/api/v1/namespaces/default/pods"))[0] == 403
        assert (await api.call("GET", f"/api/v1/namespaces/{NAMESPACE}/secrets"))[0] == 403
