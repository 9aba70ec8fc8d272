"""Engine processes and what a coordinator would have them do: for tests without a control plane."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

from dynamo_elastic.engine.base import EngineStatus, Finish, Output, PushReport, Request
from dynamo_elastic.engine.reference.model import TileSize
from dynamo_elastic.engine.reference.oracle import Oracle
from dynamo_elastic.errors import ElasticError, EngineError
from dynamo_elastic.testing.engine_process import AttachedEngine, EngineProcess, engine_config
from dynamo_elastic.topology import (
    EngineShape,
    MoveRound,
    PlanInput,
    ScalePlan,
    Topology,
    move_rounds,
    plan_scale,
)
from dynamo_elastic.types import Epoch, Rank, WorkerId

T = TypeVar("T")
E = TypeVar("E", bound=AttachedEngine)

TILE = TileSize(batch_tokens=4, max_context=64)
SHAPE = EngineShape(num_experts=8, slots_per_rank=4)
"""For engine_process.SMALL_SHAPE: two ranks hold it without replicas."""

TIMEOUT_S = 20.0
NONE = Topology(Epoch(0))


class Fleet(Generic[E]):
    """Engines by worker id, and what a coordinator would have them do."""

    def __init__(self, engines: Sequence[E], shape: EngineShape = SHAPE) -> None:
        self.all = {e.worker_id: e for e in engines}
        self._shape = shape
        self.in_force = NONE
        self.connect_timeout_s = TIMEOUT_S

    def of(self, topology: Topology) -> list[E]:
        """Its members, except for those that are lost."""
        return [self.all[w] for w in topology.worker_ids if w in self.all]

    def plan(self, target: int, *, skipped_epochs: int = 0) -> ScalePlan:
        """`skipped_epochs` were used since the one in force and came to nothing. Members that are
        not in `all` any more are lost."""
        epoch = Epoch(self.in_force.epoch + 1 + skipped_epochs)
        lost = frozenset(w for w in self.in_force.worker_ids if w not in self.all)
        candidates = list(self.all)
        return plan_scale(
            PlanInput(self.in_force, target, epoch, self._shape, candidates, lost=lost)
        )

    async def connect(self, after: Topology) -> None:
        members = self.of(after)
        opened = await each(
            members,
            lambda e: e.client.open_epoch(after.epoch, _rank(after, e), after.world_size),
        )
        endpoints = {e.worker_id: endpoint for e, endpoint in zip(members, opened, strict=True)}
        timeout_s = self.connect_timeout_s
        await each(members, lambda e: e.client.connect_epoch(after, endpoints, timeout_s=timeout_s))

    async def decide(self, epoch: Epoch, workers: Sequence[WorkerId]) -> None:
        """Tell `workers` of the decision."""
        await each([self.all[w] for w in workers], lambda e: e.client.decide(epoch))

    async def switch(self, after: Topology) -> None:
        await self.decide(after.epoch, after.worker_ids)
        await self.switched(after, after.worker_ids)

    async def switched(self, after: Topology, workers: Sequence[WorkerId]) -> None:
        """Return once `workers` have made the switch."""
        await each(
            [self.all[w] for w in workers],
            lambda e: e.client.wait_switched(after.epoch, timeout_s=TIMEOUT_S),
        )
        self.in_force = after

    async def boot(self, ranks: int) -> None:
        after = self.plan(ranks).after
        await self.connect(after)
        members = zip(self.of(after), after.members, strict=True)
        await asyncio.gather(*(e.client.load_weights(m.experts) for e, m in members))
        await self.switch(after)

    async def join(self, plan: ScalePlan) -> None:
        """Up to the decision: joiners connected, with proven dense weights."""
        await self.connect(plan.after)
        sources = [self.all[w] for w in plan.retained]
        reports = await each(
            sources,
            lambda e: e.client.push_dense(plan.after.epoch, plan.retained, plan.joiners),
        )
        for worker in plan.joiners:
            answer = await self.all[worker].client.check(reports[0].digests[worker])
            _require({r.probe for r in reports} == {answer["probe"]}, f"{worker}: probe differs")

    async def rebalance(self, before: Topology, after: Topology) -> None:
        for step in move_rounds(before, after):
            await self._round(step)
            self.in_force = step.result

    async def _round(self, step: MoveRound) -> None:
        members = self.of(step.routing)
        await each(members, lambda e: e.client.install(step.routing, {}))
        reports = await each(
            members,
            lambda e: e.client.push_experts(step.routing.epoch, e.worker_id, step.moves),
        )
        digests = _digests(reports)
        await each(members, lambda e: e.client.install(step.result, digests.get(e.worker_id, {})))

    async def scale_up(self, target: int, *, skipped_epochs: int = 0) -> ScalePlan:
        plan = self.plan(target, skipped_epochs=skipped_epochs)
        await self.join(plan)
        await self.switch(plan.after)
        canaries = await each(self.of(plan.after), lambda e: e.client.canary())
        _require(len(set(canaries)) == 1, f"canaries differ: {canaries}")
        await self.rebalance(plan.after, plan.settled)
        return plan

    async def scale_down(self, target: int, *, skipped_epochs: int = 0) -> ScalePlan:
        plan = self.plan(target, skipped_epochs=skipped_epochs)
        leavers = [self.all[w] for w in plan.leavers if w in self.all]
        await each(leavers, lambda e: e.client.drain(short_tokens=2, timeout_s=TIMEOUT_S))
        await self.rebalance(self.in_force, plan.settled)
        await self.connect(plan.after)
        await self.switch(plan.after)
        await each(self.of(plan.after), lambda e: e.client.disconnect(plan.after.epoch))
        # Their group is older than the one in force; each lets go of its peers.
        await each(leavers, lambda e: e.client.disconnect(plan.after.epoch))
        return plan


def _rank(topology: Topology, engine: AttachedEngine) -> Rank:
    return Rank(topology.worker_ids.index(engine.worker_id))


def _digests(reports: Sequence[PushReport]) -> dict[WorkerId, dict[str, str]]:
    merged: dict[WorkerId, dict[str, str]] = {}
    for report in reports:
        for worker, digests in report.digests.items():
            merged.setdefault(worker, {}).update(digests)
    return merged


async def each(engines: Sequence[E], act: Callable[[E], Awaitable[T]]) -> list[T]:
    return list(await asyncio.gather(*(act(e) for e in engines)))


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ElasticError(otherwise)


@asynccontextmanager
async def fleet(
    model: Path,
    run_dir: Path,
    count: int,
    *,
    shape: EngineShape = SHAPE,
    peer_timeout_s: float = 3.0,
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[Fleet[EngineProcess]]:
    """`count` attached engines; `environment` is that of the last."""
    config = engine_config(
        model,
        run_dir,
        slots_per_rank=shape.slots_per_rank,
        batch_tokens=TILE.batch_tokens,
        max_context=TILE.max_context,
        kv_blocks=16,
        peer_timeout_s=peer_timeout_s,
    )
    engines = [EngineProcess(config, slot) for slot in range(count)]
    try:
        for engine in engines:
            await engine.attach(environment if engine is engines[-1] else None)
        yield Fleet(engines, shape)
    except BaseException as exc:
        for engine in engines:
            exc.add_note(f"{engine.worker_id}: {engine.log()}")
        raise
    finally:
        for engine in engines:
            await engine.stop()


class FleetLoad:
    """Requests that keep coming, each to one of `workers`; what moves goes on with the first."""

    def __init__(self, fleet: Fleet[Any], workers: Sequence[WorkerId]) -> None:
        self._fleet = fleet
        self._workers = workers
        self._stop = False
        self.told: list[tuple[Request, tuple[int, ...]]] = []
        self.moved = 0
        self.longest_s = 0.0
        """Time from asking to the last token, of the slowest request."""

    @asynccontextmanager
    async def running(self, streams: int = 3) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._stream(i)) for i in range(streams)]
        try:
            yield
        finally:
            self._stop = True
            await asyncio.gather(*tasks)

    async def _stream(self, stream: int) -> None:
        number = 0
        while not self._stop:
            number += 1
            prompt = tuple(1 + (stream * 7 + number + i) % 60 for i in range(3 + number % 9))
            request = Request(f"{stream}/{number}", prompt, 24, seed=number, temperature=1.0)
            began_s = time.monotonic()
            self.told.append((request, await self._generate(request, stream)))
            self.longest_s = max(self.longest_s, time.monotonic() - began_s)

    async def _generate(self, request: Request, stream: int) -> tuple[int, ...]:
        worker = self._workers[stream % len(self._workers)]
        tokens: tuple[int, ...] = ()
        try:
            output: Output = await self._fleet.all[worker].generate(request)
        except EngineError as exc:
            if "drains" not in str(exc):
                raise
        else:
            tokens = output.tokens
            if output.finish is Finish.LENGTH:
                return tokens
            _require(output.finish is Finish.MOVED, f"{output}")
        self.moved += 1
        rest = Request(
            request.request_id,
            request.prompt + tokens,
            request.max_tokens - len(tokens),
            request.seed,
            request.temperature,
        )
        output = await self._fleet.all[self._workers[0]].generate(rest)
        _require(output.finish is Finish.LENGTH, f"{output}")
        return tokens + output.tokens

    def check(self, oracle: Oracle) -> None:
        """Raise ElasticError unless every request was answered as by one rank alone."""
        _require(bool(self.told), "nothing was asked")
        for request, tokens in self.told:
            _require(tokens == oracle.generate(request), f"other tokens for {request}")


async def masked(engine: AttachedEngine) -> EngineStatus:
    """The status of `engine` once it has masked a peer."""
    async with asyncio.timeout(TIMEOUT_S):
        while not (status := await engine.client.status()).masked:
            await asyncio.sleep(0.05)
    return status
