"""What the HTTP API answers, made from the status. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from dynamo_elastic.coordinator.api_models import (
    Earlier,
    Operation,
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
from dynamo_elastic.coordinator.targets import answer_to, succession
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


def operation_view(record: OperationRecord, now_s: float, timeout_s: float) -> Operation:
    plan, done = record.plan, record.phase in ("done", "aborted")
    return Operation(
        operation_id=record.operation_id,
        kind=record.kind,
        phase=record.phase,
        done=done,
        source=record.source,
        request_id=record.request_id,
        ranks_before=plan.before.world_size,
        ranks_after=plan.after.world_size,
        epoch=plan.after.epoch,
        opened_at=time_of(record.opened_at_s),
        deadline=time_of(record.opened_at_s + timeout_s),
        elapsed_s=record.elapsed_s if done else max(0.0, now_s - record.opened_at_s),
        phases=[
            PhaseView(
                phase=p.phase,
                started_at=time_of(p.started_at_s),
                elapsed_s=p.elapsed_s,
                detail=p.detail,
            )
            for p in record.phases
        ],
        participants=list(_participants(record)),
        lost=list(record.lost),
        failure=record.failure,
        safe_to_release=list(record.safe_to_release),
    )


def _participants(record: OperationRecord) -> Iterable[Participant]:
    plan = record.plan
    roles = dict.fromkeys(plan.retained, "retained") | dict.fromkeys(plan.joiners, "joiner")
    for worker, role in (roles | dict.fromkeys(plan.leavers, "leaver")).items():
        yield Participant(
            worker=worker,
            role=role,
            rank=plan.after.rank_of(worker),
            state=record.participants.get(worker, ""),
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


def status_view(
    status: Status, *, deployment: str, name: str, now_s: float, timeout_s: float
) -> StatusView:
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
        return operation_view(record, now_s, timeout_s) if record is not None else None

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
