"""What the HTTP API says: its bodies as models, made from the status. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

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

Identifier = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,128}$")]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class TargetRequest(_Body):
    """How many ranks shall serve."""

    target: Annotated[int, Field(strict=True, ge=0, le=65536)]
    """Absolute number of ranks."""
    request_id: Identifier | None = None
    """Name of this wish, of your making: sending it again is not asking again. Without one, a
    target that is wanted already is joined."""
    source: Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,31}$")] = "api"
    """Who you are: shown to those whose targets yours supersedes."""
    detail: Annotated[str, Field(max_length=200, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")] = ""
    """Why, or which of your decisions it is."""


class TargetState(StrEnum):
    """What has become of a target so far."""

    ACCEPTED = "accepted"
    """Stored; `reason` says what is waited for."""
    QUEUED = "queued"
    """Another operation is under way; it comes next, unless a newer target does."""
    RUNNING = "running"
    REACHED = "reached"
    UNCHANGED = "unchanged"
    REFUSED = "refused"
    FAILED = "failed"
    SUPERSEDED = "superseded"


class TargetAnswer(_Body):
    """What has become of a target so far."""

    request_id: str
    target: int
    state: TargetState
    reason: str = ""
    operation_id: str | None = None
    """The operation that carries it out, or, if it is queued, the one that it waits for."""


class Earlier(_Body):
    """A target that a newer one has taken the place of."""

    target: int
    source: str
    detail: str
    request_id: str
    since: datetime


class Owner(_Body):
    """The target in force and whose it is."""

    target: int
    source: str
    detail: str
    request_id: str
    since: datetime
    supersedes: list[Earlier]
    """Newest first."""
    text: str
    """The same as one line."""


class Rank(_Body):
    """One rank in force."""

    rank: int
    worker: str
    slot: int | None
    """None if its shell is gone."""
    host: str | None
    state: str
    lost_reason: str = ""


class Slot(_Body):
    """A worker shell and its GPU slot."""

    worker: str
    slot: int
    host: str


class PhaseView(_Body):
    """One phase as it went."""

    phase: str
    started_at: datetime
    elapsed_s: float
    detail: dict[str, Any]


class Participant(_Body):
    """One participant of an operation."""

    worker: str
    role: str
    """retained, joiner or leaver."""
    rank: int | None
    """In the topology that the operation makes; None for a leaver."""
    state: str
    """Its last answer, '' if it has not been asked yet."""


class Operation(_Body):
    """One scale operation."""

    operation_id: str
    kind: str
    phase: str
    done: bool
    source: str
    request_id: str
    ranks_before: int
    ranks_after: int
    epoch: int
    opened_at: datetime
    deadline: datetime
    """Until COMMIT it is undone then; after it the moves of experts stop then."""
    elapsed_s: float
    phases: list[PhaseView]
    participants: list[Participant]
    lost: list[str]
    failure: str
    """Why it was or is being undone, '' if it is not."""
    safe_to_release: list[str]
    """Leavers whose GPUs are free."""


class StatusView(_Body):
    """Everything about a deployment, read at one revision."""

    deployment: str
    epoch: int
    width: int
    """Ranks in force."""
    leader: str
    """Coordinator in charge, '' if there is none."""
    answered_by: str
    """The coordinator that answers you: any of them reads and writes alike."""
    owner: Owner | None
    """Whose target is in force; null until somebody has asked for one."""
    last_answer: TargetAnswer | None
    waiting_for: str
    warnings: dict[str, str]
    ranks: list[Rank]
    standby: list[Slot]
    slots_wanted: int
    """How many slots must exist, numbered from 0: all up to the highest in use, and as many as the
    target wants. It falls only after a leaver's GPU is free."""
    operation: Operation | None
    """The one under way."""
    last_operation: Operation | None


class SafeToDelete(_Body):
    """Slots that nobody uses or is about to use."""

    slots: list[Slot]


class Health(_Body):
    """This coordinator answers, and so does etcd."""

    status: str = "ok"


class Fault(_Body):
    """Why a request was not served."""

    error: str
    faults: list[str] = []
    """One line for each field that is wrong."""


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
