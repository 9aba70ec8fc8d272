"""A real engine that gives its identity up holds what it held before, and can live again."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dynamo_elastic.engine.base import DETACHED_FILE, SOCKET_FILE, EngineState, Request
from dynamo_elastic.engine.reference.make_model import write_model
from dynamo_elastic.errors import EngineError
from dynamo_elastic.snapshot.inspect_process import Allowed, check_quiescent
from dynamo_elastic.snapshot.process import identify, threads_of
from dynamo_elastic.testing.deployments import asyncio_test
from dynamo_elastic.testing.engine_process import SMALL_SHAPE, EngineProcess, engine_config
from dynamo_elastic.testing.fleet import fleet
from dynamo_elastic.topology import Member, Topology
from dynamo_elastic.types import Epoch, Incarnation, Rank, WorkerId

pytestmark = pytest.mark.nixl


@asynccontextmanager
async def booted(directory: Path) -> AsyncIterator[EngineProcess]:
    write_model(directory / "model", SMALL_SHAPE)
    config = engine_config(directory / "model", directory / "run", kv_blocks=32)
    engine = EngineProcess(config, 0)
    try:
        yield engine
    finally:
        await engine.stop()


async def serve_alone(engine: EngineProcess) -> tuple[int, ...]:
    """The engine in a group of one; the tokens of one request."""
    members = (Member(engine.worker_id, Incarnation("x"), tuple(range(8))),)
    topology = Topology(Epoch(1), members)
    endpoint = await engine.client.open_epoch(topology.epoch, Rank(0), 1)
    peers = {engine.worker_id: endpoint}
    await engine.client.connect_epoch(topology, peers, timeout_s=20)
    await engine.client.load_weights(topology.members[0].experts)
    await engine.client.decide(topology.epoch)
    await engine.client.wait_switched(topology.epoch, timeout_s=20)
    return (await engine.generate(Request("r", (1, 2, 3), 12, seed=5))).tokens


@asyncio_test
async def test_life_after_life(tmp_path: Path) -> None:
    async with booted(tmp_path) as engine:
        await engine.attach()
        process = identify(engine.process.pid)
        assert process is not None
        held: list[tuple[int, int, int]] = []
        for _ in range(4):
            (engine.control_dir / DETACHED_FILE).unlink()
            await engine.client.detach()
            await engine.detached()
            assert not (engine.control_dir / SOCKET_FILE).exists()
            # As an image must be: no socket, no thread or file of the life before.
            check_quiescent(process, Allowed((engine.control_dir,), lambda _: True))
            held.append(holdings(process.pid))
            await engine.attach()
            assert (await engine.client.status()).state is EngineState.ATTACHED
        assert len({(fds, threads) for fds, threads, _ in held}) == 1, held
        assert held[-1][2] - held[1][2] < 8 << 20, held
        assert "is detached" in engine.log()


@asyncio_test
async def test_tokens_of_another_life_are_the_same(tmp_path: Path) -> None:
    async with booted(tmp_path) as engine:
        await engine.attach()
        (engine.control_dir / DETACHED_FILE).unlink()
        await engine.client.detach()
        await engine.attach()
        tokens = await serve_alone(engine)
        with pytest.raises(EngineError, match="has to leave its group first"):
            await engine.client.detach()
        # A refusal changes nothing.
        again = await engine.generate(Request("again", (1, 2, 3), 12, seed=5))
        assert again.tokens == tokens
        assert len(tokens) == 12


@asyncio_test
async def test_rank_that_left_joins_again_in_another_life(tmp_path: Path) -> None:
    """Up, down, detached, attached, up: the tokens are those of a rank that was never away."""
    write_model(tmp_path / "model", SMALL_SHAPE)
    request = Request("r", (1, 2, 3), 20, seed=5)
    async with fleet(tmp_path / "model", tmp_path / "run", 3) as group:
        leaver = group.all[WorkerId("slot2")]
        await group.boot(2)
        await group.scale_up(3)
        first = (await leaver.generate(request)).tokens
        await group.scale_down(2)
        assert (await leaver.client.status()).state is EngineState.ATTACHED
        (leaver.control_dir / DETACHED_FILE).unlink()
        await leaver.client.detach()
        await leaver.attach()
        status = await leaver.client.status()
        assert (status.state, status.epoch, status.step) == (EngineState.ATTACHED, 0, 0)
        await group.scale_up(3)
        again = (await leaver.generate(request)).tokens
        other = (await group.all[WorkerId("slot0")].generate(request)).tokens
    assert first == again == other
    assert len(first) == 20


def holdings(pid: int) -> tuple[int, int, int]:
    """Descriptors, threads, resident bytes."""
    resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return len(os.listdir(f"/proc/{pid}/fd")), len(threads_of(pid)), resident
