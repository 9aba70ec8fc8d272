"""One scale operation, from plan to the end, read from top to bottom.

    open -> phases before COMMIT -> commit (one transaction) -> phases after it -> close as DONE
                 \\_____________________\\__> abort -> close as ABORTED

The phases, their steps and who takes part are phases.PHASES. Before the commit any failure aborts:
the topology before it stays in force. After it there is only forward: a participant that fails is
recorded as lost, left out of what follows, and evicted by the next operation.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from dynamo_elastic.config import ScaleConfig
from dynamo_elastic.coordinator import steps
from dynamo_elastic.coordinator.commands import Answers, Commander, Order
from dynamo_elastic.coordinator.fenced import FencedStore
from dynamo_elastic.coordinator.journal import Journal
from dynamo_elastic.coordinator.records import (
    AckRecord,
    Keys,
    OperationRecord,
    PhaseRecord,
    to_json,
)
from dynamo_elastic.coordinator.status import Status, read_status
from dynamo_elastic.coordinator.steps import Digests
from dynamo_elastic.coordinator.timeline import Timeline
from dynamo_elastic.errors import ParticipantFailed, PhaseTimeout, ScaleAborted, TargetRefused
from dynamo_elastic.failpoints import failpoint
from dynamo_elastic.phases import PHASES, Phase, PhaseSpec, Step, committed, phases_of
from dynamo_elastic.topology import ExpertMove, ScalePlan, Topology, move_rounds
from dynamo_elastic.types import OperationId, Rank, WorkerId

_PROVING = frozenset({Step.SWITCH, Step.CANARY, Step.SERVE})
"""A joiner that fails one of these after COMMIT is not served."""

_NO_RANK = Rank(-1)


@dataclass(frozen=True, slots=True)
class ScaleRequest:
    """A plan, for whom it is carried out, and which members of `plan.before` are lost already."""

    plan: ScalePlan
    source: str
    request_id: str = ""
    lost: tuple[WorkerId, ...] = ()


@dataclass(frozen=True, slots=True)
class Scaler:
    """Carries out operations of one deployment, one at a time, for as long as we lead."""

    fenced: FencedStore
    keys: Keys
    config: ScaleConfig
    timeline: Timeline

    async def scale(self, request: ScaleRequest, status: Status) -> OperationRecord:
        """Carry out `request`, planned from `status`; returns the record of the finished operation.

        Members in its `lost` failed after COMMIT. Raises ScaleAborted (the topology before is still
        in force), GuardFailed (`status` was outdated: nothing happened), or LeadershipLost or
        StoreError (the operation stays as it is stored; the next leader recovers it).
        """
        plan = request.plan
        record = OperationRecord(
            operation_id=OperationId(f"{plan.kind}-{plan.after.epoch}-{uuid.uuid4().hex[:8]}"),
            kind=plan.kind,
            plan=plan,
            phase=Phase.PLAN,
            source=request.source,
            request_id=request.request_id,
            token=self.fenced.token,
            topology_revision=status.revision(self.keys.topology),
            opened_at_s=time.time(),
            requested_ranks=plan.after.world_size,
            phases=(PhaseRecord(Phase.PLAN, time.time()),),
            lost=request.lost,
        )
        journal = await Journal.open(self.fenced, self.keys, record, status)
        return await self._operation(journal).run()

    async def recover(self) -> OperationRecord | None:
        """Finish or undo what a coordinator before us left behind; None if nothing was.

        The stored epochs decide: at the new one it goes forward, else it is undone.
        """
        status = await read_status(self.fenced.store, self.keys)
        journal = await Journal.resume(self.fenced, self.keys, status)
        if journal is None:
            return None
        operation = self._operation(journal)
        record = journal.record
        if status.topology is not None and status.topology.epoch == record.plan.after.epoch:
            return await operation.roll_forward()
        return await operation.abort(f"the coordinator was replaced in phase {record.phase}")

    def _operation(self, journal: Journal) -> _Operation:
        record = journal.record
        commander = Commander(self.fenced, self.keys, record.operation_id, record.plan.after.epoch)
        return _Operation(journal, commander, self.config, self.timeline)


class _Operation:
    """The operation under way. `record` runs ahead of what is stored until the next save."""

    def __init__(
        self, journal: Journal, commander: Commander, config: ScaleConfig, timeline: Timeline
    ) -> None:
        self.record = journal.record
        self._journal = journal
        self._commander = commander
        self._config = config
        self._timeline = timeline
        self._digests: Digests = {}
        self._clock = asyncio.get_running_loop().time
        self._phase_began_s = self._clock()

    async def run(self) -> OperationRecord:
        """All of it. Raises ScaleAborted once it is undone."""
        try:
            for spec in self._specs(Phase.PLAN):
                if spec.phase is Phase.COMMIT:
                    break
                await self._run_phase(spec)
            await self._commit()
        except (PhaseTimeout, ParticipantFailed, TargetRefused) as exc:
            phase = self.record.phase
            await self.abort(exc.reason)
            raise ScaleAborted(
                exc.reason, operation_id=self.record.operation_id, phase=phase
            ) from exc
        return await self.roll_forward()

    async def roll_forward(self) -> OperationRecord:
        """Everything from the phase that is stored, COMMIT or later, to DONE."""
        for spec in self._specs(self.record.phase):
            await self._run_phase(spec)
        await self._close(Phase.DONE)
        return self.record

    async def abort(self, reason: str) -> OperationRecord:
        """Undo: everyone who is still there forgets the new epoch; the old topology stays."""
        failpoint("scale.before_abort")
        if self.record.phase is not Phase.ABORTING:
            self.record = replace(self.record, failure=reason)
            await self._enter(Phase.ABORTING)
        await self._command(Step.ABORT, steps.everyone(self.record))
        self._leave()
        await self._close(Phase.ABORTED)
        return self.record

    async def _run_phase(self, spec: PhaseSpec) -> None:
        if spec.phase is not Phase.COMMIT:
            failpoint(f"scale.before_{spec.phase}")
        await self._enter(spec.phase)
        for step, who in spec.steps:
            await self._step(step, steps.participants(self.record, who))
        self._leave()
        if spec.phase is not Phase.COMMIT:
            failpoint(f"scale.after_{spec.phase}")

    async def _commit(self) -> None:
        """The point of no return: topology and operation move in one transaction."""
        failpoint("scale.before_commit")
        self._begin(Phase.COMMIT)
        await self._journal.commit(self.record)
        self._timeline.write(self.record, "decided", elapsed_s=self._clock() - self._phase_began_s)
        failpoint("scale.after_commit")

    async def _close(self, phase: Phase) -> None:
        elapsed_s = time.time() - self.record.opened_at_s
        self.record = replace(self.record, phase=phase, elapsed_s=elapsed_s)
        failpoint("scale.before_close")
        await self._journal.close(self.record)
        self._timeline.write(
            self.record, "end", elapsed_s=elapsed_s, detail={"failure": self.record.failure}
        )

    async def _enter(self, phase: Phase) -> None:
        """Make it durable that `phase` has begun; it may be there already after a recovery."""
        if self.record.phase is phase:
            return
        self._begin(phase)
        await self._journal.save(self.record)

    def _begin(self, phase: Phase) -> None:
        self._phase_began_s = self._clock()
        phases = (*self.record.phases, PhaseRecord(phase, time.time()))
        self.record = replace(self.record, phase=phase, phases=phases)
        self._timeline.write(self.record, "begin")

    def _leave(self) -> None:
        elapsed_s = self._clock() - self._phase_began_s
        *before, now = self.record.phases
        self.record = replace(self.record, phases=(*before, replace(now, elapsed_s=elapsed_s)))
        self._timeline.write(self.record, "done", elapsed_s=elapsed_s, detail=now.detail)

    async def _step(self, step: Step, workers: Sequence[WorkerId]) -> None:
        if step is Step.PUSH_EXPERTS:
            return await self._move_experts(workers)
        done = await self._command(step, workers)
        if step is Step.RESTORE:
            self._take_incarnations(done)
        elif step is Step.STREAM:
            self._digests = self._agreed_digests(step, done)
        elif step is Step.CHECK:
            for worker in steps.odd_ones(done, workers, "probe"):
                self._fail(step, worker, "its probe differs from the reference")
        elif step is Step.CANARY:
            for worker in steps.odd_ones(done, workers, "tokens"):
                self._lose(step, worker, "its tokens differ from the reference")
        elif step is Step.PARK:
            self.record = replace(self.record, safe_to_release=tuple(done))

    async def _move_experts(self, members: Sequence[WorkerId]) -> None:
        """Bring every expert to its place in `plan.settled`, in rounds, while serving goes on.

        `record.current` is stored before anybody may route by it. A failure after COMMIT ends the
        moves where they are: what is in force then is right, only not as even as planned.
        """
        if self._committed and self.record.lost:
            return
        try:
            await self._move_rounds(members)
        except (PhaseTimeout, ParticipantFailed, TargetRefused) as exc:
            if not self._committed:
                raise
            self.record = replace(self.record, failure=f"rebalance stopped: {exc.reason}")

    async def _move_rounds(self, members: Sequence[WorkerId]) -> None:
        plan = self.record.plan
        in_force = plan.after if self._committed else plan.before
        current = self.record.current or steps.without_experts(in_force, self.record.lost)
        routed: Topology | None = None
        for round_ in move_rounds(current, plan.settled):
            routing = replace(round_.routing, placement=current.placement + 1)
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
        self.record = replace(self.record, current=topology)
        await self._journal.save(self.record)

    async def _command(
        self, step: Step, workers: Sequence[WorkerId]
    ) -> Mapping[WorkerId, AckRecord]:
        bodies = {
            w: steps.payload(step, w, self.record, self._config, self._digests) for w in workers
        }
        strict = not self._committed and step is not Step.ABORT
        return await self._send(step, bodies, strict=strict)

    async def _send(
        self, step: Step, bodies: Mapping[WorkerId, dict[str, Any]], *, strict: bool
    ) -> Mapping[WorkerId, AckRecord]:
        """Command one step and judge the answers: `strict` ones must all be right."""
        if not bodies:
            return {}
        timeout_s = steps.timeout_s(step, self._config)
        began_s = self._clock()
        order = Order(step, bodies, timeout_s, fail_fast=strict)
        answers = await self._commander.run(order, self._journal.guard())
        self._note(step, answers, self._clock() - began_s)
        if strict:
            self._demand_all(step, answers, timeout_s)
        else:
            for worker, why in (answers.failed | answers.lost).items():
                self._lose(step, worker, why)
            for worker in answers.silent:
                self._lose(step, worker, f"no answer in {timeout_s:g} s")
        return answers.done

    def _note(self, step: Step, answers: Answers, elapsed_s: float) -> None:
        """Keep every answer in the record, and what it measured in the phase's detail."""
        said = dict.fromkeys(answers.done, f"{step} done")
        said |= {w: f"{step} failed: {why}" for w, why in answers.failed.items()}
        said |= {w: f"lost in {step}: {why}" for w, why in answers.lost.items()}
        said |= dict.fromkeys(answers.silent, f"{step} not answered")
        *before, now = self.record.phases
        detail = now.detail | {f"{step}_s": round(elapsed_s, 6)}
        measured = steps.facts(answers.done)
        if measured:
            detail[step] = measured
        self.record = replace(
            self.record,
            participants=self.record.participants | said,
            phases=(*before, replace(now, detail=detail)),
        )

    def _demand_all(self, step: Step, answers: Answers, timeout_s: float) -> None:
        for worker, why in (answers.failed | answers.lost).items():
            self._fail(step, worker, why)
        if answers.silent:
            raise PhaseTimeout(
                f"{step}: no answer from {', '.join(answers.silent)} in {timeout_s:g} s",
                operation_id=self.record.operation_id,
                phase=self.record.phase,
                ranks=[self._rank(w) for w in answers.silent],
            )

    def _fail(self, step: Step, worker: WorkerId, why: str) -> NoReturn:
        raise ParticipantFailed(
            f"{worker} failed {step}: {why}",
            operation_id=self.record.operation_id,
            phase=self.record.phase,
            rank=self._rank(worker),
        )

    def _lose(self, step: Step, worker: WorkerId, why: str) -> None:
        """After COMMIT: leave `worker` out of what follows, if it can't be a member any more."""
        record = self.record
        if not self._committed or worker in record.lost or worker in record.plan.leavers:
            return
        gone = record.participants.get(worker, "").startswith("lost")
        unproven = step in _PROVING and (worker in record.plan.joiners or step is Step.SWITCH)
        if gone or unproven:
            said = {worker: f"lost in {step}: {why}"}
            self.record = replace(
                record, lost=(*record.lost, worker), participants=record.participants | said
            )
            self._timeline.write(self.record, "lost", detail={"worker": worker, "why": why})

    def _take_incarnations(self, done: Mapping[WorkerId, AckRecord]) -> None:
        for worker, ack in done.items():
            if not ack.payload.get("incarnation"):
                self._fail(Step.RESTORE, worker, "its answer names no incarnation")
        self.record = replace(self.record, plan=steps.with_incarnations(self.record.plan, done))

    def _agreed_digests(self, step: Step, done: Mapping[WorkerId, AckRecord]) -> Digests:
        digests, disputed = steps.merge_digests(done.values())
        if disputed:
            self._fail(step, next(iter(done)), f"sources disagree on {', '.join(disputed[:3])}")
        return digests

    def _rank(self, worker: WorkerId) -> Rank:
        plan = self.record.plan
        for topology in (plan.after, plan.before):
            rank = topology.rank_of(worker)
            if rank is not None:
                return rank
        return _NO_RANK

    @property
    def _committed(self) -> bool:
        return committed(self.record.kind, self.record.phase)

    def _specs(self, first: Phase) -> Sequence[PhaseSpec]:
        kind = self.record.kind
        return PHASES[kind][phases_of(kind).index(first) :]
