"""Public reports that only a GPU can show; the others are in tests/regressions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynamo_elastic.engine.reference.make_model import write_model
from dynamo_elastic.errors import SnapshotMismatch
from dynamo_elastic.snapshot.namespace import temporary_namespace
from dynamo_elastic.testing.engine_process import SMALL_SHAPE
from dynamo_elastic.testing.expert_buffer_group import (
    SMALL,
    RankProcess,
    activate,
    connect,
    expand_lose_contract,
    joint_step,
)
from dynamo_elastic.testing.fleet import FleetLoad
from dynamo_elastic.testing.gpu_fleet import gpu_fleet
from dynamo_elastic.testing.gpu_meter import Meter
from dynamo_elastic.testing.gpu_world import image_of, images_of, world
from dynamo_elastic.types import WorkerId

CYCLES = 6
GROWTH_MIB = 16
ENGINE: dict[str, Any] = {
    "slots_per_rank": 16,
    "batch_tokens": 8,
    "max_context": 64,
    "kv_blocks": 64,
    "peer_timeout_s": 1.0,
}
Start = Callable[[int], RankProcess]


@pytest.fixture
def start() -> Iterator[Start]:
    """Makes the process of a rank, on the GPU of its number."""
    with ExitStack() as stack:

        def make(number: int) -> RankProcess:
            rank = RankProcess(number, number)
            stack.callback(rank.close)
            return rank

        yield make


@pytest.mark.gpu(2)
@pytest.mark.timeout(120)
def test_cycles_leave_no_gpu_memory_behind(tmp_path: Path) -> None:
    """vllm#37131: after each 1 -> 2 -> 1 under load both GPUs hold what they held after the first
    one: no communicator, mapping or graph of a group that is over; and experts move every time."""
    model = tmp_path / "model"
    shape = replace(SMALL_SHAPE, hidden_size=2048, num_hidden_layers=2, num_experts=16)
    write_model(model, shape, seed=5, in_file=False)
    meter = Meter()

    async def scenario() -> None:
        async with gpu_fleet(model, tmp_path / "run", [0, 1], deadline_s=90.0, **ENGINE) as ranks:
            await ranks.boot(1)
            load = FleetLoad(ranks, [WorkerId("slot0")])
            held: list[list[int]] = []
            async with load.running(streams=2):
                for _ in range(CYCLES):
                    plan = await ranks.scale_up(2)
                    assert ranks.in_force.members == plan.settled.members
                    await ranks.scale_down(1)
                    held.append(meter.used_mib())
            grown = [last - first for first, last in zip(held[1], held[-1], strict=True)]
            assert max(grown) <= GROWTH_MIB, held

    try:
        asyncio.run(scenario())
    finally:
        meter.close()


@pytest.mark.gpu(2)
@pytest.mark.timeout(60)
def test_a_rank_that_died_comes_back_in_its_place(start: Start) -> None:
    """nixl#2217, dynamo#13500: [0, 1], then 1 is killed: 0 steps on after one timeout; a process
    that takes its rank, GPU and address is somebody else, connects, and results are right."""
    first, second = start(0), start(1)
    for rank in (first, second):
        rank.call("open", rank=rank.number, **SMALL)
    connect([second], [first])
    activate([first, second])
    assert joint_step([first, second])["bad_tokens"] == 0
    dead = second.call("metadata")
    second.close()
    first.call("route", world=[0, 1])
    assert first.call("step")["masked"] == [1]
    first.call("disconnect", ranks=[1])
    first.call("route", world=[0])
    first.call("step")
    assert first.call("check", world=[0])["bad_tokens"] == 0

    third = start(1)
    third.call("open", rank=1, **SMALL)
    assert third.call("metadata") != dead
    connect([third], [first])
    activate([first, third])
    for seed in range(3):
        result = joint_step([first, third], seed=seed)
        assert (result["bad_tokens"], result["masked"]) == (0, [[], []]), result


@pytest.mark.gpu(4)
@pytest.mark.timeout(90)
def test_a_group_grows_loses_a_rank_and_shrinks(start: Start) -> None:
    """nixl#2217: [0, 1] -> [0, 1, 2, 3], then 2 is killed and 1 leaves: [0, 3] step on with right
    results; who died costs one timeout, and nobody waits for it again."""
    expand_lose_contract([start(number) for number in range(4)], lose=RankProcess.close)


@pytest.mark.gpu(1)
@pytest.mark.root
@pytest.mark.criu
@pytest.mark.parametrize("field", ["gpu_model", "gpu", "host_gpus"])
def test_an_image_is_not_run_on_other_gpus(field: str) -> None:
    """cuda-checkpoint#18: an image whose GPUs differ from those here in type, order or number is
    refused with the line that says so, and CRIU is not even started."""
    config = world()
    manifest = image_of(config)
    change: dict[str, Any] = {field: "GPU-of-another-host"}
    elsewhere = replace(manifest.fingerprint, **change)
    with (
        temporary_namespace({}) as namespace,
        pytest.raises(SnapshotMismatch) as caught,
    ):
        images_of(config).restore_image(
            replace(manifest, fingerprint=elsewhere), namespace, timeout_s=20
        )
    (line,) = caught.value.mismatches
    assert line.startswith(f"{field}: ")
