"""A launch line of dynamo.vllm with --elastic-* flags, read by worker, agent and coordinator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.config_launch import (
    PROCESSES,
    engine_layer,
    launch_parser,
    read_launch_line,
    read_slot,
)
from dynamo_elastic.config_sections import VllmEngineConfig
from dynamo_elastic.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "d.yaml"
    settings = {
        "deployment": "a",
        "model": {"path": "m", "name": "m"},
        "engine": {"kind": "vllm", "args": "--seed 1"},
        "scale": {"initial_ranks": 1, "max_ranks": 2},
    }
    path.write_text(yaml.safe_dump(settings))
    return str(path)


def read(*argv: str, environ: Mapping[str, str] | None = None) -> tuple[DeploymentConfig, int]:
    parser = launch_parser("worker")
    config, own = read_launch_line(parser, argv, environ or {})
    return config, read_slot(own, config, environ or {})


def faults(*argv: str, environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        read(*argv, environ=environ)
    return caught.value.faults


def test_a_launch_line_of_dynamo_with_elastic_flags(file: str) -> None:
    line = ["--model", "/models/q", "--served-model-name=q", "--max-model-len", "4096"]
    line += ["--elastic-config", file, "--kv-transfer-config", '{"a": "b c"}']
    line += ["--elastic-slot=1", "--elastic-scale-max-ranks", "4", "--no-enable-prefix-caching"]
    config, slot = read(*line)
    assert slot == 1
    assert (str(config.model.path), config.model.name) == ("/models/q", "q")
    assert config.scale.max_ranks == 4
    assert isinstance(config.engine, VllmEngineConfig)
    assert list(config.engine.argv) == [
        *("--max-model-len", "4096", "--kv-transfer-config", '{"a": "b c"}'),
        "--no-enable-prefix-caching",
    ]


def test_variables_stand_in_for_every_flag(file: str) -> None:
    environ = {"DYN_ELASTIC_CONFIG": file, "DYN_ELASTIC_SLOT": "1", "DYN_ELASTIC_MODEL_NAME": "z"}
    config, slot = read(environ=environ)
    assert (slot, config.model.name) == (1, "z")
    config, slot = read("--elastic-slot", "0", "--served-model-name", "y", environ=environ)
    assert (slot, config.model.name) == (0, "y")


@pytest.mark.parametrize(
    "flags",
    [
        ["--headless"],
        ["--data-parallel-size", "2"],
        ["--data_parallel_rank=1"],
        ["--event-plane", "nats"],
        ["--data-parallel-rpc-port", "1"],
        ["--enable-elastic-ep"],
        ["--config", "x.yaml"],
        ["--request-plane", "nats"],
    ],
)
def test_what_elastic_operation_decides_is_refused_with_the_reason(
    file: str, flags: list[str]
) -> None:
    (fault,) = faults("--elastic-config", file, "--elastic-slot", "0", *flags)
    name = flags[0].partition("=")[0].replace("_", "-")
    assert fault.startswith(f"engine.args: {name}: ")
    assert f"(launch line: {flags[0]}" in fault


def test_short_forms_are_refused_too(file: str) -> None:
    (fault,) = faults("--elastic-config", file, "--elastic-slot", "0", "-dp", "2")
    assert fault.startswith("engine.args: --data-parallel-size: ")


def test_all_faults_of_a_launch_line_come_at_once(file: str) -> None:
    found = faults(
        *("--elastic-config", file, "--elastic-scale-max", "3", "--headless"),
        environ={"DYN_SNAPSHOT_CONTROL_DIR": "/x", "DYN_ELASTIC_NOPE_NOPE": "1"},
    )
    assert [f.partition(":")[0] for f in found] == [
        "DYN_SNAPSHOT_CONTROL_DIR",
        "DYN_ELASTIC_NOPE_NOPE",
        "--elastic-scale-max",
        "engine.args",
    ]


def test_the_reference_engine_takes_no_flags_of_vllm(file: str) -> None:
    (fault,) = faults(
        *("--elastic-config", file, "--elastic-engine-kind", "reference"), "--seed", "1"
    )
    assert fault == (
        "engine.args: does not go with the other settings of its section; remove it "
        "(launch line: --seed 1)"
    )


@pytest.mark.parametrize(
    ("text", "says"), [("2", "must be 0-1"), ("x", "got 'x'"), (None, "or set")]
)
def test_a_bad_slot(file: str, text: str | None, says: str) -> None:
    slot = ["--elastic-slot", text] if text is not None else []
    (fault,) = faults("--elastic-config", file, *slot)
    assert fault.startswith("--elastic-slot: ")
    assert says in fault


def test_no_file(file: str) -> None:
    (fault,) = faults()
    assert fault == "--elastic-config: is required; or set DYN_ELASTIC_CONFIG"


def containers(node: object) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        if "command" in node and "image" in node:
            yield node
        node = list(node.values())
    for inner in node if isinstance(node, list) else []:
        yield from containers(inner)


def test_launch_lines_of_the_kubernetes_manifests_are_read() -> None:
    read = []
    for path in sorted((Path(__file__).parents[2] / "deploy" / "kubernetes").glob("*.yaml")):
        for container in containers(list(yaml.safe_load_all(path.read_text()))):
            process = container["command"][-1].removeprefix("dynamo_elastic.")
            if process in PROCESSES:
                parser = launch_parser(process)
                own, unknown = parser.parse_known_args(container.get("args", []))
                assert unknown == []
                assert own.elastic_config == Path("/etc/dynamo-elastic/deployment.yaml")
                read.append(process)
    assert sorted(read) == sorted(PROCESSES)


def test_ours_need_one_value() -> None:
    with pytest.raises(ConfigError) as caught:
        engine_layer(["--served-model-name", "a", "b", "--model", "--x"])
    assert caught.value.faults == (
        "--served-model-name: needs one value, got 2",
        "--model: needs one value, got 0",
    )
