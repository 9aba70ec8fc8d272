"""What every agent promises its shells; the fake's promises are the real one's."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dynamo_elastic.agent.base import Agent, SlotState, StartedEngine, Tier
from dynamo_elastic.agent.client import AgentClient
from dynamo_elastic.agent.image_source import NoImages
from dynamo_elastic.agent.server import AgentServer
from dynamo_elastic.errors import EngineError, SlotLeased
from dynamo_elastic.testing.agent import FakeAgent
from dynamo_elastic.testing.deployments import deployment, standin_argv
from dynamo_elastic.types import Epoch, Incarnation, OperationId, WorkerId

Body = Callable[[Agent], Coroutine[Any, Any, None]]


@asynccontextmanager
async def _real() -> AsyncIterator[Agent]:
    with tempfile.TemporaryDirectory(prefix="de-") as directory:
        config = deployment(Path(directory))
        server = AgentServer(config, NoImages("none made"), standin_argv("--mb", "1"))
        await server.start()
        client = AgentClient(config.agent_socket)
        try:
            yield client
        finally:
            await client.stop_all()
            await client.close()
            await server.close()


async def _run(kind: str, body: Body) -> None:
    async with asyncio.timeout(60):
        if kind == "fake":
            await body(FakeAgent(2, parks=True))
        else:
            async with _real() as agent:
                await body(agent)


@pytest.fixture(params=["fake", "real"])
def on_agent(request: pytest.FixtureRequest) -> Callable[[Body], None]:
    """Runs a test coroutine on an agent of two slots."""
    return lambda body: asyncio.run(_run(request.param, body))


async def start(
    agent: Agent,
    slot: int,
    operation: str,
    *,
    epoch: int = 1,
    worker: str = "",
    tiers: tuple[Tier, ...] = (Tier.PARKED, Tier.COLD),
) -> StartedEngine:
    return await agent.start_engine(
        slot,
        WorkerId(worker or f"slot{slot}"),
        OperationId(operation),
        Epoch(epoch),
        tiers=tiers,
        timeout_s=30,
    )


def test_start_is_idempotent_by_operation(on_agent: Callable[[Body], None]) -> None:
    async def body(agent: Agent) -> None:
        assert [s.incarnation for s in await agent.slots()] == ["", ""]
        engine = await start(agent, 0, "a")
        assert engine.incarnation.startswith("slot0-")
        assert await start(agent, 0, "a") == engine
        with pytest.raises(EngineError, match="of operation a"):
            await start(agent, 0, "b")
        status = (await agent.slots())[0]
        assert (status.incarnation, status.pid) == (engine.incarnation, engine.pid)
        assert status.tier == engine.tier

    on_agent(body)


def test_stop_ends_that_engine_only(on_agent: Callable[[Body], None]) -> None:
    async def body(agent: Agent) -> None:
        zero, one = await asyncio.gather(start(agent, 0, "a"), start(agent, 1, "a"))
        await agent.stop_engine(0, one.incarnation)
        await agent.stop_engine(0, Incarnation("slot0-none"))
        assert (await agent.slots())[0].incarnation == zero.incarnation
        await agent.stop_engine(0, zero.incarnation)
        await agent.stop_engine(0, zero.incarnation)
        assert [s.incarnation for s in await agent.slots()] == ["", one.incarnation]
        assert (await start(agent, 0, "b")).incarnation != zero.incarnation

    on_agent(body)


def test_slot_is_leased_to_one_operation_worker_and_epoch(on_agent: Callable[[Body], None]) -> None:
    async def body(agent: Agent) -> None:
        engine = await start(agent, 0, "a", epoch=5)
        for other in ({"epoch": 6}, {"worker": "slot1"}, {"epoch": 4}):
            with pytest.raises(SlotLeased):
                await start(agent, 0, "a", **{"epoch": 5, **other})  # type: ignore[arg-type]
        status = (await agent.slots())[0]
        assert status.state is SlotState.SERVING
        assert status.held_by == "slot0 of operation a at epoch 5"
        assert await start(agent, 0, "a", epoch=5) == engine
        await agent.stop_engine(0, engine.incarnation)
        # A request that was under way when its operation was over.
        with pytest.raises(SlotLeased, match="epoch 4 is over"):
            await start(agent, 0, "late", epoch=4)
        assert (await agent.slots())[0].state is SlotState.FREE
        assert (await start(agent, 0, "b", epoch=6)).tier is Tier.COLD

    on_agent(body)


def test_parked_engine_is_the_next_one_of_its_slot(on_agent: Callable[[Body], None]) -> None:
    async def body(agent: Agent) -> None:
        engine = await start(agent, 0, "a")
        assert await agent.park_engine(0, Incarnation("slot0-none"), timeout_s=20) == ""
        assert (await agent.slots())[0].state is SlotState.SERVING
        for _ in range(2):
            assert await agent.park_engine(0, engine.incarnation, timeout_s=20) == ""
        status = (await agent.slots())[0]
        assert (status.state, status.pid) == (SlotState.PARKED, engine.pid)
        assert (status.incarnation, status.held_by) == ("", "")
        again = await start(agent, 0, "b", epoch=2)
        assert (again.tier, again.pid) == (Tier.PARKED, engine.pid)
        assert again.incarnation != engine.incarnation
        assert again.fell_through == ()

    on_agent(body)


def test_slot_asked_for_another_tier_loses_its_parked_engine(
    on_agent: Callable[[Body], None],
) -> None:
    async def body(agent: Agent) -> None:
        engine = await start(agent, 0, "a")
        await agent.park_engine(0, engine.incarnation, timeout_s=20)
        cold = await start(agent, 0, "b", tiers=(Tier.COLD,))
        assert cold.tier is Tier.COLD
        assert cold.pid != engine.pid
        await agent.stop_engine(0, cold.incarnation)
        assert (await agent.slots())[0].state is SlotState.FREE

    on_agent(body)
