"""The Helm chart, by Helm's own engine: it lints, gives the objects that deploy/kubernetes has, and
with other values what the schemas of Kubernetes and our own programs take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dynamo_elastic.config import parse_config
from dynamo_elastic.config_launch import launch_parser
from dynamo_elastic.kubernetes.main import controller_parser
from dynamo_elastic.snapshot.capabilities import NEEDED, USEFUL

helm = pytest.importorskip("helm_python", reason="needs helm-python-sdk, Helm as a library")
kubernetes_validate = pytest.importorskip("kubernetes_validate")

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm" / "dynamo-elastic"
EXAMPLES = sorted((DEPLOY / "helm" / "examples").glob("*.yaml"))
KUBERNETES = ("1.28", "1.37")
OURS = "nvidia.com/"
Body = dict[str, Any]


def objects(values: Body) -> dict[tuple[str, str], Body]:
    """What `helm template` gives with `values`, by kind and name."""
    with helm.Chart.load(str(CHART)) as chart:
        files = chart.render(values, name="elastic", namespace="dynamo")
    found: dict[tuple[str, str], Body] = {}
    for name, text in files.items():
        for body in yaml.safe_load_all(text) if name.endswith(".yaml") else ():
            if body:
                key = (body["kind"], body["metadata"]["name"])
                assert key not in found, f"{key} is there twice"
                found[key] = body
    return found


def example(path: Path) -> Body:
    values: Body = yaml.safe_load(path.read_text())
    return values


def settings_of(rendered: dict[tuple[str, str], Body]) -> Body:
    text = rendered["ConfigMap", "dynamo-elastic"]["data"]["deployment.yaml"]
    settings: Body = yaml.safe_load(text)
    return settings


def pod_specs(rendered: dict[tuple[str, str], Body]) -> Iterator[Body]:
    for body in rendered.values():
        spec = body.get("spec", {})
        for component in spec.get("components", ()):
            yield component["podTemplate"]["spec"]
        if "template" in spec:
            yield spec["template"]["spec"]


def test_the_chart_lints() -> None:
    found = helm.lint(str(CHART))
    assert found["errors"] == []
    worse = [m for m in found["messages"] if m["severity"] > 1]
    assert worse == [], "more than a remark"


def test_as_it_is_it_gives_what_the_manifests_have() -> None:
    """Those are what the tests put on a real API server, and run the controller with."""
    rendered = objects({})
    plain: dict[tuple[str, str], Body] = {}
    for path in (DEPLOY / "kubernetes").glob("*.yaml"):
        for body in yaml.safe_load_all(path.read_text()):
            plain[body["kind"], body["metadata"]["name"]] = body
    for both in (rendered, plain):
        for body in both.values():
            if "data" in body:
                body["data"] = {k: yaml.safe_load(v) for k, v in body["data"].items()}
            for spec in pod_specs({("", ""): body}):
                for container in spec["containers"]:
                    container["args"] = [_read(a) for a in container["args"]]
    assert rendered.keys() == plain.keys()
    for key, body in plain.items():
        assert rendered[key] == body, key


def _read(argument: str) -> Any:
    """JSON by what it says, not by how it is laid out."""
    return yaml.safe_load(argument) if argument.lstrip().startswith("{") else argument


@pytest.mark.parametrize("path", [None, *EXAMPLES], ids=lambda p: p.stem if p else "defaults")
def test_kubernetes_and_our_programs_take_it(path: Path | None) -> None:
    rendered = objects(example(path) if path else {})
    for body in rendered.values():
        if not body["apiVersion"].startswith(OURS):
            for version in KUBERNETES:
                kubernetes_validate.validate(body, version, strict=True)
    for pod in pod_specs(rendered):
        template = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod}
        kubernetes_validate.validate(template, KUBERNETES[-1], strict=True)
    config = parse_config(settings_of(rendered))
    for pod in pod_specs(rendered):
        (container,) = pod["containers"]
        module = container["command"][-1].removeprefix("dynamo_elastic.")
        if module == "kubernetes":
            arguments = controller_parser().parse_args(container["args"])
            graph = rendered.get(("DynamoGraphDeployment", arguments.graph))
            assert graph is None or graph["spec"]["components"][0]["name"] == arguments.component
        elif module in ("agent", "coordinator", "worker"):
            _, unknown = launch_parser(module).parse_known_args(container["args"])
            assert not unknown or config.engine.kind == "vllm"


def test_secrets_are_mounted_where_the_settings_look_and_only_where_they_are_needed() -> None:
    values = example(DEPLOY / "helm" / "examples" / "tls.yaml")
    rendered = objects(values)
    etcd = settings_of(rendered)["etcd"]
    assert parse_config(settings_of(rendered)).etcd.encrypted
    users = {}
    for pod in pod_specs(rendered):
        (container,) = pod["containers"]
        by_variable = {
            e["valueFrom"]["secretKeyRef"]["name"]
            for e in container.get("env", ())
            if "secretKeyRef" in e.get("valueFrom", {})
        }
        mounted = {v["secret"]["secretName"] for v in pod.get("volumes", ()) if "secret" in v}
        users[container["name"]] = by_variable | mounted
        for volume in pod.get("volumes", ()):
            if "secret" in volume:
                assert volume["secret"]["defaultMode"] == 0o400
                (mount,) = (m for m in container["volumeMounts"] if m["name"] == volume["name"])
                for setting in ("ca_file", "cert_file", "key_file"):
                    assert Path(etcd[setting]).parent == Path(mount["mountPath"])
    assert users == {
        "agent": set(),  # it does not use etcd
        "coordinator": {"etcd-coordinator"},
        "controller": {"etcd-coordinator"},
        "main": {"etcd-worker"},
        "planner": {"etcd-dynamo"},
        "frontend": {"etcd-dynamo"},
    }


def test_the_agent_has_the_capabilities_that_it_looks_for_and_no_others() -> None:
    body = objects({})["DaemonSet", "dynamo-elastic-agent"]
    (container,) = body["spec"]["template"]["spec"]["containers"]
    given = container["securityContext"]["capabilities"]
    assert given["drop"] == ["ALL"]
    assert set(given["add"]) == {c.name for c in (*NEEDED, *USEFUL)}


def test_what_is_yours_is_not_made() -> None:
    rendered = objects(example(DEPLOY / "helm" / "examples" / "own-graph.yaml"))
    kinds = {kind for kind, _ in rendered}
    assert not kinds & {"DynamoGraphDeployment", "Service", "PodDisruptionBudget"}
    named = rendered["Role", "dynamo-elastic"]["rules"][0]["resourceNames"]
    assert named == ["prod"]


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"deployment": {"etcd": {"start": True}}}, "start"),
        ({"etcd": {"secret": "x"}}, "secret"),
        ({"numExperts": "many"}, "numExperts"),
    ],
)
def test_values_that_are_not_right_are_refused_by_name(values: Body, field: str) -> None:
    with pytest.raises(helm.HelmError, match=field), helm.Chart.load(str(CHART)) as chart:
        chart.validate_schema(values)
