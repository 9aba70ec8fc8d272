"""Settings of the vLLM engine: kinds, flags that are refused, command line, replicas' plans."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest

from dynamo_elastic.agent.boot import Boots
from dynamo_elastic.config import engine_shape, load_config, parse_config
from dynamo_elastic.config_sections import EngineConfig, VllmEngineConfig, VllmGroupConfig
from dynamo_elastic.dynamo.environment import engine_dynamo_environment
from dynamo_elastic.engine.launch import (
    VLLM,
    VLLM_ELASTIC,
    engine_argv,
    founder_boot,
    image_inputs,
    is_tree,
    shared_experts,
)
from dynamo_elastic.engine.vllm.elastic.flags import FOUNDS_VARIABLE
from dynamo_elastic.engine.vllm.versions import VLLM as VLLM_PACKAGE
from dynamo_elastic.engine.vllm.versions import check_elastic
from dynamo_elastic.errors import ConfigError
from dynamo_elastic.phases import Kind
from dynamo_elastic.topology import PlanInput, Topology, legal_width, move_rounds, plan_scale
from dynamo_elastic.types import Epoch, WorkerId
from dynamo_elastic.vllm_flags import OWN, OWN_OF_GROUP

ROOT = Path(__file__).parents[2]


def settings(engine: dict[str, Any] | None = None, model: str = "m") -> dict[str, Any]:
    return {
        "deployment": "x",
        "model": {"path": model, "name": "tiny"},
        "scale": {"initial_ranks": 1, "max_ranks": 3},
        **({} if engine is None else {"engine": engine}),
    }


def faults(engine: dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as refused:
        parse_config(settings(engine))
    return tuple(refused.value.faults)


def test_without_a_kind_it_is_the_reference_engine() -> None:
    assert isinstance(parse_config(settings()).engine, EngineConfig)
    assert isinstance(parse_config(settings({"slots_per_rank": 4})).engine, EngineConfig)
    assert isinstance(parse_config(settings({"kind": "vllm"})).engine, VllmEngineConfig)


def test_an_unknown_kind_is_named() -> None:
    (fault,) = faults({"kind": "sglang"})
    assert "kind must be 'reference', 'vllm' or 'vllm-elastic'" in fault


@pytest.mark.parametrize("flag", OWN)
@pytest.mark.parametrize("form", ["{flag}", "{flag} 1", "{flag}=1"])
def test_flags_that_we_give_ourselves_are_refused_with_the_remedy(flag: str, form: str) -> None:
    (fault,) = faults({"kind": "vllm", "args": f"--dtype float32 {form.format(flag=flag)}"})
    assert fault.startswith(f"engine.args: {flag}: ")
    assert OWN[flag] in fault


def test_vllm_takes_underscores_in_flags_and_so_do_we() -> None:
    assert faults({"kind": "vllm", "args": "--served_model_name x"})[0].startswith(
        "engine.args: --served-model-name: set model.name"
    )


def test_quotes_that_do_not_end_are_a_fault() -> None:
    (fault,) = faults({"kind": "vllm", "args": '--kv-events-config "{'})
    assert fault.startswith("engine.args: ")
    assert "correct the quotes" in fault


def test_settings_of_the_other_kind_are_refused() -> None:
    assert faults({"kind": "vllm", "slots_per_rank": 4})[0].startswith("engine.slots_per_rank: ")
    assert faults({"args": "--dtype float32"})[0].startswith("engine.args: ")


def test_the_command_line_is_that_of_dynamos_worker_after_the_control_directory() -> None:
    engine = {"kind": "vllm", "args": "--dtype float32 --kv-events-config '{\"a\": 1}'"}
    config = parse_config(settings(engine, "/models/moe"))
    argv = engine_argv(config, 2)
    assert argv[:4] == [sys.executable, "-m", VLLM, str(config.control_dir(2))]
    assert argv[4:] == [
        *("--model", "/models/moe", "--served-model-name", "tiny"),
        *("--dtype", "float32", "--kv-events-config", '{"a": 1}'),
    ]
    own = parse_config(settings({"kind": "vllm", "python": "venv/bin/python"}))
    assert engine_argv(own, 0)[0] == str(Path("venv/bin/python").absolute())


def test_only_an_engine_that_is_dynamos_worker_gets_dynamos_environment() -> None:
    vllm, reference = parse_config(settings({"kind": "vllm"})), parse_config(settings())
    given = engine_dynamo_environment(vllm, 1)
    assert given["DYN_DISCOVERY_BACKEND"] == "etcd"
    assert "DYN_SYSTEM_PORT" not in given
    assert engine_dynamo_environment(reference, 1) == {}
    assert (is_tree(vllm), is_tree(reference)) == (True, False)


def test_shells_and_engines_have_system_ports_of_their_own() -> None:
    raw = settings({"kind": "vllm"}) | {"workers": {"system_port": 9000}}
    config = parse_config(raw)
    shells = [config.system_port(slot) for slot in range(3)]
    engines = [int(engine_dynamo_environment(config, n)["DYN_SYSTEM_PORT"]) for n in range(3)]
    assert shells + engines == [9000, 9001, 9002, 9003, 9004, 9005]
    with pytest.raises(ConfigError, match="32768 of the last slot is above 32767"):
        parse_config(raw | {"workers": {"system_port": 32763}})
    with pytest.raises(ConfigError, match=r"engine 2\): port 9005 is also|port 9005 is also"):
        parse_config(raw | {"frontend": {"port": 9005}})


def test_an_image_depends_on_releases_and_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"1")
    config = parse_config(settings({"kind": "vllm"}, str(tmp_path)))
    before = image_inputs(config)
    assert "ai-dynamo 1.6.1" in before
    assert image_inputs(config) == before
    (tmp_path / "model.safetensors").write_bytes(b"12")
    assert image_inputs(config) != before
    assert image_inputs(parse_config(settings(model=str(tmp_path)))) == ""


def test_the_example_is_a_deployment_of_replicas() -> None:
    config = load_config(ROOT / "examples" / "vllm-cpu.yaml", {})
    assert isinstance(config.engine, VllmEngineConfig)
    assert "--enforce-eager" in config.engine.argv


def test_replicas_share_no_experts_so_every_width_is_legal_and_nothing_moves() -> None:
    config = parse_config(settings({"kind": "vllm"}))
    shape = engine_shape(config, 8)
    assert [legal_width(n, shape, config.scale.limits, 3) for n in (0, 1, 2, 3, 4)] == [
        1,
        1,
        2,
        3,
        3,
    ]
    names = [WorkerId(f"slot{n}") for n in range(3)]
    boot = plan_scale(PlanInput(Topology(Epoch(0)), 1, Epoch(1), shape, names))
    up = plan_scale(PlanInput(boot.after, 3, Epoch(2), shape, names))
    down = plan_scale(PlanInput(up.settled, 1, Epoch(3), shape, names))
    assert [p.kind for p in (boot, up, down)] == [Kind.BOOT, Kind.UP, Kind.DOWN]
    assert up.joiners == ("slot1", "slot2")
    assert down.leavers == ("slot1", "slot2")
    for plan in (up, down):
        assert move_rounds(plan.after, plan.settled) == ()
        assert all(member.experts == () for member in plan.settled.members)
    lost = PlanInput(up.settled, 2, Epoch(3), shape, names, frozenset({WorkerId("slot0")}))
    assert plan_scale(lost).leavers == ("slot0",)


GROUP: dict[str, Any] = {
    "kind": "vllm-elastic",
    "slots_per_rank": 6,
    "args": "--kv-cache-memory-bytes 1000",
}


def group(model: Path, experts: int = 8, **changes: Any) -> dict[str, Any]:
    (model / "config.json").write_text(f'{{"n_routed_experts": {experts}}}')
    scale = {"initial_ranks": 2, "min_ranks": 2, "max_ranks": 4}
    return settings(GROUP, str(model)) | {"scale": scale} | changes


def flags_of(argv: list[str]) -> dict[str, str]:
    return {a: b for a, b in itertools.pairwise(argv) if a.startswith("--")}


def test_ranks_that_share_experts_boot_alone_and_the_first_ones_together(tmp_path: Path) -> None:
    config = parse_config(group(tmp_path))
    assert isinstance(config.engine, VllmGroupConfig)
    assert shared_experts(config) == 8
    alone = engine_argv(config, 2)
    assert alone[1:4] == ["-m", VLLM_ELASTIC, str(config.control_dir(2).absolute())]
    said = flags_of(alone)
    assert (said["--data-parallel-size"], said["--data-parallel-rank"]) == ("4", "2")
    assert said["--eplb-config.num_redundant_experts"] == "16"  # 4 ranks of 6 slots
    assert said["--elastic-ep-max-dp-size"] == "4"
    assert {"--enable-elastic-ep", "--enable-eplb", "--enable-expert-parallel"} <= set(alone)
    found = founder_boot(config, 1)
    assert found is not None
    argv, environment = found
    assert environment == {FOUNDS_VARIABLE: "2"}
    said = flags_of(argv)
    assert (said["--data-parallel-size"], said["--data-parallel-rank"]) == ("2", "1")
    assert said["--eplb-config.num_redundant_experts"] == "4"
    assert founder_boot(parse_config(settings({"kind": "vllm"})), 0) is None


def test_a_founder_is_booted_with_its_own_line_and_the_caches_of_all(tmp_path: Path) -> None:
    boots = Boots(parse_config(group(tmp_path)))
    founder = boots.founder(0, {"TRITON_CACHE_DIR": "/c"})
    assert founder is not None
    assert founder.environment[FOUNDS_VARIABLE] == "2"
    assert founder.environment["TRITON_CACHE_DIR"] == "/c"
    assert founder.argv != boots.command(0).argv
    assert FOUNDS_VARIABLE not in boots.command(0).environment
    assert Boots(parse_config(settings({"kind": "vllm"}))).founder(0) is None


@pytest.mark.parametrize("flag", OWN_OF_GROUP)
def test_flags_of_a_group_that_we_give_ourselves_are_refused(flag: str) -> None:
    (fault,) = faults(GROUP | {"args": f"{GROUP['args']} {flag} 1"})
    assert fault == f"engine.args: {flag}: {OWN_OF_GROUP[flag]}"


def test_a_group_needs_to_be_told_its_kv_cache() -> None:
    (fault,) = faults({"kind": "vllm-elastic", "args": "--dtype bfloat16 -tp 2"})[1:]
    assert fault.startswith("engine.args: --kv-cache-memory-bytes: ")


def test_widths_of_a_group(tmp_path: Path) -> None:
    shape = engine_shape(parse_config(group(tmp_path)), 8)
    assert shape.num_experts == 0  # vLLM places them
    with pytest.raises(ConfigError, match=r"scale.min_ranks: 2 ranks hold 12 experts"):
        engine_shape(parse_config(group(tmp_path, 13)), 13)
    with pytest.raises(ConfigError, match=r"scale.initial_ranks: vLLM starts no group"):
        parse_config(group(tmp_path, scale={"initial_ranks": 1, "max_ranks": 4}))
    with pytest.raises(ConfigError, match=r"engine.rpc_port"):
        parse_config(group(tmp_path, frontend={"port": 29600}))


def test_a_model_without_experts_can_not_share_them(tmp_path: Path) -> None:
    config = parse_config(group(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="has none of num_experts"):
        engine_argv(config, 0)


def test_an_image_of_a_rank_does_not_depend_on_weights_which_it_does_not_hold(
    tmp_path: Path,
) -> None:
    config = parse_config(group(tmp_path))
    before = image_inputs(config)
    (tmp_path / "model.safetensors").write_bytes(b"1")
    assert image_inputs(config) == before
    assert "ai-dynamo 1.6.1" in before


def test_only_one_vllm_shares_experts() -> None:
    check_elastic({VLLM_PACKAGE: "0.33.0+cu130"})
    with pytest.raises(ConfigError, match=r"for vLLM 0.33.0, and 0.31.0 is installed"):
        check_elastic({VLLM_PACKAGE: "0.31.0"})
