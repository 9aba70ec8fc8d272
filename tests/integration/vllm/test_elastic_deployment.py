"""A whole deployment of vLLM ranks that share experts, under Dynamo, without a GPU: planner-side
target to ranks in force, requests all the while."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from dynamo_elastic.agent.base import Tier
from dynamo_elastic.agent.records import read_record
from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.coordinator.status import read_status
from dynamo_elastic.demo.load import Load, reference_texts, summarize
from dynamo_elastic.demo.run import demo_config, leftovers, restored_from
from dynamo_elastic.demo.vllm import short_prompts
from dynamo_elastic.engine.vllm.make_model import write_model
from dynamo_elastic.serve.deployment import Deployment, running
from dynamo_elastic.snapshot.process import tree_of
from dynamo_elastic.testing.cycles import scale_to
from dynamo_elastic.testing.detached_ranks import STAND_INS
from dynamo_elastic.testing.vllm_ranks import PYTHON, ROOT
from dynamo_elastic.types import Incarnation

pytestmark = [
    pytest.mark.vllm_elastic,
    pytest.mark.slow,
    pytest.mark.root,
    pytest.mark.etcd,
    pytest.mark.dynamo,
    pytest.mark.timeout(2400),
]

EXPERTS = 8
"""Of the tiny model; every rank has all of them, as nothing is dispatched here."""
BOOT_TIMEOUT_S = 900.0
CLIENTS = 1


def interpreter(folder: Path) -> Path:
    """One that starts a rank with its stand-ins in place of the module it is told, in an
    environment that looks like the one behind it."""
    (folder / "bin").mkdir(parents=True)
    (folder / "lib").symlink_to(PYTHON.parent.parent / "lib")
    path = folder / "bin" / "python"
    path.write_text(f'#!/bin/sh\nshift 2\nexec {PYTHON} {STAND_INS}/group_dynamo.py "$@"\n')
    path.chmod(0o755)
    return path


def deployment_config(work_dir: Path) -> DeploymentConfig:
    write_model(work_dir / "model")
    return demo_config(
        work_dir,
        "test-elastic",
        model={"path": str(work_dir / "model"), "name": "tiny-moe"},
        engine={
            "kind": "vllm-elastic",
            "python": str(interpreter(work_dir / "python")),
            "slots_per_rank": EXPERTS,
            "args": "--dtype float32 --max-model-len 256 --max-num-seqs 8 "
            "--kv-cache-memory-bytes 67108864",
        },
        scale={
            "initial_ranks": 2,
            "min_ranks": 2,
            "max_ranks": 3,
            "restore_timeout_s": BOOT_TIMEOUT_S,
            "operation_timeout_s": 2 * BOOT_TIMEOUT_S,
            "step_timeout_s": 60.0,
            "drain_timeout_s": 20.0,
        },
        snapshot={"enabled": False},
        planner={"enabled": False},
    )


def incarnation_of(config: DeploymentConfig, slot: int) -> Incarnation:
    found = read_record(config.control_dir(slot))
    assert found is not None
    return found.incarnation


def hit_rank_2(config: DeploymentConfig, sign: signal.Signals) -> Incarnation:
    """All of its processes at once."""
    found = read_record(config.control_dir(2))
    assert found is not None
    for pid in tree_of(found.process.pid):
        os.kill(pid, sign)
    return found.incarnation


async def in_force(deployment: Deployment, ranks: int, *, without: Incarnation) -> None:
    """Return once a topology of so many ranks is decided, of which one is none."""
    deadline_s = time.monotonic() + BOOT_TIMEOUT_S
    while True:
        status = await read_status(deployment.store, deployment.keys)
        members = status.topology.members if status.topology is not None else ()
        there = {member.incarnation for member in members}
        if len(there) == ranks and without not in there:
            return
        assert time.monotonic() < deadline_s, status
        await asyncio.sleep(0.1)


async def served(deployment: Deployment) -> Load:
    """Clients that go on, all of whose prompts were answered once."""
    load = Load(deployment.url, deployment.config.model.name, short_prompts(), CLIENTS)
    load.start()
    await load.wait_for_each_prompt(timeout_s=240)
    return load


async def end_without_failure(load: Load, reference: dict[str, str]) -> None:
    await load.stop()
    summary = summarize(load.results, reference)
    assert (summary.requests_failed, summary.errors) == (0, ())


async def scale_and_back(work_dir: Path) -> None:
    config = deployment_config(work_dir)
    async with running(config, print) as deployment:
        up = await scale_to(deployment, 3, timeout_s=BOOT_TIMEOUT_S)
        assert restored_from(up) == {Tier.COLD}
        # Not before: beside requests a boot takes many times as long on two cores.
        load = await served(deployment)
        reference = reference_texts(load.results)
        for _ in range(2):
            await scale_to(deployment, 2)
            again = await scale_to(deployment, 3)
            assert restored_from(again) == {Tier.PARKED}
            await asyncio.sleep(2)
        before = summarize(list(load.results), reference)
        stay = [incarnation_of(config, slot) for slot in range(2)]
        for sign in (signal.SIGKILL, signal.SIGSTOP):
            lost = hit_rank_2(config, sign)
            await in_force(deployment, 2, without=lost)
            await asyncio.sleep(2)
            await end_without_failure(load, reference)
            await in_force(deployment, 3, without=lost)
            assert [incarnation_of(config, slot) for slot in range(2)] == stay
            load = await served(deployment)
        await end_without_failure(load, reference)
        # Who has to go on in the middle of a text gets other draws for the same seed.
        assert before.tokens_equal
        pids = set(deployment.supervisor.pids.values())
    assert leftovers(config, pids) == []


def test_ranks_join_leave_and_come_back_under_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", f"{STAND_INS}:{ROOT}")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
    # Two cores for three ranks: a joiner that is well may need more than the 0.8 s of a GPU host.
    monkeypatch.setenv("DYNAMO_ELASTIC_VLLM_COMMIT_TIMEOUT_S", "5")
    # One that stands still is known to be dead after this.
    monkeypatch.setenv("DYNAMO_ELASTIC_VLLM_STEP_TIMEOUT_S", "10")
    assert os.access(PYTHON, os.X_OK)
    asyncio.run(scale_and_back(tmp_path))
