"""How far the operation is: its record, which runs ahead of what is stored until the next save."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from dynamo_elastic.coordinator import quarantine, steps
from dynamo_elastic.coordinator.commands import Answers
from dynamo_elastic.coordinator.journal import Journal
from dynamo_elastic.coordinator.observe import Event, EventName, Observer
from dynamo_elastic.coordinator.records import OperationRecord, PhaseRecord
from dynamo_elastic.errors import ParticipantFailed, PhaseTimeout
from dynamo_elastic.logs import change_log_fields
from dynamo_elastic.phases import Phase, Step, committed
from dynamo_elastic.report.story import StepOutcome
from dynamo_elastic.topology import Topology
from dynamo_elastic.types import Rank, WorkerId

_PROVING = frozenset({Step.SWITCH, Step.CANARY, Step.SERVE})
"""A joiner that fails one of these after COMMIT is not served."""

_NO_RANK = Rank(-1)


@dataclass(frozen=True, slots=True)
class Asked:
    """One step as it was asked for: of whom, when (wall clock), and how long answers took."""

    step: Step
    workers: tuple[WorkerId, ...]
    began_at_s: float
    elapsed_s: float


class Progress:
    """The operation under way, as the coordinator that drives it sees it."""

    def __init__(
        self,
        journal: Journal,
        observer: Observer,
        *,
        timeout_s: float,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`timeout_s` is the operation's, from when it was opened; `now` is the wall clock."""
        self.record: OperationRecord = journal.record
        self.journal = journal
        self._timeout_s = timeout_s
        self.now = now
        self._observer = observer
        self._clock = asyncio.get_running_loop().time
        self._phase_began_s = self._clock()

    @property
    def committed(self) -> bool:
        return committed(self.record.kind, self.record.phase)

    @property
    def in_force(self) -> Topology:
        """The topology by which the ranks serve at this point."""
        plan = self.record.plan
        return self.record.current or (plan.after if self.committed else plan.before)

    @property
    def left_s(self) -> float:
        """Seconds until the deadline of the whole operation; 0 once it has passed."""
        return max(0.0, self.record.opened_at_s + self._timeout_s - self.now())

    def update(self, **changes: Any) -> None:
        """Change fields of the record; stored with the next save."""
        self.record = replace(self.record, **changes)

    async def enter(self, phase: Phase) -> None:
        """Make it durable that `phase` has begun; it may be there already after a recovery."""
        if self.record.phase is phase:
            return
        self._begin(phase)
        await self.save()

    async def save(self) -> None:
        await self.journal.save(self.record)

    async def commit(self) -> None:
        """Enter COMMIT by the transaction that decides."""
        self.update(served=None)
        self._begin(Phase.COMMIT)
        await self.journal.commit(self.record)
        self._tell(EventName.DECIDED, self._clock() - self._phase_began_s)

    def leave(self) -> None:
        """The phase is over: keep how long it took."""
        elapsed_s = self._clock() - self._phase_began_s
        *before, now = self.record.phases
        self.update(phases=(*before, replace(now, elapsed_s=elapsed_s)))
        self._tell(EventName.DONE, elapsed_s, now.detail)

    async def fail(self, reason: str) -> None:
        """The phase has failed: keep how long it took, and make it durable that the operation is
        being undone. Idempotent."""
        if self.record.phase is Phase.ABORTING:
            return
        *before, now = self.record.phases
        elapsed_s = max(0.0, self.now() - now.started_at_s)
        phases = (*before, replace(now, elapsed_s=elapsed_s))
        self.update(phases=phases, failure=reason)
        self._tell(EventName.FAILED, elapsed_s, {"reason": reason})
        await self.enter(Phase.ABORTING)

    async def close(self, phase: Phase) -> None:
        """End the operation as `phase`, DONE or ABORTED."""
        elapsed_s = self.now() - self.record.opened_at_s
        self.update(phase=phase, elapsed_s=elapsed_s)
        if self.record.served is not None and self.record.current is not None:
            self.update(served=self.record.current)
        await self.journal.close(self.record)
        detail = {"failure": self.record.failure, "lost": list(self.record.lost)}
        self._tell(EventName.END, elapsed_s, detail)

    def note(self, asked: Asked, answers: Answers) -> None:
        """Keep every answer in the record, and what it measured in the phase's detail."""
        step = asked.step
        said = dict.fromkeys(answers.done, f"{step} done")
        said |= {w: f"{step} failed: {why}" for w, why in answers.failed.items()}
        said |= {w: f"lost in {step}: {why}" for w, why in answers.lost.items()}
        said |= dict.fromkeys(answers.silent, f"{step} not answered")
        *before, now = self.record.phases
        detail = now.detail | {f"{step}_s": round(asked.elapsed_s, 6)}
        measured = steps.facts(answers.done)
        if measured:
            detail[step] = measured
        self.update(
            participants=self.record.participants | said,
            phases=(*before, replace(now, detail=detail)),
        )
        self._tell(EventName.STEP, asked.elapsed_s, step_detail(asked, answers))

    def lose(self, step: Step, worker: WorkerId, why: str, *, gone: bool = False) -> None:
        """After COMMIT: leave `worker` out of what follows, if it can't be a member any more:
        because it is `gone`, or as a joiner that has not proven itself."""
        record = self.record
        unproven = step in _PROVING and (worker in record.plan.joiners or step is Step.SWITCH)
        member = worker in record.plan.after.worker_ids and worker not in record.lost
        if step in quarantine.JUDGED:
            self._strike(worker, why)
        if self.committed and member and (gone or unproven):
            said = {worker: f"lost in {step}: {why}"}
            self.update(lost=(*record.lost, worker), participants=record.participants | said)
            self._tell(EventName.LOST, 0.0, {"worker": worker, "why": why})

    def failure(self, step: Step, worker: WorkerId, why: str) -> ParticipantFailed:
        """The error for a participant that did not do its step."""
        if step in quarantine.JUDGED:
            self._strike(worker, why)
        return ParticipantFailed(
            f"{worker} failed {step}: {why}",
            operation_id=self.record.operation_id,
            phase=self.record.phase,
            rank=self._rank(worker),
        )

    def timeout(self, step: Step, workers: Iterable[WorkerId], timeout_s: float) -> PhaseTimeout:
        """The error for participants that did not answer."""
        workers = tuple(workers)
        for worker in workers if step in quarantine.JUDGED else ():
            self._strike(worker, "no answer")
        return PhaseTimeout(
            f"{step}: no answer from {', '.join(workers)} in {timeout_s:g} s",
            operation_id=self.record.operation_id,
            phase=self.record.phase,
            ranks=[self._rank(w) for w in workers],
        )

    def served(self, workers: Iterable[WorkerId]) -> None:
        """`workers` have come to serve: nothing is held against them any more."""
        self.update(strikes=quarantine.cleared(self.record.strikes, workers))

    def _strike(self, worker: WorkerId, why: str) -> None:
        if worker in self.record.plan.joiners:
            self.update(strikes=quarantine.struck(self.record, worker, why, self.now()))

    def check_deadline(self) -> None:
        """Raise PhaseTimeout if the operation as a whole has had its time."""
        if not self.left_s:
            raise PhaseTimeout(
                f"the operation took longer than {self._timeout_s:g} s (scale.operation_timeout_s)",
                operation_id=self.record.operation_id,
                phase=self.record.phase,
            )

    def _begin(self, phase: Phase) -> None:
        self._phase_began_s = self._clock()
        change_log_fields(phase=phase)
        self.update(phase=phase, phases=(*self.record.phases, PhaseRecord(phase, self.now())))
        self._tell(EventName.BEGIN)

    def _tell(
        self, name: EventName, elapsed_s: float = 0.0, detail: dict[str, Any] | None = None
    ) -> None:
        self._observer.event(self.record, Event(name, self.now(), elapsed_s, detail or {}))

    def _rank(self, worker: WorkerId) -> Rank:
        plan = self.record.plan
        ranks = [t.rank_of(worker) for t in (plan.after, plan.before)]
        return next((r for r in ranks if r is not None), _NO_RANK)


def step_detail(asked: Asked, answers: Answers) -> dict[str, Any]:
    """What an event of a step says: of each worker when it began, how long it took, what became of
    it, and what it measured. Without an answer, what the coordinator knows."""
    workers = {}
    for worker in asked.workers:
        ack = answers.acks.get(worker)
        said: dict[str, Any] = {
            "outcome": _outcome(worker, answers),
            "began_at_s": ack.began_at_s if ack else asked.began_at_s,
            "elapsed_s": round(ack.elapsed_s if ack else asked.elapsed_s, 6),
        }
        reason = answers.failed.get(worker) or answers.lost.get(worker)
        facts = steps.facts({worker: ack}).get(worker) if ack else None
        said |= {"reason": reason} if reason else {}
        said |= {"facts": facts} if facts else {}
        workers[worker] = said
    return {"step": asked.step, "asked_at_s": asked.began_at_s, "workers": workers}


def _outcome(worker: WorkerId, answers: Answers) -> StepOutcome:
    if worker in answers.done:
        return StepOutcome.DONE
    if worker in answers.failed:
        return StepOutcome.FAILED
    return StepOutcome.LOST if worker in answers.lost else StepOutcome.SILENT
