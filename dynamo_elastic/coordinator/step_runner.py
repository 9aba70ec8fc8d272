"""Runs the steps of the phase table: commands them, judges the answers, takes in what they say."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dynamo_elastic.config import ScaleConfig
from dynamo_elastic.coordinator import steps
from dynamo_elastic.coordinator.commands import Commander, Order
from dynamo_elastic.coordinator.progress import Progress
from dynamo_elastic.coordinator.records import AckRecord, to_json
from dynamo_elastic.coordinator.steps import Digests
from dynamo_elastic.errors import ParticipantFailed, PhaseTimeout, TargetRefused
from dynamo_elastic.phases import Step, Who
from dynamo_elastic.topology import ExpertMove, Topology, move_rounds
from dynamo_elastic.types import WorkerId

Acks = Mapping[WorkerId, AckRecord]


class StepRunner:
    """Runs steps of one operation. Before COMMIT whatever is not right raises ParticipantFailed or
    PhaseTimeout; after it who fails is noted, and lost if it can't be a member any more."""

    def __init__(self, progress: Progress, commander: Commander, config: ScaleConfig) -> None:
        self._progress = progress
        self._commander = commander
        self._config = config
        self._digests: Digests = {}

    async def run(self, step: Step, who: Who) -> None:
        """One step for all of `who`."""
        progress = self._progress
        workers = steps.participants(progress.record, who)
        if step is Step.PUSH_EXPERTS:
            return await self._move_experts(workers)
        # An engine that can't be ended before a boot shows when its slot is to be used again.
        strict = not progress.committed and step is not Step.PARK
        done = await self._command(step, workers, strict=strict)
        if step is Step.RESTORE:
            self._take_incarnations(done)
        elif step is Step.STREAM:
            self._digests = self._agreed_digests(step, done)
        elif step is Step.CHECK:
            for worker in steps.odd_ones(done, workers, "probe"):
                raise progress.failure(step, worker, "its probe differs from the reference")
        elif step is Step.CANARY:
            for worker in steps.odd_ones(done, workers, "tokens"):
                progress.lose(step, worker, "its tokens differ from the reference")
        elif step is Step.PARK and progress.committed:
            progress.update(safe_to_release=tuple(done))

    async def abort(self) -> None:
        """Tell everyone who is still there to forget the new epoch; who fails has no say."""
        await self._command(Step.ABORT, steps.everyone(self._progress.record), strict=False)

    async def _move_experts(self, members: Sequence[WorkerId]) -> None:
        """Bring every expert to its place in `plan.settled`, in rounds, while serving goes on.

        A failure after COMMIT ends the moves where they are: what is in force then is right, only
        not as even as planned.
        """
        progress = self._progress
        if progress.committed and progress.record.lost:
            return
        try:
            await self._move_rounds(members)
        except (PhaseTimeout, ParticipantFailed, TargetRefused) as exc:
            if not progress.committed:
                raise
            progress.update(failure=f"rebalance stopped: {exc.reason}")

    async def _move_rounds(self, members: Sequence[WorkerId]) -> None:
        record = self._progress.record
        current = steps.without_experts(self._progress.in_force, record.lost)
        routed: Topology | None = None
        for round_ in move_rounds(current, record.plan.settled):
            routing = replace(round_.routing, placement=current.placement + 1)
            # Stored before anybody routes by it: true whatever becomes of this round.
            await self._save_current(routing)
            # Who routes by what before the first round is not known after a recovery or an abort.
            if routed is None or routed.members != routing.members:
                await self._install(members, routing, {})
            digests = await self._push(routing, round_.moves)
            # Nobody may route to a copy that has not been proven where it arrived.
            await self._install(tuple(digests), routing, digests)
            current = replace(round_.result, placement=routing.placement + 1)
            await self._install(members, current, {})
            await self._save_current(current)
            routed = current

    async def _push(self, routing: Topology, moves: Sequence[ExpertMove]) -> Digests:
        by_source: dict[WorkerId, list[Any]] = {}
        for move in moves:
            by_source.setdefault(move.from_worker, []).append(to_json(move))
        topology = to_json(routing)
        bodies = {w: {"topology": topology, "moves": m} for w, m in by_source.items()}
        done = await self._send(Step.PUSH_EXPERTS, bodies, strict=True)
        return self._agreed_digests(Step.PUSH_EXPERTS, done)

    async def _install(
        self, workers: Sequence[WorkerId], topology: Topology, digests: Digests
    ) -> None:
        body = to_json(topology)
        bodies = {w: {"topology": body, "digests": digests.get(w, {})} for w in workers}
        await self._send(Step.INSTALL, bodies, strict=True)

    async def _save_current(self, topology: Topology) -> None:
        self._progress.update(current=topology)
        await self._progress.save()

    async def _command(self, step: Step, workers: Sequence[WorkerId], *, strict: bool) -> Acks:
        record = self._progress.record
        bodies = {w: steps.payload(step, w, record, self._config, self._digests) for w in workers}
        return await self._send(step, bodies, strict=strict)

    async def _send(
        self, step: Step, bodies: Mapping[WorkerId, dict[str, Any]], *, strict: bool
    ) -> Acks:
        """Command one step; returns the acks of who has done it: with `strict` that is all."""
        if not bodies:
            return {}
        progress, clock = self._progress, asyncio.get_running_loop().time
        timeout_s, began_s = steps.timeout_s(step, self._config), clock()
        order = Order(step, bodies, timeout_s, fail_fast=strict)
        answers = await self._commander.run(order, progress.journal.guard())
        progress.note(step, answers, clock() - began_s)
        if strict:
            for worker, why in (answers.failed | answers.lost).items():
                raise progress.failure(step, worker, why)
            if answers.silent:
                raise progress.timeout(step, answers.silent, timeout_s)
        for worker, why in answers.failed.items():
            progress.lose(step, worker, why)
        for worker, why in answers.lost.items():
            progress.lose(step, worker, why, gone=True)
        for worker in answers.silent:
            progress.lose(step, worker, f"no answer in {timeout_s:g} s")
        return answers.done

    def _take_incarnations(self, done: Acks) -> None:
        for worker, ack in done.items():
            if not ack.payload.get("incarnation"):
                raise self._progress.failure(Step.RESTORE, worker, "no incarnation in its answer")
        plan = steps.with_incarnations(self._progress.record.plan, done)
        self._progress.update(plan=plan)

    def _agreed_digests(self, step: Step, done: Acks) -> Digests:
        digests, disputed = steps.merge_digests(done.values())
        if disputed:
            why = f"the sources disagree on {', '.join(disputed[:3])}"
            raise self._progress.failure(step, next(iter(done)), why)
        return digests
