"""What the HTTP API answers, made from the status. Pure."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dynamo_elastic.coordinator.api_models import (
    Earlier,
    Operation,
    OperationSummary,
    Owner,
    Participant,
    PhaseView,
    Rank,
    Slot,
    StatusView,
    TargetAnswer,
    TargetState,
)
from dynamo_elastic.coordinator.records import (
    EarlierTarget,
    MemberRecord,
    OperationRecord,
    OutcomeStatus,
    TargetOutcome,
    TargetRecord,
)
from dynamo_elastic.coordinator.status import Status
from dynamo_elastic.coordinator.stories import story_of
from dynamo_elastic.coordinator.targets import answer_to, succession
from dynamo_elastic.report.story import Role, Story
from dynamo_elastic.types import WorkerId

_STATES = {OutcomeStatus(s.value): s for s in TargetState if s.value in set(OutcomeStatus)}


def time_of(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def answer_view(outcome: TargetOutcome) -> TargetAnswer:
    return TargetAnswer(
        request_id=outcome.request_id,
        target=outcome.ranks,
        state=_STATES[outcome.status],
        reason=outcome.reason,
        operation_id=outcome.operation_id or None,
    )


def progress_of(status: Status, request_id: str, ranks: int) -> TargetAnswer:
    """What has become of the request so far."""
    answered = answer_to(request_id, status.target, status.outcome)
    if answered is not None:
        return answer_view(answered)
    now = status.operation
    if now is None:
        reason = status.notice or ("" if status.leader else "no coordinator leads")
        return TargetAnswer(
            request_id=request_id, target=ranks, state=TargetState.ACCEPTED, reason=reason
        )
    running = now.request_id == request_id
    return TargetAnswer(
        request_id=request_id,
        target=ranks,
        state=TargetState.RUNNING if running else TargetState.QUEUED,
        reason=now.failure if running else f"operation {now.operation_id} is under way",
        operation_id=now.operation_id,
    )


def joined(status: Status, ranks: int) -> TargetAnswer | None:
    """What a wish for `ranks` ranks without a name is told if they are wanted already, or None."""
    target = status.target
    if target is None or target.ranks != ranks:
        return None
    progress = progress_of(status, target.request_id, ranks)
    if progress.state in (TargetState.ACCEPTED, TargetState.QUEUED, TargetState.RUNNING):
        return progress
    if status.width != ranks or status.operation is not None:
        return None
    reason = f"target {ranks}: that is the width in force; nothing to do"
    return TargetAnswer(
        request_id=target.request_id, target=ranks, state=TargetState.UNCHANGED, reason=reason
    )


def owner_view(target: TargetRecord) -> Owner:
    return Owner(
        **_target_fields(target),
        supersedes=[Earlier(**_target_fields(t)) for t in target.supersedes],
        text=succession(target),
    )


def _target_fields(target: TargetRecord | EarlierTarget) -> dict[str, Any]:
    return {
        "target": target.ranks,
        "source": target.source,
        "detail": target.detail,
        "request_id": target.request_id,
        "since": time_of(target.requested_at_s),
    }


def operation_view(story: Story, report: Path | None = None) -> Operation:
    return Operation(
        operation_id=story.operation_id,
        kind=story.kind,
        phase=story.phase,
        done=story.over,
        source=story.source,
        request_id=story.request_id,
        ranks_before=story.ranks_before,
        ranks_after=story.ranks_after,
        epoch=story.epoch,
        opened_at=time_of(story.opened_at_s),
        deadline=time_of(story.deadline_at_s),
        elapsed_s=story.elapsed_s,
        phases=[
            PhaseView(
                phase=p.phase,
                started_at=time_of(p.began_at_s),
                elapsed_s=p.elapsed_s or 0.0,
                detail=p.detail,
            )
            for p in story.phases
        ],
        participants=[
            Participant(
                worker=p.worker,
                role=p.role,
                rank=None if p.role is Role.LEAVER else p.rank,
                state=p.state,
            )
            for p in story.parts
        ],
        lost=list(story.lost),
        failure=story.failure,
        safe_to_release=list(story.safe_to_release),
        report=str(report) if report else None,
    )


def summary_view(story: Story, report: Path | None) -> OperationSummary:
    gap = story.longest_gap
    return OperationSummary(
        operation_id=story.operation_id,
        kind=story.kind,
        phase=story.phase,
        source=story.source,
        ranks_before=story.ranks_before,
        ranks_after=story.ranks_after,
        epoch=story.epoch,
        opened_at=time_of(story.opened_at_s),
        elapsed_s=story.elapsed_s,
        longest_gap_s=gap.elapsed_s if gap else None,
        moved_bytes=story.moved_bytes,
        failure=story.failure,
        report=str(report) if report else None,
    )


def in_use(status: Status) -> set[WorkerId]:
    """Shells that have a rank, or have one to get or to lose in the operation under way."""
    used = set(status.in_force.worker_ids) if status.in_force else set()
    if status.operation is not None:
        plan = status.operation.plan
        used |= {*plan.before.worker_ids, *plan.after.worker_ids}
    return used


def safe_to_delete(status: Status) -> list[MemberRecord]:
    """Standby shells that have no part in anything, but for those that the target needs next: the
    first ones, by slot."""
    used = in_use(status)
    spare = [status.members[w] for w in status.standby() if w not in used]
    if status.operation is not None:
        planned = status.operation.plan.after.world_size
    else:
        planned = status.width
    needed = max(0, (status.target.ranks if status.target else planned) - planned)
    return spare[needed:]


def slots_wanted(status: Status) -> int:
    used = [status.members[w].slot + 1 for w in in_use(status) if w in status.members]
    wanted = status.target.ranks if status.target else status.width
    return max([wanted, *used])


def slot_view(member: MemberRecord) -> Slot:
    return Slot(worker=member.worker_id, slot=member.slot, host=member.host)


def no_page(operation_id: str) -> None:
    """Where no reports are kept."""


def status_view(
    status: Status,
    *,
    deployment: str,
    name: str,
    now_s: float,
    timeout_s: float,
    page_of: Callable[[str], Path | None] = no_page,
) -> StatusView:
    """`page_of` finds the report of an operation."""
    lost = status.lost_reasons()
    ranks = []
    for rank, worker in enumerate(status.in_force.worker_ids if status.in_force else ()):
        member = status.members.get(worker)
        ranks.append(
            Rank(
                rank=rank,
                worker=worker,
                slot=member.slot if member else None,
                host=member.host if member else None,
                state=member.state if member else "gone",
                lost_reason=lost.get(worker, ""),
            )
        )

    def operation(record: OperationRecord | None) -> Operation | None:
        if record is None:
            return None
        story = story_of(record, deployment, timeout_s, now_s=now_s)
        return operation_view(story, page_of(record.operation_id))

    return StatusView(
        deployment=deployment,
        epoch=status.in_force.epoch if status.in_force else 0,
        width=status.width,
        leader=status.leader,
        answered_by=name,
        owner=owner_view(status.target) if status.target else None,
        last_answer=answer_view(status.outcome) if status.outcome else None,
        waiting_for=status.notice,
        warnings={k: w.text for k, w in status.warnings.items()},
        ranks=ranks,
        standby=[slot_view(status.members[w]) for w in status.standby()],
        slots_wanted=slots_wanted(status),
        operation=operation(status.operation),
        last_operation=operation(status.last),
    )
