"""How engines are booted: their GPU, their environment, what makes them equal."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from dynamo_elastic.agent.boot import Boots, slot_gpus
from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.errors import ConfigError
from dynamo_elastic.testing.cuda import fake_gpus
from dynamo_elastic.testing.deployments import deployment, standin_argv

GPUS = fake_gpus(3)
UUIDS = [gpu.uuid for gpu in GPUS]


def config(directory: Path, *gpus: Any, slots: int = 2) -> DeploymentConfig:
    return deployment(directory, slots=slots, agent={"gpus": list(gpus)})


def boots(directory: Path, *gpus: Any) -> Boots:
    return Boots(config(directory, *gpus), standin_argv(), GPUS)


def test_slot_has_the_gpu_of_its_number(tmp_path: Path) -> None:
    assert slot_gpus(config(tmp_path), GPUS) == {0: UUIDS[0], 1: UUIDS[1]}
    assert slot_gpus(config(tmp_path, slots=4), GPUS[:1]) == {0: UUIDS[0]}
    assert slot_gpus(config(tmp_path), ()) == {}


def test_gpus_are_named_by_index_or_uuid(tmp_path: Path) -> None:
    assert slot_gpus(config(tmp_path, 2, UUIDS[0]), GPUS) == {0: UUIDS[2], 1: UUIDS[0]}
    assert slot_gpus(config(tmp_path, "1", 1), GPUS) == {0: UUIDS[1], 1: UUIDS[1]}


def test_gpus_that_are_not_there_are_all_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        slot_gpus(config(tmp_path, 7, "GPU-x"), GPUS)
    assert len(caught.value.faults) == 2
    assert "agent.gpus: slot 0 has GPU 7, which is not on this host" in caught.value.faults[0]
    assert UUIDS[2] in caught.value.faults[1]


def test_one_gpu_for_each_slot_or_none_at_all(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"agent\.gpus: names 1 GPUs for 2 slots"):
        config(tmp_path, 0)


def test_engine_sees_its_gpu_only_and_keeps_no_ipc_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_CUDA_IPC_CACHE", "y")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    environment = boots(tmp_path, 2, 0).command(0, {"TRITON_CACHE_DIR": "/x"}).environment
    assert environment["CUDA_VISIBLE_DEVICES"] == UUIDS[2]
    assert environment["UCX_CUDA_IPC_CACHE"] == "n"
    assert environment["TRITON_CACHE_DIR"] == "/x"
    one = Boots(config(tmp_path), standin_argv(), GPUS[:1])
    assert one.command(1).environment["CUDA_VISIBLE_DEVICES"] == ""
    none = Boots(config(tmp_path), standin_argv()).command(0).environment
    assert none["CUDA_VISIBLE_DEVICES"] == "0,1,2"


def test_fingerprint_knows_the_gpu_and_caches_are_shared(tmp_path: Path) -> None:
    ours = boots(tmp_path)
    zero, one = ours.fingerprint(0), ours.fingerprint(1)
    differing = {f.name for f in fields(zero) if getattr(zero, f.name) != getattr(one, f.name)}
    by_slot = {"argv", "slot", "control_dir", "gpu", "cuda_visible_devices", "environment"}
    assert differing <= by_slot
    assert {"slot", "gpu"} <= differing
    assert ours.cache_key(0) == ours.cache_key(1)
    other = deployment(tmp_path, agent={"gpus": []})
    flags = Boots(other, standin_argv("--torch"), GPUS)
    assert flags.cache_key(0) != ours.cache_key(0)
    (tmp_path / "model" / "config.json").write_text("{}")
    assert ours.cache_key(0) != flags.cache_key(0)
