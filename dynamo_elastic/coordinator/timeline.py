"""The story of every operation, one JSON line an event, for people and reports."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from dynamo_elastic.coordinator.records import OperationRecord

TIMELINE_FILE = "timeline.jsonl"


class Timeline:
    """Appends to a file; with None it writes nothing. Nothing is ever read back from it."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def write(
        self,
        record: OperationRecord,
        event: str,
        *,
        elapsed_s: float = 0.0,
        detail: dict[str, Any] | None = None,
    ) -> None:
        """Append one event of the phase that `record` is in."""
        if self._path is None:
            return
        line = {
            "ts": time.time(),
            "operation_id": record.operation_id,
            "kind": record.kind,
            "epoch": record.plan.after.epoch,
            "phase": record.phase,
            "event": event,
            "elapsed_s": round(elapsed_s, 6),
            "detail": detail or {},
        }
        with self._path.open("a") as out:
            out.write(json.dumps(line) + "\n")
