"""Public reports about groups of engines, played on real engine processes and real NIXL."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from dynamo_elastic.engine.base import DETACHED_FILE, EngineState
from dynamo_elastic.engine.reference.oracle import Oracle
from dynamo_elastic.errors import EngineError, EngineGone
from dynamo_elastic.failpoints import KILL_AT
from dynamo_elastic.testing.engine_process import EngineProcess
from dynamo_elastic.testing.expert_buffer import FakeExpertWorld
from dynamo_elastic.testing.expert_buffer_group import RankThread, expand_lose_contract
from dynamo_elastic.testing.fleet import Fleet, FleetLoad, each, fleet
from dynamo_elastic.topology import EMPTY, EngineShape
from dynamo_elastic.types import Epoch, WorkerId

FIRST, SECOND, THIRD = (WorkerId(f"slot{n}") for n in range(3))
PEER_TIMEOUT_S = 4.0
"""No request of two dozen tokens takes so long unless somebody waits for somebody."""


@pytest.mark.slow
@pytest.mark.nixl
def test_up_after_down_works_every_time(model: Path, oracle: Oracle, tmp_path: Path) -> None:
    """vllm#37357: 2 -> 4 -> 2 -> 4 under load: ranks that left come back, in the same processes and
    under new identities of their group, as often as it is asked for."""

    async def scenario() -> None:
        async with fleet(model, tmp_path, 4) as ranks:
            await ranks.boot(2)
            load = FleetLoad(ranks, [FIRST, SECOND])
            async with load.running():
                await ranks.scale_up(4)
                down = await ranks.scale_down(2)
                again = await ranks.scale_up(4)
            assert set(again.joiners) == set(down.leavers)
            statuses = await each(ranks.of(again.after), lambda e: e.client.status())
            assert {(s.state, s.world_size, s.masked) for s in statuses} == {
                (EngineState.SERVING, 4, ())
            }
            load.check(oracle)

    asyncio.run(scenario())


def held(ranks: Fleet[EngineProcess]) -> tuple[int, int, int]:
    """Descriptors, threads and resident MiB of all engines together."""
    found = [psutil.Process(e.process.pid) for e in ranks.all.values()]
    return (
        sum(p.num_fds() for p in found),
        sum(p.num_threads() for p in found),
        sum(p.memory_info().rss for p in found) >> 20,
    )


@pytest.mark.slow
@pytest.mark.nixl
def test_cycles_hold_nothing_and_experts_go_on_moving(model: Path, tmp_path: Path) -> None:
    """vllm#37131: a cycle ends with what it began with, in groups, threads and memory, and experts
    are spread anew in each of them: nothing stays suppressed. (On GPUs: tests/gpu.)"""

    async def scenario() -> None:
        async with fleet(model, tmp_path, 2, shape=EngineShape(8, slots_per_rank=8)) as ranks:
            await ranks.boot(1)
            marks = []
            for _ in range(10):
                plan = await ranks.scale_up(2)
                assert ranks.in_force.members == plan.settled.members
                assert len(set(ranks.in_force.members[1].experts) - {EMPTY}) >= 4
                await ranks.scale_down(1)
                await another_life(ranks.all[SECOND])
                marks.append(held(ranks))
            before, after = marks[3], marks[-1]
            assert after[0] <= before[0] + 2
            assert after[1] <= before[1] + 1
            assert after[2] <= before[2] + 12

    asyncio.run(scenario())


@pytest.mark.nixl
@pytest.mark.parametrize(
    "at",
    [
        "group.before_connect",
        pytest.param("engine.open_epoch", marks=pytest.mark.slow),
        pytest.param("engine.check", marks=pytest.mark.slow),
    ],
)
def test_a_joiner_that_dies_while_its_group_is_made_stops_nobody(
    at: str, model: Path, oracle: Oracle, tmp_path: Path
) -> None:
    """dynamo#12991: a new rank that dies while the group is initialised leaves the ranks in force
    serving: they step on, the epoch is undone, and the next one forms without that rank."""

    async def scenario() -> None:
        async with fleet(model, tmp_path, 3, peer_timeout_s=PEER_TIMEOUT_S) as ranks:
            joiner = ranks.all[THIRD]
            await ranks.boot(2)
            load = FleetLoad(ranks, [FIRST, SECOND])
            async with load.running():
                await another_life(joiner, {KILL_AT: at})
                plan = ranks.plan(3)
                with pytest.raises((EngineGone, EngineError)):
                    await asyncio.wait_for(ranks.join(plan), 10)
                joiner.process.wait(5)
                for worker in plan.retained:
                    await ranks.all[worker].client.abort_epoch(plan.after.epoch)
                without_it = replace(ranks.in_force, epoch=Epoch(plan.after.epoch + 1))
                await ranks.connect(without_it)
                await ranks.switch(without_it)
            load.check(oracle)
            assert load.longest_s < PEER_TIMEOUT_S

    asyncio.run(scenario())


async def another_life(engine: EngineProcess, environment: Mapping[str, str] | None = None) -> None:
    """The process gives its identity up, as if to be parked, and gets another one."""
    (engine.control_dir / DETACHED_FILE).unlink()
    await engine.client.detach()
    await engine.attach(environment)


@pytest.mark.nixl
def test_a_signal_that_ranks_see_at_different_times_is_one_switch(
    model: Path, oracle: Oracle, tmp_path: Path
) -> None:
    """sglang#22788: ranks that hear of the decision passes apart switch at the same step: until all
    have heard they go on together, and no collective waits for a rank that is not in it."""

    async def scenario() -> None:
        async with fleet(model, tmp_path, 3, peer_timeout_s=PEER_TIMEOUT_S) as ranks:
            await ranks.boot(2)
            load = FleetLoad(ranks, [FIRST, SECOND])
            async with load.running():
                plan = ranks.plan(3)
                await ranks.join(plan)
                for worker in (SECOND, THIRD, FIRST):
                    assert (await ranks.all[FIRST].client.status()).epoch == 1
                    await ranks.decide(plan.after.epoch, [worker])
                    await asyncio.sleep(0.4)
                await ranks.switched(plan.after, plan.after.worker_ids)
            load.check(oracle)
            assert load.longest_s < PEER_TIMEOUT_S

    asyncio.run(scenario())


def test_a_group_grows_loses_a_rank_and_shrinks() -> None:
    """nixl#2217: [0, 1] -> [0, 1, 2, 3], then 2 dies and 1 leaves: [0, 3] step on with right
    results; who died costs one timeout, and nobody waits for it again. (On GPUs: tests/gpu.)"""
    world = FakeExpertWorld()
    ranks = [RankThread(number, world) for number in range(4)]
    try:
        expand_lose_contract(ranks, lose=lambda rank: rank.rank.buffer.die())  # type: ignore[attr-defined]
    finally:
        for rank in ranks:
            rank.close()


NIXL_END = Path(__file__).parents[1] / "contract" / "comm" / "nixl_process.py"
LIMITS = {"window_bytes": 4 << 20, "transfer_timeout_s": 1.0, "timeout_s": 10.0}


def end(role: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    environment = {**os.environ, "UCX_TLS": "tcp"}
    return subprocess.Popen(
        [sys.executable, str(NIXL_END), role], stdin=pipe, stdout=pipe, text=True, env=environment
    )


def say(process: subprocess.Popen[str], value: object) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(value) + "\n")
    process.stdin.flush()


def hear(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


@pytest.mark.nixl
def test_nothing_lands_once_the_target_has_closed_its_agent() -> None:
    """nixl#2044: to give a transfer up does not end it, so a push that timed out ends with the
    target's agent: after that not one late byte lands in memory that is used for something else."""
    with end("receive") as target, end("send") as source:
        try:
            say(source, hear(target))
            say(source, LIMITS)
            assert hear(source) == "weights.before_chunk"
            target.send_signal(signal.SIGSTOP)
            while not isinstance(ended := hear(source), dict):
                pass
            target.send_signal(signal.SIGCONT)
            assert ended["end"] == "TransferTimeout"
            assert ended["elapsed_s"] < LIMITS["timeout_s"]
            say(target, "close")
            assert hear(target) == 0
        finally:
            target.kill()
            source.kill()


