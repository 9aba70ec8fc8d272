"""Who watches operations: told of every event as it happens, and never asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from dynamo_elastic.coordinator.records import OperationRecord
from dynamo_elastic.coordinator.status import Status


class EventName(StrEnum):
    """What happened."""

    BEGIN = "begin"
    """A phase."""
    STEP = "step"
    """All answers to one step are in, or it was given up: detail has them by worker."""
    DECIDED = "decided"
    """The transaction of COMMIT."""
    LOST = "lost"
    """A member, after COMMIT."""
    DONE = "done"
    """A phase."""
    FAILED = "failed"
    """A phase: what follows undoes the operation."""
    END = "end"
    """The operation, in the phase that its record is in."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event of the phase that the operation is in. `at_s` is the wall clock's."""

    name: EventName
    at_s: float
    elapsed_s: float = 0.0
    detail: dict[str, Any] = field(default_factory=dict)


class Observer:
    """Sees everything and does nothing. What it overrides must be quick, and must not raise: an
    operation waits for it."""

    def event(self, record: OperationRecord, event: Event) -> None:
        """Something has happened in the operation."""

    def status(self, status: Status | None) -> None:
        """The leader has looked at what is stored; None: this coordinator leads no more."""


class Observers(Observer):
    """Several as one, in order."""

    def __init__(self, *observers: Observer) -> None:
        self._observers: Sequence[Observer] = observers

    def event(self, record: OperationRecord, event: Event) -> None:
        for observer in self._observers:
            observer.event(record, event)

    def status(self, status: Status | None) -> None:
        for observer in self._observers:
            observer.status(status)
