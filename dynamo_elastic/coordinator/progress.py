"""How far the operation is: its record, which runs ahead of what is stored until the next save."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from dynamo_elastic.coordinator import quarantine, steps
from dynamo_elastic.coordinator.commands import Answers
from dynamo_elastic.coordinator.journal import Journal
from dynamo_elastic.coordinator.records import OperationRecord, PhaseRecord
from dynamo_elastic.coordinator.timeline import Timeline
from dynamo_elastic.errors import ParticipantFailed, PhaseTimeout
from dynamo_elastic.phases import Phase, Step, committed
from dynamo_elastic.topology import Topology
from dynamo_elastic.types import Rank, WorkerId

_PROVING = frozenset({Step.SWITCH, Step.CANARY, Step.SERVE})
"""A joiner that fails one of these after COMMIT is not served."""

_NO_RANK = Rank(-1)


class Progress:
    """The operation under way, as the coordinator that drives it sees it."""

    def __init__(
        self,
        journal: Journal,
        timeline: Timeline,
        *,
        timeout_s: float,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`timeout_s` is the operation's, from when it was opened; `now` is the wall clock."""
        self.record: OperationRecord = journal.record
        self.journal = journal
        self._timeout_s = timeout_s
        self._now = now
        self._timeline = timeline
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
        return max(0.0, self.record.opened_at_s + self._timeout_s - self._now())

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
        self._timeline.write(self.record, "decided", elapsed_s=self._clock() - self._phase_began_s)

    def leave(self) -> None:
        """The phase is over: keep how long it took."""
        elapsed_s = self._clock() - self._phase_began_s
        *before, now = self.record.phases
        self.update(phases=(*before, replace(now, elapsed_s=elapsed_s)))
        self._timeline.write(self.record, "done", elapsed_s=elapsed_s, detail=now.detail)

    async def close(self, phase: Phase) -> None:
        """End the operation as `phase`, DONE or ABORTED."""
        elapsed_s = self._now() - self.record.opened_at_s
        self.update(phase=phase, elapsed_s=elapsed_s)
        if self.record.served is not None and self.record.current is not None:
            self.update(served=self.record.current)
        await self.journal.close(self.record)
        detail = {"failure": self.record.failure, "lost": list(self.record.lost)}
        self._timeline.write(self.record, "end", elapsed_s=elapsed_s, detail=detail)

    def note(self, step: Step, answers: Answers, elapsed_s: float) -> None:
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
        self.update(
            participants=self.record.participants | said,
            phases=(*before, replace(now, detail=detail)),
        )

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
            self._timeline.write(self.record, "lost", detail={"worker": worker, "why": why})

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
            self.update(strikes=quarantine.struck(self.record, worker, why, self._now()))

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
        self.update(phase=phase, phases=(*self.record.phases, PhaseRecord(phase, self._now())))
        self._timeline.write(self.record, "begin")

    def _rank(self, worker: WorkerId) -> Rank:
        plan = self.record.plan
        ranks = [t.rank_of(worker) for t in (plan.after, plan.before)]
        return next((r for r in ranks if r is not None), _NO_RANK)
