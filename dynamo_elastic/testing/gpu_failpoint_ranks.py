"""Ranks that share one GPU: one serves, others join it and leave again, and are hurt on the way.

Whoever is hurt, the one that serves goes on with the right tokens, nothing of the hurt one is left
on the GPU, and the next that comes joins and leaves.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path

from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.engine.base import DETACHED_FILE, Request
from dynamo_elastic.engine.client import EngineClient
from dynamo_elastic.errors import ElasticError, EngineError
from dynamo_elastic.failpoints import KILL_ONCE_DIR, TRACE_FILE, Act
from dynamo_elastic.testing.chaos.gpu_scenario import VIA, GpuScenario
from dynamo_elastic.testing.chaos.verdict import Verdict
from dynamo_elastic.testing.engine_process import EngineProcess
from dynamo_elastic.testing.fleet import Fleet, FleetLoad, masked
from dynamo_elastic.testing.gpu_meter import not_freed
from dynamo_elastic.topology import EngineShape

SPARES = 6
_RUN_S = 30.0
"""A run that takes longer hangs."""
_CONNECT_S = 2.0
_SERVES_S = 5.0
_SILENCE_S = 4.0
_POLL_S = 0.01
WRONG = "other tokens"
_ANSWER = Request("whole", (1, 2, 3), 12, temperature=0.0)

UsedMib = Callable[[], int]


class Ranks:
    """`async with ranks(...)` makes one. Slot 0 serves; the others wait, booted, to join it."""

    def __init__(
        self,
        config: DeploymentConfig,
        shape: EngineShape,
        environment: dict[str, str],
        failpoints: Path,
        used_mib: UsedMib,
    ) -> None:
        self._config = config
        self._environment = environment
        self._failpoints = failpoints
        self._used_mib = used_mib
        self._first = self._process(0)
        self._fleet: Fleet[EngineProcess] = Fleet([self._first], shape)
        self._fleet.connect_timeout_s = _CONNECT_S
        self._load = FleetLoad(self._fleet, [self._first.worker_id])
        self._spares: list[EngineProcess] = []
        self._tried = self._fleet.in_force
        """What the last operation was to lead to, come to pass or not."""
        self._tokens: tuple[int, ...] = ()
        self._alone_mib = 0

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """The first rank serves, under load."""
        await self._attach(self._first)
        await self._fleet.boot(1)
        self._tokens = (await self._first.generate(_ANSWER)).tokens
        self._alone_mib = self._used_mib()
        async with self._load.running(streams=2):
            yield

    async def passed(self) -> set[str]:
        """Which failpoints a rank passes that joins and leaves."""
        trace = self._failpoints / TRACE_FILE
        trace.touch()
        rank = await self._spare()
        await self._in_and_out(rank)
        lines = [line.split(" ") for line in trace.read_text().splitlines()]
        trace.unlink()
        return {name for scope, name in lines if scope == rank.worker_id}

    async def play(self, scenario: GpuScenario) -> Verdict:
        """One run. After one that hangs nothing is to be done with these ranks any more."""
        rank = await self._spare()
        verdict = Verdict(
            scenario.number,
            str(scenario),
            scenario.move,
            scenario.place,
            rank.worker_id,
            scenario.act,
            fired=False,
        )
        told, began_s = len(self._load.told), time.monotonic()
        try:
            async with asyncio.timeout(_RUN_S):
                verdict.violations += await self._run(rank, scenario, verdict)
        except TimeoutError:
            verdict.hang = f"the others do not come to rest in {_RUN_S:g} s"
        verdict.seconds = round(time.monotonic() - began_s, 3)
        verdict.requests = len(self._load.told) - told
        verdict.silence_s = round(self._silence_s(began_s), 3)
        return verdict

    async def _run(self, rank: EngineProcess, scenario: GpuScenario, verdict: Verdict) -> list[str]:
        """What does not hold."""
        used_mib, began_s, found = self._used_mib(), time.monotonic(), []
        file = self._arm(rank, scenario)
        failure = await self._hurt(rank)
        verdict.fired = not file.exists()
        self._disarm()
        if failure:
            await self._recover(rank)
            self._spares.remove(rank)
            found += await self._next_one()
        if WRONG in failure or (failure and scenario.act is Act.DELAY):
            found.append(failure)
        if verdict.fired and scenario.act is Act.KILL and not failure:
            found.append("a rank that was killed went on")
        found += await self._still_right(began_s)
        if left := await not_freed(self._used_mib, used_mib):
            found.append(left)
        return found

    async def close(self) -> None:
        """No process is left. Idempotent."""
        for engine in (self._first, *self._spares):
            await engine.stop()

    async def grown(self) -> str:
        """What the first rank holds of all that have come and gone; '' if nothing."""
        for engine in self._spares:
            await engine.stop()
        self._spares.clear()
        left = await not_freed(self._used_mib, self._alone_mib)
        return f"after all runs {left}" if left else ""

    def _process(self, slot: int) -> EngineProcess:
        shutil.rmtree(self._config.control_dir(slot), ignore_errors=True)
        return EngineProcess(self._config, slot, self._environment)

    async def _spare(self) -> EngineProcess:
        """One that is booted and waits; when none is left, a number of them are booted."""
        if len(self._spares) < 2:  # the next one has to join as well
            taken = {e.worker_id for e in self._spares}
            numbers = [n for n in range(1, SPARES + 1) if f"slot{n}" not in taken]
            booted = [self._process(n) for n in numbers]
            self._spares += booted
            await asyncio.gather(*(e.detached() for e in booted))
        return self._spares[0]

    async def _attach(self, rank: EngineProcess) -> None:
        await rank.attach({KILL_ONCE_DIR: str(self._failpoints)})

    def _arm(self, rank: EngineProcess, scenario: GpuScenario) -> Path:
        file = self._failpoints / f"{rank.worker_id}:{scenario.place}"
        if via := VIA.get(scenario.place):
            (self._failpoints / f"{rank.worker_id}:{via}").write_text(Act.ERROR)
        file.write_text(scenario.content)
        return file

    def _disarm(self) -> None:
        for file in self._failpoints.glob("*:*"):
            file.unlink()

    async def _hurt(self, rank: EngineProcess) -> str:
        """Why `rank` did not join and leave as it should; '' if it did."""
        try:
            await self._in_and_out(rank)
        except (ElasticError, TimeoutError, OSError) as exc:
            return f"{type(exc).__name__}: {exc}"
        return ""

    async def _in_and_out(self, rank: EngineProcess) -> None:
        """It joins, answers, leaves and is detached."""
        await self._attach(rank)
        self._fleet.all[rank.worker_id] = rank
        await self._fleet.scale_up(2, skipped_epochs=self._try(2))
        answer = (await rank.generate(_ANSWER)).tokens
        if answer != self._tokens:
            raise EngineError(f"{WRONG}: {answer} instead of {self._tokens}")
        await self._fleet.scale_down(1, skipped_epochs=self._try(1))
        del self._fleet.all[rank.worker_id]
        (rank.control_dir / DETACHED_FILE).unlink(missing_ok=True)
        await rank.client.detach()
        await rank.detached()
        await rank.close()
        rank.client = EngineClient(rank.socket_path)

    def _try(self, target: int) -> int:
        """Epochs that were used since the one in force, before the next operation uses one."""
        skipped = max(0, self._tried.epoch - self._fleet.in_force.epoch)
        self._tried = self._fleet.plan(target, skipped_epochs=skipped).after
        return skipped

    async def _recover(self, rank: EngineProcess) -> None:
        """`rank` is gone, and the first one is alone in its group, as an operation would have it
        that is undone, or goes on without it."""
        await rank.stop()
        self._fleet.all.pop(rank.worker_id, None)
        await self._settle()
        if self._fleet.in_force.world_size > 1:
            with suppress(TimeoutError):
                await asyncio.wait_for(masked(self._first), _SERVES_S)
            await self._fleet.scale_down(1, skipped_epochs=self._try(1))

    async def _settle(self) -> None:
        """The operation that was tried is undone, or the first rank has made its switch."""
        tried = self._tried
        if tried.epoch <= self._fleet.in_force.epoch:
            return
        try:
            await self._first.client.abort_epoch(tried.epoch)
        except EngineError:
            await self._first.client.wait_switched(tried.epoch, timeout_s=_SERVES_S)
            self._fleet.in_force = tried

    async def _next_one(self) -> list[str]:
        """What does not hold of the next rank that joins and leaves."""
        failure = await self._hurt(self._spares[0])
        if not failure:
            return []
        await self._recover(self._spares.pop(0))
        return [f"the next try fails: {failure}"]

    async def _still_right(self, began_s: float) -> list[str]:
        """What does not hold of the first rank."""
        done = len(self._load.told)
        async with asyncio.timeout(_SERVES_S):
            while len(self._load.told) <= done:
                await asyncio.sleep(_POLL_S)
        found = []
        tokens = (await self._first.generate(_ANSWER)).tokens
        if tokens != self._tokens:
            found.append(f"the first rank gives {tokens} instead of {self._tokens}")
        if (silence_s := self._silence_s(began_s)) > _SILENCE_S:
            found.append(f"no token for {silence_s:.2f} s; {_SILENCE_S:g} s are allowed")
        return found

    def _silence_s(self, began_s: float) -> float:
        times = sorted(t for of in self._first.token_times.values() for t in of if t >= began_s)
        return max((b - a for a, b in pairwise(times)), default=0.0)


@asynccontextmanager
async def ranks(
    config: DeploymentConfig,
    shape: EngineShape,
    environment: dict[str, str],
    failpoints: Path,
    used_mib: UsedMib,
) -> AsyncIterator[Ranks]:
    """Serving ranks; no process of theirs is left."""
    made = Ranks(config, shape, environment, failpoints, used_mib)
    try:
        async with made.serving():
            yield made
    finally:
        await made.close()