STALE = """
from dynamo_elastic.comm.base import MemoryKind, Span
from dynamo_elastic.comm.nixl_agent import NixlAgent
from dynamo_elastic.errors import TransferError
from dynamo_elastic.memory.arena import HostArena, layout

def end(name):
    arena = HostArena(layout([("all", 1 << 20)]))
    agent, span = NixlAgent(name), Span(arena.address, arena.size_bytes)
    agent.register(span)
    return agent, span, arena

ours, here, mine = end("ours")
for life in range(3):
    theirs, there, memory = end("theirs")  # the same name each time, other memory
    ours.add_remote(theirs.metadata())
    mine.view(mine.regions[0])[:] = bytes([life + 1]) * (1 << 20)
    transfer = ours.write("theirs", [here], [there], MemoryKind.DRAM)
    while transfer.poll().value != "done":
        pass
    assert bytes(memory.view(memory.regions[0])[:4]) == bytes([life + 1]) * 4
    theirs.close()
    ours.remove_remote("theirs")
    for stale in (lambda: ours.write("theirs", [here], [there], MemoryKind.DRAM), transfer.post):
        try:
            stale()
        except TransferError:
            continue
        raise SystemExit("a stale handle was used")
    transfer.release()
ours.close()
"""


@pytest.mark.nixl
def test_a_stale_handle_is_an_error_and_never_a_crash() -> None:
    """nixl#2051: what was prepared for a remote that has registered anew is refused: no handle of
    its former life is followed into memory that is gone."""
    done = subprocess.run(
        [sys.executable, "-c", STALE], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
