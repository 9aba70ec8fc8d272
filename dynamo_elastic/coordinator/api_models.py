"""Bodies of the HTTP API: what is asked, and what is answered. Strings are their documentation."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

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
    report: str | None = None
    """Path of its HTML report on the host of the coordinator that answers you; null if that one has
    none. `/v1/operations/{id}/report` is the same page."""


class OperationSummary(_Body):
    """One operation that has ended."""

    operation_id: str
    kind: str
    phase: str
    """done or aborted."""
    source: str
    ranks_before: int
    ranks_after: int
    epoch: int
    opened_at: datetime
    elapsed_s: float
    longest_gap_s: float | None
    """Longest wait of a stream for its next token meanwhile; null if no tokens were seen."""
    moved_bytes: int
    failure: str
    report: str | None
    """As in Operation."""


class OperationList(_Body):
    """Operations that have ended, newest first."""

    operations: list[OperationSummary]
    kept_by: str
    """The coordinator that answers you: each keeps those that ended while it led."""


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
