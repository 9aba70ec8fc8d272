"""Runs the steps of the phase table: commands them, judges the answers, takes in what they say."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dynamo_elastic.config_sections import ScaleConfig
from dynamo_elastic.coordinator import steps
from dynamo_elastic.coordinator.commands import Answers, Bodies, Commander, Order
from dynamo_elastic.coordinator.progress import Asked, Progress
from dynamo_elastic.coordinator.records import AckRecord, to_json
from dynamo_elastic.coordinator.steps import Digests
from dynamo_elastic.errors import ParticipantFailed, PhaseTimeout, TargetRefused
from dynamo_elastic.failpoints import failpoint
from dynamo_elastic.phases import Step, Who
from dynamo_elastic.topology import DISK, EMPTY, ExpertMove, Topology, move_rounds
from dynamo_elastic.types import WorkerId

Acks = Mapping[WorkerId, AckRecord]

_ABORT_ATTEMPTS = 2


class StepRunner:
    """Runs steps of one operation. Before COMMIT whatever is not right raises ParticipantFailed or
    PhaseTimeout; after it who fails is noted, and lost if it can't be a member any more."""

    def __init__(self, progress: Progress, commander: Commander, config: ScaleConfig) -> None:
        self._progress = progress
        self._commander = commander
        self._config = config
        self._digests: Digests = {}
        self._endpoints: dict[WorkerId, Any] = {}

    async def run(self, step: Step, who: Who) -> None:
        """One step for all of `who`."""
        progress = self._progress
        workers = steps.participants(progress.record, who)
        if step is Step.SWITCH:
            return await self._switch(workers)
        if progress.committed and progress.record.served is not None:
            return None  # the decision was withdrawn: what comes after it is the next operation's
        if step is Step.CANARY:
            return await self._prove(workers)
        if step is Step.PUSH_EXPERTS:
            return await self._move_experts(workers)
        # An engine that can't be ended before a boot shows when its slot is to be used again.
        strict = not progress.committed and step is not Step.PARK
        done = await self._command(step, workers, strict=strict)
        if step is Step.RESTORE:
            self._take_incarnations(done)
        elif step is Step.OPEN:
            self._endpoints = await self._commander.endpoints(progress.record.plan.after)
        elif step is Step.STREAM:
            self._digests = self._agreed_digests(step, done)
        elif step is Step.CHECK:
            for worker in steps.odd_ones(done, workers, "probe"):
                raise progress.failure(step, worker, "its probe differs from the reference")
        elif step is Step.SERVE:
            progress.served(done)
        elif step is Step.PARK and progress.committed:
            progress.update(safe_to_release=tuple(done))

    async def _prove(self, workers: Sequence[WorkerId]) -> None:
        """Joiners answer the canary as a retained rank does; who does not is lost. While experts
        are lost with another rank nobody can answer, and nobody is blamed: the next operation
        brings the experts back, and until then no request is answered either."""
        progress = self._progress
        if steps.incomplete(progress.record):
            return
        answers = await self._ask(Step.CANARY, self._bodies(Step.CANARY, workers))
        told = any(ack.payload.get("incomplete") for ack in answers.done.values())
        lost = (*progress.record.lost, *answers.lost)
        if told or steps.incomplete(replace(progress.record, lost=lost)):
            return self._judge(Step.CANARY, Answers(lost=answers.lost))
        self._judge(Step.CANARY, answers)
        for worker in steps.odd_ones(answers.done, workers, "tokens"):
            progress.lose(Step.CANARY, worker, "its tokens differ from the reference")

    async def abort(self) -> None:
        """Everyone who is still there forgets the new epoch. A member that does not is as good as
        dead: it is recorded as lost, to be evicted."""
        progress = self._progress
        waiting = steps.everyone(progress.record)
        for _ in range(_ABORT_ATTEMPTS):
            done = await self._command(Step.ABORT, waiting, strict=False)
            waiting = tuple(w for w in waiting if w not in done)
        members = progress.record.plan.before.worker_ids
        stuck = [w for w in waiting if w in members and w not in progress.record.lost]
        progress.update(lost=(*progress.record.lost, *stuck))

    async def _switch(self, members: Sequence[WorkerId]) -> None:
        """All of `members` have switched or are lost. Or nobody has, and nobody will: then
        `record.served` says what the ranks go on serving by."""
        progress, record = self._progress, self._progress.record
        if record.served is None:
            answers = await self._ask(Step.SWITCH, self._bodies(Step.SWITCH, members))
            waiting = steps.not_switched(answers.done)
            if not record.plan.retained or len(waiting) < len(answers.done):
                self._judge(Step.SWITCH, answers)
                return await self._switch_late(waiting)
            # Stored first: a coordinator after us must not ask for a switch that may be withdrawn.
            missed = [w for w in record.plan.retained if w not in waiting]
            unsure = [w for w in (*missed, *record.plan.joiners) if w not in record.lost]
            served = record.current or record.plan.before
            progress.update(served=served, lost=(*record.lost, *unsure))
            await progress.save()
        failpoint("scale.before_withdraw")
        await self._withdraw()

    async def _withdraw(self) -> None:
        """No retained rank can switch any more; or, if one has just done so, all shall."""
        progress, record = self._progress, self._progress.record
        # Those that missed the decision too: one of them may still make the switch happen.
        bodies = self._bodies(Step.WITHDRAW, record.plan.retained)
        answers = await self._ask(Step.WITHDRAW, bodies)
        if not any(ack.payload["switched"] for ack in answers.done.values()):
            silent = [w for w in record.plan.retained if w not in answers.done]
            lost = dict.fromkeys((*record.lost, *silent))
            return progress.update(lost=tuple(lost), failure="withdrawn: nobody had switched")
        switched = {*answers.done, *record.plan.joiners}
        progress.update(served=None, lost=tuple(w for w in record.lost if w not in switched))
        members = [w for w in record.plan.after.worker_ids if w not in progress.record.lost]
        await self._switch_late(members)

    async def _switch_late(self, workers: Sequence[WorkerId]) -> None:
        """Others have switched: so shall `workers`, or they are lost."""
        done = await self._command(Step.SWITCH, workers, strict=False)
        for worker in steps.not_switched(done):
            self._progress.lose(Step.SWITCH, worker, "it did not switch with the others")

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
            failpoint("scale.before_round")
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
        await self._load(routing, [m for m in moves if m.from_worker == DISK])
        by_source: dict[WorkerId, list[Any]] = {}
        for move in moves:
            if move.from_worker != DISK:
                by_source.setdefault(move.from_worker, []).append(to_json(move))
        bodies = Bodies({w: {"moves": m} for w, m in by_source.items()}, _routed_by(routing))
        done = await self._send(Step.PUSH_EXPERTS, bodies, strict=True)
        return self._agreed_digests(Step.PUSH_EXPERTS, done)

    async def _load(self, routing: Topology, moves: Sequence[ExpertMove]) -> None:
        """Experts that nobody holds any more are read from disk into slots that nobody reads."""
        rows = {m.worker_id: [EMPTY] * len(m.experts) for m in routing.members}
        for move in moves:
            rows[move.to_worker][move.to_slot] = move.expert
        members = tuple(replace(m, experts=tuple(rows[m.worker_id])) for m in routing.members)
        loaders = dict.fromkeys(m.to_worker for m in moves)
        bodies = Bodies({w: {} for w in loaders}, _routed_by(replace(routing, members=members)))
        await self._send(Step.LOAD, bodies, strict=True)

    async def _install(
        self, workers: Sequence[WorkerId], topology: Topology, digests: Digests
    ) -> None:
        own = {w: {"digests": digests.get(w, {})} for w in workers}
        await self._send(Step.INSTALL, Bodies(own, _routed_by(topology)), strict=True)

    async def _save_current(self, topology: Topology) -> None:
        self._progress.update(current=topology)
        await self._progress.save()

    async def _command(self, step: Step, workers: Sequence[WorkerId], *, strict: bool) -> Acks:
        return await self._send(step, self._bodies(step, workers), strict=strict)

    def _bodies(self, step: Step, workers: Sequence[WorkerId]) -> Bodies:
        record, config, digests = self._progress.record, self._config, self._digests
        own = {w: steps.own_payload(step, w, record, config, digests) for w in workers}
        common = steps.common_payload(step, record)
        if step is Step.CONNECT and self._endpoints:
            common["endpoints"] = self._endpoints
        return Bodies(own, common)

    async def _send(self, step: Step, bodies: Bodies, *, strict: bool) -> Acks:
        """Command one step; returns the acks of who has done it: with `strict` that is all."""
        if strict:
            self._progress.check_deadline()
        answers = await self._ask(step, bodies, strict=strict)
        if strict:
            for worker, why in (answers.failed | answers.lost).items():
                raise self._progress.failure(step, worker, why)
            if answers.silent:
                timeout_s = self._timeout_s(step, strict=True)
                raise self._progress.timeout(step, answers.silent, timeout_s)
        self._judge(step, answers)
        return answers.done

    async def _ask(self, step: Step, bodies: Bodies, *, strict: bool = False) -> Answers:
        """Command one step, and note what becomes of it."""
        if not bodies.own:
            return Answers()
        clock = asyncio.get_running_loop().time
        timeout_s, began_s = self._timeout_s(step, strict=strict), clock()
        began_at_s = self._progress.now()
        order = Order(step, bodies, timeout_s, fail_fast=strict)
        answers = await self._commander.run(order, self._progress.journal.guard())
        asked = Asked(step, tuple(bodies.own), began_at_s, clock() - began_s)
        self._progress.note(asked, answers)
        return answers

    def _timeout_s(self, step: Step, *, strict: bool) -> float:
        """The step's own, and within the operation's where a failure may still end it."""
        timeout_s = steps.timeout_s(step, self._config)
        return min(timeout_s, self._progress.left_s) if strict else timeout_s

    def _judge(self, step: Step, answers: Answers) -> None:
        """After COMMIT, or in an abort: who failed is left out of what follows."""
        progress, timeout_s = self._progress, steps.timeout_s(step, self._config)
        for worker, why in answers.failed.items():
            progress.lose(step, worker, why)
        for worker, why in answers.lost.items():
            progress.lose(step, worker, why, gone=True)
        for worker in answers.silent:
            progress.lose(step, worker, f"no answer in {timeout_s:g} s")

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


def _routed_by(topology: Topology) -> dict[str, Any]:
    return {"topology": to_json(topology)}
