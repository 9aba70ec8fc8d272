"""What the manifests start exists, and takes the flags and settings that they give it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dynamo_elastic.config import SLOT_VARIABLE, engine_shape, parse_config
from dynamo_elastic.config_launch import launch_parser
from dynamo_elastic.kubernetes.main import controller_parser
from dynamo_elastic.kubernetes.pods import GRAPH, SLOT, labels
from dynamo_elastic.testing.graph_api import COMPONENT, manifest

FILES = ("control-plane.yaml", "agent.yaml", "graph.yaml", "planner.yaml")


MOUNTED = Path("/etc/dynamo-elastic/deployment.yaml")


def containers() -> Iterator[dict[str, Any]]:
    for name in FILES:
        for body in manifest(name):
            spec = body["spec"]
            if "components" in spec:
                spec = {"template": spec["components"][0]["podTemplate"]}
            if isinstance(spec, dict) and "template" in spec:
                yield from spec["template"]["spec"]["containers"]


def started(module: str) -> dict[str, Any]:
    (found,) = (c for c in containers() if c["command"][-1] == module)
    return found


def test_the_deployments_settings_are_valid() -> None:
    (body,) = manifest("config.yaml")
    config = parse_config(yaml.safe_load(body["data"]["deployment.yaml"]))
    launch = started("dynamo_elastic.coordinator")["args"]
    arguments = launch_parser("coordinator").parse_args(launch)
    assert arguments.elastic_config == MOUNTED
    shape = engine_shape(config, arguments.num_experts)
    assert shape.min_ranks <= config.scale.min_ranks
    (wish,) = (
        b["spec"]["components"][0] for b in manifest("graph.yaml") if "components" in b["spec"]
    )
    assert wish["replicas"] == config.scale.initial_ranks


def test_the_controller_looks_after_the_graph_that_its_role_names() -> None:
    arguments = controller_parser().parse_args(started("dynamo_elastic.kubernetes")["args"])
    graph = manifest("graph.yaml")[0]
    assert arguments.elastic_config == MOUNTED
    assert arguments.graph == graph["metadata"]["name"]
    assert arguments.component == graph["spec"]["components"][0]["name"] == COMPONENT
    named = {
        name
        for body in manifest("rbac.yaml")
        for rule in body.get("rules", ())
        for name in rule.get("resourceNames", ())
    }
    assert named == {arguments.graph, f"{arguments.graph}-{arguments.component}"}
    assert labels(arguments.graph, COMPONENT)[GRAPH] == arguments.graph


def test_a_worker_learns_its_slot_from_the_label_that_the_controller_writes() -> None:
    worker = started("dynamo_elastic.worker")
    (slot,) = (e for e in worker["env"] if e["name"] == SLOT_VARIABLE)
    assert slot["valueFrom"]["fieldRef"]["fieldPath"] == f"metadata.labels['{SLOT}']"
    arguments = launch_parser("worker").parse_args(worker["args"])
    assert (arguments.elastic_config, arguments.elastic_slot) == (MOUNTED, None)


@pytest.mark.parametrize("container", list(containers()), ids=lambda c: c["name"])
def test_every_program_exists(container: dict[str, Any]) -> None:
    python, flag, module = container["command"]
    assert (python, flag) == ("python", "-m")
    if module.startswith("dynamo_elastic"):
        assert importlib.util.find_spec(f"{module}.__main__")
    elif importlib.util.find_spec("dynamo"):  # its packages take seconds to import
        assert importlib.util.find_spec(module)
