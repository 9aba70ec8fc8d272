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
    kind: str
    started_at_s: float = 0.0
    ended_at_s: float | None = None
    outcome: str = ""
    phases: dict[str, tuple[float, float | None]] = field(default_factory=dict)
    detail: dict[str, dict[str, Any]] = field(default_factory=dict)

    def apply(self, event: dict[str, Any]) -> None:
        """Take one event of this operation in."""
        at, phase = float(event["ts"]), str(event["phase"])
        self.started_at_s = self.started_at_s or at
        if event["event"] == "begin":
            self.phases[phase] = (at, None)
        elif event["event"] == "done":
            began = self.phases.get(phase, (at - float(event["elapsed_s"]), None))[0]
            self.phases[phase] = (began, at)
            self.detail[phase] = event["detail"]
        elif event["event"] == "end":
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
        if self._path.stat().st_size < self._offset:
            self._offset = 0  # it had become long, and a new one was begun
        with self._path.open() as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith("\n"):
                    break
                self._offset += len(line.encode())
                event = json.loads(line)
                key = str(event["operation_id"])
                if key not in self.operations:
                    self.operations[key] = OperationView(
                        key, int(event["epoch"]), str(event["kind"])
                    )
                self.operations[key].apply(event)
                yield event


def render(operation: OperationView, now_s: float) -> Table:
    """A Gantt table of one operation up to `now_s`."""
    end = operation.ended_at_s or now_s
    span = max(end - operation.started_at_s, 1e-6)
    title = f"scale {operation.kind}, epoch {operation.epoch}"
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
    facts = PhaseFacts.of(detail)
    parts = []
    if facts.tiers:
        parts.append("from " + ", ".join(sorted(set(facts.tiers))))
    if facts.size_bytes:
        parts.append(f"{facts.size_bytes / 1e6:.1f} MB")
    if facts.gap_s:
        parts.append(f"gap {facts.gap_s * 1e3:.0f} ms")
    if facts.moved:
        parts.append(f"{facts.moved} moved")
    return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class PhaseFacts:
    """What a phase's detail says, over all its steps and workers."""

    tiers: tuple[str, ...] = ()
    ready_s: tuple[float, ...] = ()
    size_bytes: int = 0
    transfer_s: float = 0.0
    """Time of the steps that moved `size_bytes`: the slowest source of each."""
    switch_s: float = 0.0
    """Decision in etcd to the first right step of the slowest rank."""
    gap_s: float = 0.0
    """Longest pause between two steps at the switch, of any retained rank."""
    moved: int = 0

    @classmethod
    def of(cls, detail: dict[str, Any]) -> PhaseFacts:
        """Read `PhaseRecord.detail`: step -> worker -> what it measured."""
        acks = [a for step in detail.values() if isinstance(step, dict) for a in step.values()]
        sources = [
            [a for a in step.values() if a.get("size_bytes")]
            for step in detail.values()
            if isinstance(step, dict)
        ]
        return cls(
            tiers=tuple(a["tier"] for a in acks if "tier" in a),
            ready_s=tuple(a["ready_s"] for a in acks if "ready_s" in a),
            size_bytes=sum(a.get("size_bytes", 0) for a in acks),
            transfer_s=sum(max(a["elapsed_s"] for a in step) for step in sources if step),
            switch_s=max((a["decided_to_first_step_s"] for a in acks if "gap_s" in a), default=0.0),
            gap_s=max((a["gap_s"] for a in acks if "gap_s" in a), default=0.0),
            moved=sum(a.get("moved", 0) for a in acks),
        )
