"""The start-up check names a hook that is missing; settings name what is wrong."""

from __future__ import annotations

import types
from datetime import timedelta
from typing import Any

import pytest

from dynamo_elastic.engine.vllm.elastic.flags import EXECUTOR, WORKER, elastic_flags
from dynamo_elastic.engine.vllm.elastic.graphs import CapturedGraphs
from dynamo_elastic.engine.vllm.elastic.settings import ElasticSettings
from dynamo_elastic.engine.vllm.v0_33.hooks import (
    HOOKS,
    ROUTE_HOOKS,
    check_hooks,
    missing_hooks,
)
from dynamo_elastic.errors import ConfigError


def whole_vllm() -> dict[str, Any]:
    """Modules that have all hooks, and nothing else."""
    modules: dict[str, Any] = {}
    for hook in HOOKS + ROUTE_HOOKS:
        place: Any = modules.setdefault(hook.module, types.SimpleNamespace())
        *owners, name = hook.name.split(".")
        for owner in owners:
            if not hasattr(place, owner):
                setattr(place, owner, type(owner, (), {}))
            place = getattr(place, owner)
        if not isinstance(getattr(place, name, None), type):
            setattr(place, name, a_call(hook.parameters) if hook.parameters else type(name, (), {}))
    return modules


def a_call(parameters: tuple[str, ...]) -> Any:
    made: dict[str, Any] = {}
    exec(f"def call({', '.join(parameters)}): pass", made)
    return made["call"]


def test_a_release_that_has_all_hooks_passes() -> None:
    check_hooks("0.33.0", whole_vllm().__getitem__)


def test_another_release_is_refused_before_anything_is_imported() -> None:
    with pytest.raises(ConfigError, match=r"0\.34\.1 is not 0\.33"):
        check_hooks("0.34.1", lambda name: pytest.fail(f"imported {name}"))


@pytest.mark.parametrize(
    "hook", [h for h in HOOKS if "." in h.name and not h.name.endswith("__")], ids=lambda h: h.name
)
def test_each_missing_hook_is_named(hook: Any) -> None:
    modules = whole_vllm()
    owner, name = hook.name.split(".")
    delattr(getattr(modules[hook.module], owner), name)
    assert missing_hooks(modules.__getitem__) == [f"{hook.module} has no {hook.name}"]


def test_a_parameter_that_was_renamed_is_named() -> None:
    modules = whole_vllm()
    module = modules["vllm.v1.engine.core"]
    module.DPEngineCoreProc.reinitialize_distributed = a_call(("self", "request"))
    (fault,) = missing_hooks(modules.__getitem__)
    assert fault.endswith("DPEngineCoreProc.reinitialize_distributed takes no reconfig_request")


def test_a_module_that_is_gone_is_named() -> None:
    def load(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    assert all("can't be imported" in fault for fault in missing_hooks(load))


def test_flags_name_classes_by_their_modules() -> None:
    assert elastic_flags() == ["--distributed-executor-backend", EXECUTOR, "--worker-cls", WORKER]


def test_settings_come_from_the_environment() -> None:
    given = {"DYNAMO_ELASTIC_VLLM_PREPARE_TIMEOUT_S": "30", "PATH": "/bin"}
    settings = ElasticSettings.from_environment(given)
    assert settings == ElasticSettings(prepare_timeout_s=30.0)
    assert settings.step_timeout(None) == timedelta(minutes=1)
    assert settings.step_timeout(timedelta(seconds=5)) == timedelta(seconds=5), "vLLM's own flag"
    count = ElasticSettings.from_environment({"DYNAMO_ELASTIC_VLLM_REBALANCE_AFTER_STEPS": "7"})
    assert count.rebalance_after_steps == 7


def test_all_wrong_settings_are_named() -> None:
    given = {"DYNAMO_ELASTIC_VLLM_POLL_S": "0", "DYNAMO_ELASTIC_VLLM_POLLS": "1"}
    with pytest.raises(ConfigError) as raised:
        ElasticSettings.from_environment(given)
    assert "POLL_S: '0' is no number above 0" in str(raised.value)
    assert "POLLS: unknown; there are" in str(raised.value)


class PlainGraph:
    """torch's class, as far as its captures go."""

    def __new__(cls, keep_graph: bool = False) -> PlainGraph:
        made = super().__new__(cls)
        made.keep = keep_graph
        return made

    def __init__(self, keep_graph: bool = False) -> None:
        self.keep = self.keep and keep_graph
        self.steps: list[str] = []

    def capture_end(self) -> None:
        self.steps.append("captured")

    def instantiate(self) -> None:
        self.steps.append("instantiated")

    keep: bool


def test_graphs_keep_their_templates_and_are_ready_when_captured() -> None:
    cuda = types.SimpleNamespace(CUDAGraph=PlainGraph)
    first, second = CapturedGraphs(), CapturedGraphs()
    first.install(cuda)
    second.install(cuda)
    graph = cuda.CUDAGraph()
    cuda.CUDAGraph(keep_graph=False)
    assert graph.keep
    assert first.alive == []
    graph.capture_end()
    assert graph.steps == ["captured", "instantiated"]
    assert first.alive == second.alive == [graph]
    del graph
    assert first.alive == []
