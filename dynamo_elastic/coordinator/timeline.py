"""The story of every operation, one JSON line an event, for people, reports and who takes over."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dynamo_elastic.coordinator.observe import Event, EventName, Observer
from dynamo_elastic.coordinator.records import OperationRecord
from dynamo_elastic.types import OperationId

log = logging.getLogger(__name__)

TIMELINE_FILE = "timeline.jsonl"
MAX_BYTES = 32 << 20
"""Of one file; there are two at most, the newer one and the one before."""


class Timeline(Observer):
    """Appends to a file; with None it writes nothing."""

    def __init__(self, path: Path | None, *, max_bytes: int = MAX_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes

    def event(self, record: OperationRecord, event: Event) -> None:
        """Append one event. A disk that is full stops no operation."""
        if self._path is None:
            return
        line = {
            "ts": event.at_s,
            "operation_id": record.operation_id,
            "kind": record.kind,
            "epoch": record.plan.after.epoch,
            "phase": record.phase,
            "event": event.name,
            "elapsed_s": round(event.elapsed_s, 6),
            "detail": event.detail,
        }
        try:
            with self._path.open("a") as out:
                out.write(json.dumps(line) + "\n")
            if event.name is EventName.END and self._path.stat().st_size > self._max_bytes:
                self._path.replace(_older(self._path))
        except OSError as exc:
            log.warning("%s can't be written: %s", self._path, exc)

    def events_of(self, operation_id: OperationId) -> list[dict[str, Any]]:
        """What is in the files of that operation, of coordinators before this one too. A line that
        was cut off by a kill is left out."""
        if self._path is None:
            return []
        found = []
        for line in _lines(self._path):
            if operation_id in line:
                try:
                    event = json.loads(line)
                except ValueError:
                    continue
                if event["operation_id"] == operation_id:
                    found.append(event)
        return found


def _older(path: Path) -> Path:
    return path.with_name(path.name + ".1")


def _lines(path: Path) -> Iterator[str]:
    for file in (_older(path), path):
        try:
            with file.open() as lines:
                yield from lines
        except FileNotFoundError:
            continue
