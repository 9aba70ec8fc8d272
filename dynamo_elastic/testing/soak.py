"""A soak: a walk at random among the legal widths, under streaming load, with every component ended
and started anew on the way; and all that must hold meanwhile, checked.

A walk follows from its seed, but for the moments at which things happen. What the streams said is
folded into a Tally after every resize, and what etcd saw is checked and forgotten at every rest, so
that the soak itself does not grow with what it does.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Collection
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from dynamo_elastic.agent.base import SlotState
from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.coordinator.records import OutcomeStatus, TargetOutcome
from dynamo_elastic.coordinator.status import Status, read_status
from dynamo_elastic.coordinator.store import Put
from dynamo_elastic.coordinator.targets import request_scale, wait_outcome
from dynamo_elastic.demo.load import Load, Prompt, StreamResult, reference_texts
from dynamo_elastic.demo.run import demo_config
from dynamo_elastic.dynamo.decisions import PlannerKeys
from dynamo_elastic.errors import ElasticError, OutcomeUnknown, StoreError
from dynamo_elastic.serve.deployment import Deployment, running
from dynamo_elastic.serve.ready import http_ok, model_listed
from dynamo_elastic.testing.chaos.checker import check_serving, check_writes
from dynamo_elastic.testing.chaos.history import History, Write
from dynamo_elastic.testing.chaos.recorder import Recorder
from dynamo_elastic.testing.cycles import Footprints, MovedRequests, footprints
from dynamo_elastic.testing.rest import NotAtRest, at_rest, unrest

REST_WIDTH = 1
"""At which footprints are taken: the same each time, as every rank holds something."""

REST_EVERY = 5
"""Resizes between two footprints."""

RESTART_EVERY = 15
"""Resizes between two restarts, unless told otherwise."""

HEAL_S = 240.0
"""In this time the deployment is whole again, whatever was ended, or it hangs."""

WINDOW_S = 20.0
"""For which a rank that was put out may go on serving: lease, eviction and their waits."""
_SETTLE_S = 1.0
_POLL_S = 0.1
_PAUSE_S = 0.3
_SHOWN_ERRORS = 5
_REFERENCE_TIMEOUT_S = 180.0


class Component(StrEnum):
    """What is ended and started anew: by SIGKILL, but for etcd and the frontend, of which there is
    one each and which are asked to stop."""

    COORDINATOR = "coordinator"
    AGENT = "agent"
    SHELL = "shell"
    ENGINE = "engine"
    PLANNER = "planner"
    FRONTEND = "frontend"
    ETCD = "etcd"


def soak_config(work_dir: Path, deployment: str) -> DeploymentConfig:
    """The demo's model with ranks that can hold all of its experts alone. A planner that is no
    process of `serve` decides: the walk stands in for it."""
    return demo_config(
        work_dir,
        deployment,
        planner={"enabled": True, "start": False},
        scale={
            "initial_ranks": 1,
            "min_ranks": 1,
            "step_timeout_s": 15,
            "quarantine_s": 1.0,
        },
        snapshot={"quarantine_s": 1.0},
        engine={"slots_per_rank": 16},
    )


@dataclass(slots=True)
class Tally:
    """All streams so far. `reference` is the text of each prompt, from one rank that never
    scaled; gaps are between two tokens of one stream."""

    reference: dict[str, str]
    requests: int = 0
    failed: int = 0
    unequal: int = 0
    moved: int = 0
    """Of the streams that ended well, how many had been moved."""
    gap_max_s: float = 0.0
    """Of streams that stayed where they began."""
    moved_gap_max_s: float = 0.0
    errors: set[str] = field(default_factory=set)
    _awaited: set[str] = field(default_factory=set)
    """Moved, and not ended yet."""

    def add(self, results: list[StreamResult], moved: set[str]) -> None:
        """Take in streams that ended, and the ids of those that were moved before now."""
        self._awaited |= moved
        for result in results:
            self._add(result, result.request_id in self._awaited)
            self._awaited.discard(result.request_id)

    def _add(self, result: StreamResult, moved: bool) -> None:
        self.requests += 1
        if result.error:
            self.failed += 1
            self.errors = set(sorted(self.errors | {result.error})[:_SHOWN_ERRORS])
            return
        self.unequal += result.text != self.reference.get(result.prompt.key)
        if moved:
            self.moved += 1
            self.moved_gap_max_s = max(self.moved_gap_max_s, result.max_gap_s)
        else:
            self.gap_max_s = max(self.gap_max_s, result.max_gap_s)


IDLE = "_idle"


def marked(held: Footprints, parked: Collection[int]) -> Footprints:
    """With engines and shells of `parked` slots under names of their own: they hold less than those
    that serve, and which is which changes from rest to rest."""
    idle = {f"{kind}{slot}" for kind in ("engine", "slot") for slot in parked}

    def name(process: str) -> str:
        role, _, pid = process.partition(":")
        return f"{role}{IDLE}:{pid}" if role in idle else process

    return {name(process): footprint for process, footprint in held.items()}


@dataclass(frozen=True, slots=True)
class Rest:
    """What was held after so many resizes, at REST_WIDTH."""

    resizes: int
    footprints: Footprints
    etcd_keys: int


@dataclass(slots=True)
class SoakResult:
    """A walk so far."""

    seed: int
    tally: Tally
    resizes: int = 0
    """Operations that reached the width that they were asked for."""
    retried: int = 0
    """Targets that were asked for again: a restart had come in between."""
    resize_s: list[float] = field(default_factory=list)
    restarts: dict[str, int] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    rests: list[Rest] = field(default_factory=list)


@dataclass(slots=True)
class Walk:
    """One walk over a running deployment; step() until it has lasted long enough."""

    deployment: Deployment
    load: Load
    recorder: Recorder
    result: SoakResult
    rng: random.Random
    prompts: list[Prompt]
    clients: int
    restart_every: int
    _decision: int = 0
    _stored: dict[str, Write] = field(default_factory=dict)
    _moved: MovedRequests = field(init=False)

    def __post_init__(self) -> None:
        self._moved = MovedRequests(self.deployment.config)

    async def step(self) -> None:
        """One resize, and what is due after it."""
        done, width = self.result.resizes, (await self.status()).width
        resting = (done + 1) % REST_EVERY == 0 and width != REST_WIDTH
        widths = range(1, self.deployment.config.scale.max_ranks + 1)
        others = [n for n in widths if n != width]
        await self.resize(REST_WIDTH if resting else self.rng.choice(others))
        self._count_streams()
        if resting:
            await self._rest()
        if self.result.resizes % self.restart_every == 0:
            turn = self.result.resizes // self.restart_every
            parts = list(Component)
            await self.restart(parts[turn % len(parts)])

    async def resize(self, ranks: int) -> None:
        """The deployment is whole with `ranks` ranks. Raises ElasticError after HEAL_S."""
        deadline_s = time.monotonic() + HEAL_S
        while True:
            began_s = time.monotonic()
            outcome = await self._ask(ranks)
            reached = outcome is not None and outcome.status is OutcomeStatus.REACHED
            status = await self._whole(deadline_s)
            if status.width == ranks:
                self.result.resizes += 1
                self.result.resize_s.append(time.monotonic() - began_s)
                return
            self.result.retried += not reached

    async def _ask(self, ranks: int) -> TargetOutcome | None:
        """Ask as a user or as the planner does; None if nobody has answered yet."""
        d = self.deployment
        with suppress(StoreError):
            if self.rng.random() < 0.5:
                request = await request_scale(d.store, d.keys, ranks, "cli")
                return await wait_outcome(d.store, d.keys, request, timeout_s=HEAL_S / 3)
            keys = PlannerKeys(d.config.namespace)
            number = b"%d" % self._decision
            self._decision += 1
            await d.store.txn([], [Put(keys.ranks, b"%d" % ranks), Put(keys.decision, number)])
            await self._acknowledged(keys, number)
        return None

    async def _acknowledged(self, keys: PlannerKeys, number: bytes) -> None:
        deadline_s = time.monotonic() + HEAL_S / 3
        while time.monotonic() < deadline_s:
            stored = await self.deployment.store.get(keys.acknowledged)
            if stored is not None and stored.value == number:
                return
            await asyncio.sleep(_POLL_S / 2)
        raise OutcomeUnknown(f"decision {number.decode()} is not acknowledged")

    async def _whole(self, deadline_s: float) -> Status:
        try:
            return await at_rest(self.status, _unrest, deadline_s=deadline_s, poll_s=_POLL_S)
        except NotAtRest as exc:
            raise ElasticError(f"not whole after {HEAL_S:g} s: {exc}") from exc

    async def status(self) -> Status:
        return await read_status(self.deployment.store, self.deployment.keys)

    async def restart(self, part: Component) -> None:
        """End `part`; it, or its successor, is there again when this returns."""
        self.result.restarts[part] = self.result.restarts.get(part, 0) + 1
        supervisor = self.deployment.supervisor
        if part is Component.PLANNER:
            self._decision = 0  # a new one counts from 0
        elif part is Component.ETCD:
            await supervisor.restart("etcd")
        elif part is Component.FRONTEND:
            await self._without_clients(self._restart_frontend)
        elif part in (Component.COORDINATOR, Component.AGENT):
            os.kill(supervisor.pids[part], signal.SIGKILL)
        else:
            # With others that its streams can go on at.
            await self.resize(max(3, (await self.status()).width - 1))
            await self._kill_rank(part)
        await asyncio.sleep(_SETTLE_S)
        await self._whole(time.monotonic() + HEAL_S)

    async def _kill_rank(self, part: Component) -> None:
        slot = self.rng.choice([s for s in await self.deployment.agent.slots() if s.incarnation])
        if part is Component.ENGINE:
            os.kill(slot.pid, signal.SIGKILL)
        else:
            os.kill(self.deployment.supervisor.pids[f"slot{slot.slot}"], signal.SIGKILL)

    async def _without_clients(self, act: Callable[[], object]) -> None:
        await self.load.stop()
        self._count_streams()
        await act()  # type: ignore[misc]
        d = self.deployment
        self.load = _load(d, self.prompts, self.clients)
        self.load.start()

    async def _restart_frontend(self) -> None:
        d = self.deployment
        await d.supervisor.restart("frontend")
        await asyncio.wait_for(http_ok(f"{d.url}/health")(), HEAL_S)
        await model_listed(d.url, d.config.model.name, timeout_s=HEAL_S)

    def _count_streams(self) -> None:
        # Ids first: who has ended by now was moved before.
        moved = self._moved.new()
        self.result.tally.add(self.load.take(), moved)

    async def _rest(self) -> None:
        await asyncio.sleep(_SETTLE_S)
        self.check()
        d = self.deployment
        keys = len(await d.store.get_prefix(d.keys.prefix))
        parked = {s.slot for s in await d.agent.slots() if s.state is SlotState.PARKED}
        held = marked(await footprints(d), parked)
        self.result.rests.append(Rest(self.result.resizes, held, keys))

    def check(self) -> None:
        """Judge what was recorded since the last time, and forget it."""
        writes, seen = self.recorder.take()
        before = sorted(self._stored.values(), key=lambda w: w.revision)
        history = History(self.deployment.keys.prefix, before, {}, writes, seen)
        for write in writes:
            if write.value is None:
                self._stored.pop(write.key, None)
            else:
                self._stored[write.key] = write
        found = [*check_writes(history), *check_serving(history, WINDOW_S)]
        self.result.violations += [f"{v.rule}: {v.what}" for v in found]


def _unrest(status: Status) -> str:
    """Nothing stands in the way of what is wanted, too."""
    if why := unrest(status):
        return why
    waits = status.target is not None and status.target.ranks != status.width
    return f"{status.width} ranks: {status.notice}" if waits and status.notice else ""


def _load(deployment: Deployment, prompts: list[Prompt], clients: int) -> Load:
    """Light: a rank that waits for a request takes no processor time from the resizes."""
    name = deployment.config.model.name
    return Load(deployment.url, name, prompts, clients, pause_s=_PAUSE_S)


async def soak(
    config: DeploymentConfig,
    prompts: list[Prompt],
    *,
    seed: int,
    clients: int,
    lasts: Callable[[SoakResult], bool],
    say: Callable[[str], None],
    restart_every: int = RESTART_EVERY,
) -> SoakResult:
    """Serve `config`, and walk for as long as `lasts` says, which sees the result after each step.
    A deployment that hangs ends the walk: that is a violation."""
    async with AsyncExitStack() as stack:
        deployment = await stack.enter_async_context(running(config, say))
        recorder = Recorder(config.etcd.urls, config, deployment.keys.prefix)
        await stack.enter_async_context(recorder.running())
        load = _load(deployment, prompts, clients)
        load.start()
        await load.wait_for_each_prompt(timeout_s=_REFERENCE_TIMEOUT_S)
        result = SoakResult(seed, Tally(reference_texts(load.results)))
        rng = random.Random(seed)
        walk = Walk(deployment, load, recorder, result, rng, prompts, clients, restart_every)
        try:
            while lasts(result):
                await walk.step()
        except ElasticError as exc:
            result.violations.append(f"hang: {exc}")
        await walk.load.stop()
        walk.check()
        result.tally.add(walk.load.take(), set())
    return result
