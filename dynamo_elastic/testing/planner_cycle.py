"""Load rises and falls, Dynamo's real planner follows it, and parts are killed in the middle.

Nobody asks for a width here: every target is the planner's own decision, from the load that the
ranks report to it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.coordinator.status import Status, read_status
from dynamo_elastic.demo.load import Load, Prompt, reference_texts
from dynamo_elastic.demo.run import demo_config
from dynamo_elastic.errors import ElasticError, StoreError
from dynamo_elastic.phases import Kind, Phase
from dynamo_elastic.serve.deployment import Deployment, running
from dynamo_elastic.serve.ready import model_listed
from dynamo_elastic.testing.dynamo_cards import read_cards
from dynamo_elastic.testing.etcd_process import EtcdProcess
from dynamo_elastic.testing.planner_view import PlannerLog, connector_is_stable
from dynamo_elastic.testing.request_meter import Meter

PLANNER_SOURCE = "planner"
FEW = [Prompt("river stone light", 7, 20), Prompt("amber cloud", 8, 24)]
"""What is asked all the time."""
MANY = [Prompt(f"w{k} river w{k + 3}", k, 12 + 4 * (k % 5)) for k in range(10)]
"""What is asked while the load is high."""

_DECIDES_WITHIN_S = 150.0
_STABLE_WITHIN_S = 90.0
_BACK_WITHIN_S = 40.0
_ETCD_AWAY_S = 1.0
_POLL_S = 0.1


class Part(StrEnum):
    """What is killed (kill -9) and comes back."""

    PLANNER = "planner"
    COORDINATOR = "coordinator"
    FRONTEND = "frontend"
    ETCD = "etcd"


class Trend(StrEnum):
    """Which way the load goes, and so the planner."""

    RISES = "rises"
    FALLS = "falls"


@dataclass(frozen=True, slots=True)
class Half:
    """One half of a cycle as it went."""

    load: Trend
    ranks_before: int
    ranks_after: int
    elapsed_s: float
    """From the change of the load until the planner was at rest."""
    killed: str
    killed_in: str
    """Phase of the operation under way when the part was killed."""
    stable: bool
    """By the planner's own log, by its connector's keys, and by the cards of the ranks."""


@dataclass(slots=True)
class CycleResult:
    """All halves and all requests."""

    meter: Meter
    halves: list[Half] = field(default_factory=list)
    operations: dict[str, tuple[Kind, str]] = field(default_factory=dict)
    """Kind and source of every operation that was done."""

    def decided(self, kind: Kind) -> int:
        """Operations of `kind` that the planner had asked for."""
        return sum(done == (kind, PLANNER_SOURCE) for done in self.operations.values())


def cycle_config(work_dir: Path, etcd: EtcdProcess, **more: Any) -> DeploymentConfig:
    """The demo on an etcd of its own, with a KV cache that its clients can fill, and a planner that
    acts on how full it is."""
    sections: dict[str, dict[str, Any]] = {
        "etcd": {"start": False, "endpoints": [etcd.url]},
        "engine": {"kv_blocks": 24},
        "planner": {
            "interval_s": 1,
            "settings": {"decode_scale_up_kv_rate": 40, "decode_scale_down_kv_rate": 20},
        },
    }
    for name, values in more.items():
        sections[name] = {**sections.get(name, {}), **values}
    return demo_config(work_dir, "planner-cycle", **sections)


async def planner_cycles(
    config: DeploymentConfig,
    etcd: EtcdProcess,
    kills: Sequence[tuple[Part | None, Part | None]],
    *,
    clients: int,
    requests_min: int,
    say: Callable[[str], None],
) -> CycleResult:
    """One cycle for each of `kills`: what is killed while the load rises, and while it falls.

    Serving starts and ends at `scale.min_ranks`; the high load, of `clients` clients, takes it to
    `scale.max_ranks` and lasts until its share of `requests_min` has been answered. Raises
    ElasticError if the planner does not do its part in time.
    """
    async with running(config, say) as deployment:
        base = Load(deployment.url, config.model.name, FEW, 1)
        many = Load(deployment.url, config.model.name, MANY, 1)  # that moves no planner
        for load in (base, many):
            load.start()
            await load.wait_for_each_prompt(timeout_s=60.0)
        await many.stop()
        reference = reference_texts([*base.results, *many.results])
        runner = _Runner(deployment, etcd, CycleResult(Meter(reference)), clients, say)
        for number, (rising, falling) in enumerate(kills, 1):
            await runner.cycle(rising, falling, base, requests_min * number // len(kills))
        await base.stop()
        runner.result.meter.add([*many.take(), *base.take()])
    return runner.result


class _Runner:
    def __init__(
        self,
        deployment: Deployment,
        etcd: EtcdProcess,
        result: CycleResult,
        clients: int,
        say: Callable[[str], None],
    ) -> None:
        self.result = result
        self._deployment = deployment
        self._config = deployment.config
        self._etcd = etcd
        self._clients = clients
        self._say = say
        self._log = PlannerLog(self._config.state_dir / "logs" / "planner.log")

    async def cycle(
        self, rising: Part | None, falling: Part | None, base: Load, requests: int
    ) -> None:
        scale = self._config.scale
        surge = Load(self._deployment.url, self._config.model.name, MANY, self._clients)
        surge.start()
        await self._half(Trend.RISES, scale.max_ranks, rising)
        while self.result.meter.total < requests:
            self.result.meter.add([*base.take(), *surge.take()])
            await asyncio.sleep(_POLL_S)
        await surge.stop()
        self.result.meter.add(surge.take())
        await self._half(Trend.FALLS, scale.min_ranks, falling)
        self.result.meter.add(base.take())

    async def _half(self, load: Trend, ranks: int, part: Part | None) -> None:
        began_s, before = time.monotonic(), (await self._status()).width
        killed_in = ""
        if part is not None:
            killed_in = await self._kill_under_way(part)
        now = await self._until(
            lambda s: s.width == ranks and s.operation is None, f"{ranks} ranks", _DECIDES_WITHIN_S
        )
        stable = await self._at_rest(now)
        half = Half(load, before, ranks, time.monotonic() - began_s, part or "", killed_in, stable)
        self.result.halves.append(half)
        self._say(f"load {load}: {before} -> {ranks} ranks in {half.elapsed_s:.1f} s{_kill(half)}")

    async def _kill_under_way(self, part: Part) -> str:
        """Kill `part` while an operation of the planner is under way; returns in which phase."""
        now = await self._until(
            lambda s: s.operation is not None and s.operation.source == PLANNER_SOURCE,
            "a decision",
            _DECIDES_WITHIN_S,
        )
        if part is Part.ETCD:
            await asyncio.to_thread(self._etcd.kill)
            await asyncio.sleep(_ETCD_AWAY_S)
            await asyncio.to_thread(self._etcd.start)
        else:
            await self._kill_process(part)
        return now.operation.phase if now.operation is not None else ""

    async def _kill_process(self, part: Part) -> None:
        pids = self._deployment.supervisor.pids
        began_s = time.monotonic()
        os.kill(pids[part], signal.SIGKILL)
        async with asyncio.timeout(_BACK_WITHIN_S):
            while self._deployment.supervisor.pids[part] == pids[part]:
                await asyncio.sleep(0.01)
        if part is Part.FRONTEND:
            await self._frontend_is_back()
            self.result.meter.frontend_was_away(began_s, time.monotonic())

    async def _frontend_is_back(self) -> None:
        """As for any load balancer: it is asked for work once it lists the model."""
        async with asyncio.timeout(_BACK_WITHIN_S):
            while True:
                try:
                    return await model_listed(
                        self._deployment.url, self._config.model.name, timeout_s=_BACK_WITHIN_S
                    )
                except ElasticError:
                    await asyncio.sleep(0.02)

    async def _at_rest(self, now: Status) -> bool:
        """True once the planner says that it is stable at this width, the keys that it and we share
        agree, and every card is of the topology in force; False if that does not become so."""
        self._log.skip()
        deadline_s = time.monotonic() + _STABLE_WITHIN_S
        store, namespace = self._deployment.store, self._config.namespace
        while time.monotonic() < deadline_s:
            if self._log.stable_at(now.width) and await connector_is_stable(
                store, namespace, now.width
            ):
                try:
                    await read_cards(store, namespace, await self._status())
                except ElasticError as exc:
                    self._say(str(exc))
                    return False
                return True
            await asyncio.sleep(_POLL_S)
        self._say(f"planner not at rest at {now.width} ranks: {self._log.last}")
        return False

    async def _until(self, holds: Callable[[Status], bool], what: str, timeout_s: float) -> Status:
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            now = await self._status()
            if holds(now):
                return now
            await asyncio.sleep(_POLL_S)
        raise ElasticError(f"no {what} within {timeout_s:g} s; planner: {self._log.last}")

    async def _status(self) -> Status:
        while True:
            try:
                now = await read_status(self._deployment.store, self._deployment.keys)
            except StoreError:
                await asyncio.sleep(_POLL_S)
                continue
            if now.last is not None and now.last.phase is Phase.DONE:
                self.result.operations[now.last.operation_id] = (now.last.kind, now.last.source)
            return now


def _kill(half: Half) -> str:
    return f", {half.killed} killed in {half.killed_in}" if half.killed else ""
