"""A live timeline of scale operations, read from the coordinator's timeline file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

_BAR_WIDTH = 40


@dataclass(slots=True)
class OperationView:
    """One operation as its events tell it. Times are wall-clock seconds."""

    operation_id: str
    epoch: int
    kind: str = ""
    ranks: str = ""
    started_at_s: float = 0.0
    ended_at_s: float | None = None
    outcome: str = ""
    phases: dict[str, tuple[float, float | None]] = field(default_factory=dict)
    detail: dict[str, dict[str, Any]] = field(default_factory=dict)

    def apply(self, event: dict[str, Any]) -> None:
        """Take one event of this operation in."""
        at, phase = float(event["ts"]), str(event["phase"])
        detail = event.get("detail") or {}
        self.kind = detail.get("kind", self.kind)
        self.ranks = detail.get("ranks", self.ranks)
        if event["event"] == "started":
            self.started_at_s = self.started_at_s or at
            self.phases[phase] = (at, None)
        elif event["event"] == "ended":
            began = self.phases.get(phase, (at, None))[0]
            self.phases[phase] = (began, at)
            self.detail[phase] = detail
        elif event["event"] == "closed":
            self.ended_at_s = at
            self.outcome = phase


class TimelineFile:
    """Follows a timeline file; keeps every operation seen, in order."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.operations: dict[str, OperationView] = {}

    def poll(self) -> Iterator[dict[str, Any]]:
        """Events appended since the last call, applied to `operations` as they are yielded."""
        if not self._path.exists():
            return
        with self._path.open() as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith("\n"):
                    break
                self._offset += len(line.encode())
                event = json.loads(line)
                key = str(event["operation_id"])
                if key not in self.operations:
                    self.operations[key] = OperationView(key, int(event["epoch"]))
                self.operations[key].apply(event)
                yield event


def render(operation: OperationView, now_s: float) -> Table:
    """A Gantt table of one operation up to `now_s`."""
    end = operation.ended_at_s or now_s
    span = max(end - operation.started_at_s, 1e-6)
    title = f"{operation.kind} {operation.ranks}, epoch {operation.epoch}"
    table = Table(title=f"{title}: {operation.outcome or 'under way'} {span:.2f} s", box=None)
    for name, justify in (("phase", "left"), ("", "left"), ("seconds", "right"), ("", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for phase, (began, ended) in operation.phases.items():
        until = ended or now_s
        left = int((began - operation.started_at_s) / span * _BAR_WIDTH)
        width = max(1, round((until - began) / span * _BAR_WIDTH))
        style = "green" if ended else "yellow"
        bar = Text(" " * left + "━" * min(width, _BAR_WIDTH - left), style=style)
        note = _note(operation.detail.get(phase, {}))
        table.add_row(phase, bar, f"{until - began:.3f}", note)
    return table


def _note(detail: dict[str, Any]) -> str:
    """The few facts of a phase worth a column."""
    parts = []
    if detail.get("tiers"):
        parts.append("from " + ", ".join(sorted(set(detail["tiers"]))))
    if detail.get("size_bytes"):
        parts.append(f"{detail['size_bytes'] / 1e6:.1f} MB")
    if detail.get("gap_s"):
        parts.append(f"gap {detail['gap_s'] * 1e3:.0f} ms")
    if detail.get("moved"):
        parts.append(f"{detail['moved']} moved")
    return ", ".join(parts)
