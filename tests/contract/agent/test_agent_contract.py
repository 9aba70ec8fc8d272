"""What every agent promises its shells; the fake's promises are the real one's."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dynamo_elastic.agent.base import Agent, StartedEngine, Tier
from dynamo_elastic.agent.client import AgentClient
from dynamo_elastic.agent.image_source import NoImages
from dynamo_elastic.agent.server import AgentServer
from dynamo_elastic.errors import EngineError
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
            await body(FakeAgent(2))
        else:
            async with _real() as agent:
                await body(agent)


@pytest.fixture(params=["fake", "real"])
def on_agent(request: pytest.FixtureRequest) -> Callable[[Body], None]:
    """Runs a test coroutine on an agent of two slots."""
    return lambda body: asyncio.run(_run(request.param, body))


async def start(agent: Agent, slot: int, operation: str) -> StartedEngine:
    worker = WorkerId(f"slot{slot}")
    return await agent.start_engine(
        slot, worker, OperationId(operation), Epoch(1), tiers=(Tier.COLD,), timeout_s=30
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
