"""The doctor's lines, verdicts and exit code, on hosts that are made up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynamo_elastic.agent.base import Tier
from dynamo_elastic.cli import doctor as doctor_module
from dynamo_elastic.cli.doctor import Finding, Verdict, findings, in_the_way, tiers
from dynamo_elastic.cli.host_facts import HostFacts, read_facts
from dynamo_elastic.cli.main import main
from dynamo_elastic.snapshot.base import CudaCapabilities
from dynamo_elastic.snapshot.nvml import GpuModes
from dynamo_elastic.testing.cuda import GIB, fake_gpus
from dynamo_elastic.testing.deployments import deployment

NO_CUDA = CudaCapabilities(version=0, checkpoint=False, gpu_map=False, custom_storage=False)
CUDA = CudaCapabilities(version=13000, checkpoint=True, gpu_map=True, custom_storage=False)
GPUS = fake_gpus(2)

CPU_HOST = HostFacts(
    uid=0,
    no_namespace="",
    criu="4.2.1",
    no_criu="",
    page_server=True,
    gpus=(),
    no_gpu="",
    cuda=NO_CUDA,
    modes={},
    mps=False,
    catalog=Path("/images"),
    catalog_free_bytes=100 * GIB,
    catalog_in_memory=True,
    memory_free_bytes=100 * GIB,
    io_uring_disabled=2,
    pid_max=4194304,
    no_nixl="",
    no_etcd="",
)
GPU_HOST = replace(
    CPU_HOST,
    gpus=GPUS,
    cuda=CUDA,
    modes={gpu.uuid: GpuModes(persistence=True, mig=False) for gpu in GPUS},
)


def line(facts: HostFacts, check: str, config: Any = None) -> Finding:
    (found,) = [f for f in findings(facts, config) if f.check == check]
    return found


@pytest.mark.parametrize("facts", [CPU_HOST, GPU_HOST])
def test_host_that_can_do_everything(facts: HostFacts) -> None:
    found = findings(facts, None)
    assert {f.verdict for f in found} == {Verdict.OK}
    assert set(tiers(found).values()) == {"ok"}
    assert in_the_way(found, None) == []


OFF = {gpu.uuid: GpuModes(persistence=False, mig=True) for gpu in GPUS}


@pytest.mark.parametrize(
    ("change", "check", "verdict", "remedy", "broken"),
    [
        ({"uid": 7}, "uid", Verdict.MISSING, "run the agent as root", {"image"}),
        ({"no_criu": "too old: install it"}, "CRIU", Verdict.MISSING, "install it", {"image"}),
        (
            {"no_namespace": "needs root: run as root"},
            "pid namespaces",
            Verdict.MISSING,
            "run as root",
            {"image"},
        ),
        ({"pid_max": 5000}, "kernel.pid_max", Verdict.MISSING, "sysctl kernel.pid_max", {"image"}),
        ({"catalog_free_bytes": GIB}, "image space", Verdict.WARNING, "make room", set()),
        ({"memory_free_bytes": GIB}, "host memory", Verdict.WARNING, "make room", set()),
        ({"io_uring_disabled": 0}, "io_uring", Verdict.WARNING, "io_uring_disabled=2", set()),
        (
            {"gpus": (), "no_gpu": "NVML: no start: load the driver"},
            "GPU",
            Verdict.MISSING,
            "load the driver",
            {"parked", "image", "cached", "cold"},
        ),
        ({"cuda": NO_CUDA}, "driver", Verdict.MISSING, "580", {"parked", "image"}),
        ({"modes": OFF}, "persistence", Verdict.WARNING, "nvidia-smi -pm 1", {"parked", "image"}),
        ({"modes": OFF}, "MIG", Verdict.MISSING, "nvidia-smi -mig 0", {"parked", "image"}),
        ({"mps": True}, "MPS", Verdict.MISSING, "quit", {"parked", "image"}),
        (
            {"no_nixl": "no wheel: install nixl-cu13"},
            "NIXL",
            Verdict.MISSING,
            "install nixl-cu13",
            {"parked", "image", "cached", "cold"},
        ),
        ({"no_etcd": "no program: install it"}, "etcd", Verdict.MISSING, "install it", set()),
    ],
)
def test_each_line(
    change: dict[str, Any], check: str, verdict: Verdict, remedy: str, broken: set[str]
) -> None:
    facts = replace(GPU_HOST, **change)
    found = line(facts, check)
    assert found.verdict is verdict
    assert remedy in found.remedy
    states = tiers(findings(facts, None))
    assert {tier for tier, state in states.items() if state != "ok"} == broken


def test_only_what_the_deployment_asks_for_counts(tmp_path: Path) -> None:
    facts = replace(GPU_HOST, no_criu="none: install it", cuda=NO_CUDA)
    asked = deployment(tmp_path)
    found = findings(facts, asked)
    assert [f.check for f in in_the_way(found, asked)] == ["CRIU", "driver"]
    off = {"enabled": False, "parked": {"enabled": False}}
    cold = deployment(tmp_path, snapshot=off)
    assert in_the_way(findings(facts, cold), cold) == []
    assert tiers(found)[Tier.IMAGE] == "CRIU, driver"


def test_gpus_of_slots(tmp_path: Path) -> None:
    two, four = deployment(tmp_path), deployment(tmp_path, slots=4)
    assert line(GPU_HOST, "agent.gpus", two).verdict is Verdict.OK
    few = line(GPU_HOST, "agent.gpus", four)
    assert (few.verdict, "slots [2, 3] have none" in few.remedy) == (Verdict.WARNING, True)
    shared = deployment(tmp_path, agent={"gpus": [0, 0]})
    assert line(GPU_HOST, "agent.gpus", shared).verdict is Verdict.WARNING
    wrong = deployment(tmp_path, agent={"gpus": [0, 9]})
    assert line(GPU_HOST, "agent.gpus", wrong).verdict is Verdict.MISSING


def test_faults_of_the_deployment_are_lines() -> None:
    facts = replace(CPU_HOST, faults=("etcd.port: port 2379 is in use; choose another",))
    found = line(facts, "etcd.port")
    assert (found.verdict, found.remedy) == (Verdict.MISSING, "choose another")
    assert in_the_way([found], None) == [found]


@pytest.mark.parametrize(("facts", "code"), [(CPU_HOST, 0), (replace(CPU_HOST, uid=7), 1)])
def test_command(
    facts: HostFacts,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(doctor_module, "read_facts", lambda _: facts)
    for flags in ([], ["--json"]):
        with pytest.raises(SystemExit) as caught:
            main(["doctor", *flags])
        assert (caught.value.code or 0) == code
    out = capsys.readouterr().out
    said = json.loads(out[out.index("{") :])
    assert said["tiers"]["image"] == ("uid" if code else "ok")
    assert {f["check"] for f in said["findings"]} >= {"CRIU", "GPU", "NIXL", "etcd"}
    assert "image: not possible: uid" in out or not code


@pytest.mark.nixl
def test_this_host_can_be_looked_at() -> None:
    facts = read_facts(None)
    assert facts.catalog_free_bytes > 0
    assert facts.no_nixl == ""
    assert findings(facts, None)


def test_kernel_without_userfaultfd_is_slower_not_unable() -> None:
    found = line(replace(CPU_HOST, page_server=False), "userfaultfd")
    assert (found.verdict, bool(found.remedy)) == (Verdict.WARNING, True)
