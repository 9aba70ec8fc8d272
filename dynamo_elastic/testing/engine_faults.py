"""Ranks of a Fleet that are lost at a bad moment, and what must hold for those that live.

The tokens of every request are right, no token waits much longer than a peer may be silent, and the
next resize succeeds. Ranks hold every expert, so that none is lost with its rank.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dynamo_elastic.errors import ElasticError
from dynamo_elastic.testing.engine_process import EngineProcess
from dynamo_elastic.testing.fleet import Fleet, FleetLoad, each, masked
from dynamo_elastic.topology import ScalePlan
from dynamo_elastic.types import WorkerId

CONNECT_TIMEOUT_S = 3.0
_SETTLE_S = 0.5
_SERVES_TIMEOUT_S = 10.0
_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Losses:
    """Engines in slots 0 to `high` - 1 and one spare after them; `low` of them serve at first.

    `failpoints` is the directory of that name (KILL_ONCE_DIR) that all of them were given.
    """

    ranks: Fleet[EngineProcess]
    low: int
    high: int
    failpoints: Path

    @property
    def first(self) -> EngineProcess:
        return self.ranks.all[WorkerId("slot0")]

    @property
    def joiner(self) -> WorkerId:
        """The last of those that join, so that the others have met it before it goes."""
        return WorkerId(f"slot{self.high - 1}")

    def arm(self, worker: WorkerId, failpoint: str, act: str) -> None:
        (self.failpoints / f"{worker}:{failpoint}").write_text(act)

    async def lose(self, worker: WorkerId) -> None:
        """It is dead now, if it was not before, and everybody knows."""
        await self.ranks.all.pop(worker).stop()

    async def run(self, scenario: Callable[[], Awaitable[None]]) -> float:
        """`scenario`, while `low` ranks serve; what must hold is checked. Returns the longest time
        that a token of a request in slot 0 took to come after the one before."""
        spare = WorkerId(f"slot{self.high}")
        waiting = self.ranks.all.pop(spare)
        self.ranks.connect_timeout_s = CONNECT_TIMEOUT_S
        await self.ranks.boot(self.low)
        load = FleetLoad(self.ranks, [self.first.worker_id])
        async with load.running():
            await asyncio.sleep(_SETTLE_S)
            await scenario()
            await _serves(load)
            self.ranks.connect_timeout_s = 4 * CONNECT_TIMEOUT_S
            self.ranks.all[spare] = waiting
            await self.ranks.scale_up(self.high, skipped_epochs=1)
            await asyncio.sleep(_SETTLE_S)
        times = self.first.token_times.values()
        longest_s = max(b - a for t in times for a, b in itertools.pairwise(t))
        await self._same_again(load)
        return longest_s

    async def _same_again(self, load: FleetLoad) -> None:
        """Raise ElasticError unless requests get the same tokens with nothing going on."""
        for number, (request, tokens) in enumerate(load.told):
            if number % max(1, len(load.told) // 40) == 0:
                again = await self.first.generate(request)
                if again.tokens != tokens:
                    raise ElasticError(f"other tokens for {request}: {tokens}, {again.tokens}")

    async def before_commit(
        self, failpoint: str = "", act: str = "kill", *, when: str = ""
    ) -> None:
        """The joiner goes at its own `failpoint`, or is killed by us in the middle of the stream
        (`when` is "stream") or after its check ("check")."""
        plan = self.ranks.plan(self.high)
        if failpoint:
            self.arm(self.joiner, failpoint, act)
        with suppress(ElasticError):
            await self._attempt(plan, when)
            raise AssertionError("an operation whose joiner was lost has succeeded")
        await self.lose(self.joiner)
        staying = [self.ranks.all[w] for w in plan.after.worker_ids if w in self.ranks.all]
        await each(staying, lambda e: e.client.abort_epoch(plan.after.epoch))

    async def _attempt(self, plan: ScalePlan, when: str) -> None:
        """Up to the decision."""
        if when == "stream":
            self.arm(plan.retained[0], "weights.before_chunk", "delay 0.5")
            await asyncio.gather(self.ranks.join(plan), self._kill_in_stream())
        else:
            await self.ranks.join(plan)
        if when == "check":
            self.ranks.all[self.joiner].kill()
            joiner = self.ranks.all[self.joiner]
            await joiner.client.decide(plan.after.epoch)

    async def _kill_in_stream(self) -> None:
        """Once the source is in its push."""
        joiner = self.ranks.all[self.joiner]
        while list(self.failpoints.glob("*:weights.before_chunk")):
            await asyncio.sleep(_POLL_S)
        joiner.kill()

    async def after_commit(self) -> None:
        """The joiner has heard the decision, and dies in its first step."""
        plan = self.ranks.plan(self.high)
        await self.ranks.join(plan)
        self.arm(self.joiner, "engine.before_first_step", "kill")
        await self.ranks.decide(plan.after.epoch, plan.after.worker_ids)
        living = [w for w in plan.after.worker_ids if w != self.joiner]
        await self.ranks.switched(plan.after, living)
        await self._without(self.joiner)

    async def while_serving(self, act: signal.Signals) -> None:
        """A rank of the group in force dies, or stops."""
        await self.ranks.scale_up(self.high)
        worker = self.ranks.in_force.worker_ids[1]
        self.ranks.all[worker].process.send_signal(act)
        await self._without(worker)

    async def _without(self, worker: WorkerId) -> None:
        """`worker` is masked by the first rank, and leaves the group by the next operation."""
        await masked(self.first)
        await asyncio.sleep(_SETTLE_S)
        await self.lose(worker)
        await self.ranks.scale_down(self.ranks.in_force.world_size - 1)


async def _serves(load: FleetLoad) -> None:
    """Raise TimeoutError unless requests go on being answered."""
    done = len(load.told)
    async with asyncio.timeout(_SERVES_TIMEOUT_S):
        while len(load.told) <= done:
            await asyncio.sleep(_POLL_S)
