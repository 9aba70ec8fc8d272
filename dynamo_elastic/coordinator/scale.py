"""One scale operation, from plan to the end, read from top to bottom.

    open -> phases before COMMIT -> commit (one transaction) -> phases after it -> close as DONE
                 \\_____________________\\__> abort -> close as ABORTED

The phases, their steps and who takes part are phases.PHASES. Before the commit any failure aborts:
the topology before it stays in force. After it there is only forward: a participant that fails is
recorded as lost, left out of what follows, and evicted by the next operation.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dynamo_elastic.config_sections import ScaleConfig
from dynamo_elastic.coordinator.commands import Commander
from dynamo_elastic.coordinator.fenced import FencedStore
from dynamo_elastic.coordinator.journal import Journal
from dynamo_elastic.coordinator.observe import Observer
from dynamo_elastic.coordinator.progress import Progress
from dynamo_elastic.coordinator.quarantine import remembered
from dynamo_elastic.coordinator.records import Keys, OperationRecord, PhaseRecord
from dynamo_elastic.coordinator.status import Status, read_status
from dynamo_elastic.coordinator.step_runner import StepRunner
from dynamo_elastic.errors import ParticipantFailed, PhaseTimeout, ScaleAborted, TargetRefused
from dynamo_elastic.failpoints import failpoint
from dynamo_elastic.logs import log_fields
from dynamo_elastic.phases import PHASES, Phase, PhaseSpec, phases_of
from dynamo_elastic.topology import ScalePlan, Topology
from dynamo_elastic.types import OperationId, WorkerId


@dataclass(frozen=True, slots=True)
class ScaleRequest:
    """A plan, for whom it is carried out, which members of `plan.before` are lost already, and
    which other shells must end their engine: of a topology that died, or of one withdrawn."""

    plan: ScalePlan
    source: str
    request_id: str = ""
    lost: tuple[WorkerId, ...] = ()
    discarded: tuple[WorkerId, ...] = ()
    cold: frozenset[WorkerId] = frozenset()
    """Workers whose image is in quarantine."""
    served: Topology | None = None
    """`plan.before`, if the stored topology is another one, whose decision was withdrawn."""


@dataclass(frozen=True, slots=True)
class Scaler:
    """Carries out operations of one deployment, one at a time, for as long as we lead."""

    fenced: FencedStore
    keys: Keys
    config: ScaleConfig
    observer: Observer
    now: Callable[[], float] = time.time
    """Wall clock."""

    async def scale(self, request: ScaleRequest, status: Status) -> OperationRecord:
        """Carry out `request`, planned from `status`; returns the record of the finished operation.

        Members in its `lost` failed after COMMIT. Raises ScaleAborted (the topology before is still
        in force), GuardFailed (`status` was outdated: nothing happened), or LeadershipLost or
        StoreError (the operation stays as it is stored; the next leader recovers it).
        """
        failpoint("scale.before_open")
        record = self._record(request, status)
        with log_fields(operation_id=record.operation_id, epoch=record.plan.after.epoch):
            journal = await Journal.open(self.fenced, self.keys, record, status)
            failpoint("scale.opened")
            return await self._operation(journal).run()

    def _record(self, request: ScaleRequest, status: Status) -> OperationRecord:
        plan, now_s = request.plan, self.now()
        first = phases_of(plan.kind)[0]
        strikes = status.last.strikes if status.last else {}
        reasons = status.lost_reasons()
        return OperationRecord(
            operation_id=OperationId(f"{plan.kind}-{plan.after.epoch}-{uuid.uuid4().hex[:8]}"),
            kind=plan.kind,
            plan=plan,
            phase=first,
            source=request.source,
            request_id=request.request_id,
            token=self.fenced.token,
            topology_revision=status.revision(self.keys.topology),
            opened_at_s=now_s,
            requested_ranks=plan.after.world_size,
            phases=(PhaseRecord(first, now_s),),
            participants={w: f"lost: {reasons[w]}" for w in request.lost if w in reasons},
            lost=request.lost,
            discarded=request.discarded,
            served=request.served,
            strikes=remembered(strikes, now_s, self.config.quarantine_s),
            cold=tuple(w for w in plan.joiners if w in request.cold),
        )

    async def recover(self) -> OperationRecord | None:
        """Finish or undo what a coordinator before us left behind; None if nothing was.

        The stored epochs decide: at the new one it goes forward, else it is undone.
        """
        failpoint("scale.before_recover")
        status = await read_status(self.fenced.store, self.keys)
        journal = await Journal.resume(self.fenced, self.keys, status)
        if journal is None:
            return None
        operation = self._operation(journal)
        record = journal.record
        with log_fields(operation_id=record.operation_id, epoch=record.plan.after.epoch):
            if status.topology is not None and status.topology.epoch == record.plan.after.epoch:
                return await operation.roll_forward()
            return await operation.abort(f"the coordinator was replaced in phase {record.phase}")

    def _operation(self, journal: Journal) -> _Operation:
        record = journal.record
        commander = Commander(self.fenced, self.keys, record.operation_id, record.plan.after.epoch)
        progress = Progress(
            journal, self.observer, timeout_s=self.config.operation_timeout_s, now=self.now
        )
        return _Operation(progress, StepRunner(progress, commander, self.config))


class _Operation:
    """The operation under way: its phases, in order."""

    def __init__(self, progress: Progress, steps: StepRunner) -> None:
        self._progress = progress
        self._steps = steps

    async def run(self) -> OperationRecord:
        """All of it. Raises ScaleAborted once it is undone."""
        progress = self._progress
        if progress.committed:  # of a kind that decides nothing
            return await self.roll_forward()
        try:
            for spec in self._specs(Phase.PLAN):
                if spec.phase is Phase.COMMIT:
                    break
                await self._run_phase(spec)
            await self._commit()
        except (PhaseTimeout, ParticipantFailed, TargetRefused) as exc:
            phase, operation_id = progress.record.phase, progress.record.operation_id
            await self.abort(exc.reason)
            raise ScaleAborted(exc.reason, operation_id=operation_id, phase=phase) from exc
        return await self.roll_forward()

    async def roll_forward(self) -> OperationRecord:
        """Everything from the phase that is stored, COMMIT or later, to DONE."""
        for spec in self._specs(self._progress.record.phase):
            await self._run_phase(spec)
        return await self._close(Phase.DONE)

    async def abort(self, reason: str) -> OperationRecord:
        """Undo: everyone who is still there forgets the new epoch; the old topology stays."""
        failpoint("scale.before_abort")
        await self._progress.fail(reason)
        await self._steps.abort()
        self._progress.leave()
        return await self._close(Phase.ABORTED)

    async def _run_phase(self, spec: PhaseSpec) -> None:
        deciding = spec.phase is Phase.COMMIT
        if not deciding:
            failpoint(f"scale.before_{spec.phase}")
        await self._progress.enter(spec.phase)
        for step, who in spec.steps:
            await self._steps.run(step, who)
        self._progress.leave()
        if not deciding:
            failpoint(f"scale.after_{spec.phase}")

    async def _commit(self) -> None:
        """The point of no return: topology and operation move in one transaction."""
        failpoint("scale.before_commit")
        await self._progress.commit()
        failpoint("scale.after_commit")

    async def _close(self, phase: Phase) -> OperationRecord:
        failpoint("scale.before_close")
        await self._progress.close(phase)
        failpoint("scale.closed")
        return self._progress.record

    def _specs(self, first: Phase) -> Sequence[PhaseSpec]:
        kind = self._progress.record.kind
        return PHASES[kind][phases_of(kind).index(first) :]
