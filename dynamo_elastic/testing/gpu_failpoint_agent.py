"""An agent that restores an image, parks the engine and brings it back, and is hurt on the way,
beside an engine of another slot on the same GPU."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from dynamo_elastic.agent.base import Tier
from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.errors import ElasticError
from dynamo_elastic.failpoints import KILL_ONCE_DIR, Act
from dynamo_elastic.testing.chaos.gpu_scenario import GpuScenario, Move
from dynamo_elastic.testing.chaos.verdict import Verdict
from dynamo_elastic.testing.gpu_agent import GpuAgent, Started
from dynamo_elastic.testing.gpu_meter import not_freed

_SLOT, _OTHER = 0, 1
_RUN_S = 60.0
"""A run that takes longer hangs."""
_POLL_S = 0.05


class Parker:
    """`async with parker(...)` makes one. The other slot's engine lives, and was never restored."""

    def __init__(
        self, agent: GpuAgent, other: Started, failpoints: Path, used_mib: Callable[[], int]
    ) -> None:
        self._agent = agent
        self._other = other
        self._failpoints = failpoints
        self._used_mib = used_mib

    async def play(self, scenario: GpuScenario) -> Verdict:
        """One run. After one that hangs nothing is to be done with this agent any more."""
        verdict = Verdict(
            scenario.number,
            str(scenario),
            scenario.move,
            scenario.place,
            "agent",
            scenario.act,
            fired=False,
        )
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(_RUN_S):
                verdict.violations += await self._run(scenario, verdict)
        except TimeoutError:
            verdict.hang = f"the agent does not come to rest in {_RUN_S:g} s"
        except ElasticError as exc:
            verdict.violations.append(f"what was not hurt fails: {type(exc).__name__}: {exc}")
        verdict.seconds = round(time.monotonic() - began_s, 3)
        return verdict

    async def _run(self, scenario: GpuScenario, verdict: Verdict) -> list[str]:
        """What does not hold."""
        used_mib, move, found = self._used_mib(), scenario.move, []
        started = await self._up_to(move)
        file = self._failpoints / scenario.place
        file.write_text(scenario.content)
        failure = await self._hurt(move, started)
        verdict.fired = not file.exists()
        file.unlink(missing_ok=True)
        if failure and scenario.act in (Act.STOP, Act.DELAY):
            found.append(f"it is not only later: {failure}")
        if verdict.fired and not failure and scenario.act in (Act.KILL, Act.ERROR):
            found.append(f"nobody was told of the {scenario.act}")
        if scenario.act is Act.KILL:
            self._agent.kill()
            await self._agent.boot()
        await self._clear()
        if left := await not_freed(self._used_mib, used_mib):
            found.append(left)
        await self._agent.probe(self._other, host=True)
        await self._once()
        await self._clear()
        return found

    async def _up_to(self, move: Move) -> Started | None:
        """Everything before `move`."""
        if move is Move.RESTORE:
            return None
        started = await self._agent.start(_SLOT, Tier.IMAGE)
        if move is Move.UNPARK:
            await self._agent.park(started)
        return started

    async def _hurt(self, move: Move, started: Started | None) -> str:
        """Why `move` failed; '' if it did not."""
        try:
            if move is Move.PARK and started is not None:
                await self._agent.park(started)
            else:
                tier = Tier.IMAGE if move is Move.RESTORE else Tier.PARKED
                await self._agent.probe(await self._agent.start(_SLOT, tier), host=True)
        except ElasticError as exc:
            return f"{type(exc).__name__}: {exc}"
        return ""

    async def _once(self) -> None:
        """The next try: restored, parked, back again. Raises ElasticError."""
        started = await self._agent.start(_SLOT, Tier.IMAGE)
        await self._agent.park(started)
        await self._agent.probe(await self._agent.start(_SLOT, Tier.PARKED), host=True)

    async def _clear(self) -> None:
        """The slot has no engine, neither serving nor parked."""
        for slot in await self._agent.client.slots():
            if slot.slot == _SLOT and slot.incarnation:
                await self._agent.client.stop_engine(slot.slot, slot.incarnation)
        await self._agent.client.evict(None)


@asynccontextmanager
async def parker(
    config: DeploymentConfig,
    failpoints: Path,
    used_mib: Callable[[], int],
    **sizes: Any,
) -> AsyncIterator[Parker]:
    """`config` has an image of the first slot. No process is left."""
    async with GpuAgent(config, {KILL_ONCE_DIR: str(failpoints)}, **sizes) as agent:
        other = await agent.start(_OTHER, Tier.COLD)
        yield Parker(agent, other, failpoints, used_mib)
