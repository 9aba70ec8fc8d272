"""What happened in one operation: the one source of timeline, page, traces and history. Pure.

Times are wall-clock seconds of the coordinator; a rank's own clock is used inside the time that the
coordinator waited for it, never beyond.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

from pydantic import TypeAdapter, ValidationError

from dynamo_elastic.errors import ElasticError
from dynamo_elastic.phases import Phase, Step
from dynamo_elastic.report.traffic import Bin, Gap, WorkerTraffic, all_gaps, merged

SCHEMA_VERSION = 1
DISK = "disk"
"""Where the weights of a boot come from."""

_MOVING = (Step.LOAD, Step.STREAM, Step.PUSH_EXPERTS)


class StoryError(ElasticError):
    """A stored story can't be read."""


class Role(StrEnum):
    """What an operation is to a worker."""

    RETAINED = "retained"
    JOINER = "joiner"
    LEAVER = "leaver"


class StepOutcome(StrEnum):
    """What became of one step of one worker."""

    DONE = "done"
    FAILED = "failed"
    LOST = "lost"
    """Its lease ran out, or its engine died."""
    SILENT = "silent"
    """No answer before the deadline, or nobody waited for it any more."""


@dataclass(frozen=True, slots=True)
class Part:
    """A worker's part in the operation. `state` is its last answer."""

    worker: str
    role: Role
    rank: int | None
    """In the topology that the operation makes; a leaver's in the one before."""
    state: str = ""


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """One phase. `elapsed_s` is None while it is under way."""

    phase: str
    began_at_s: float
    elapsed_s: float | None
    failed: bool = False
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepSpan:
    """One step of one worker. `facts` is what it said of it."""

    phase: str
    step: str
    worker: str
    began_at_s: float
    elapsed_s: float
    outcome: StepOutcome
    reason: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Link:
    """Bytes of one step that went from `source` to `target` in `elapsed_s`: the time that the
    source took for all of its targets."""

    source: str
    target: str
    step: str
    size_bytes: int
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class Joiner:
    """Where the engine of a joiner came from, and why from nowhere better."""

    worker: str
    tier: str
    ready_s: float
    fell_through: tuple[str, ...]


@dataclass(frozen=True)
class Story:
    """One operation from its opening to its end, or so far."""

    deployment: str
    operation_id: str
    kind: str
    phase: str
    epoch: int
    source: str
    request_id: str
    ranks_before: int
    ranks_after: int
    opened_at_s: float
    elapsed_s: float
    deadline_at_s: float
    parts: tuple[Part, ...]
    phases: tuple[PhaseSpan, ...]
    steps: tuple[StepSpan, ...] = ()
    traffic: tuple[WorkerTraffic, ...] = ()
    failure: str = ""
    lost: tuple[str, ...] = ()
    safe_to_release: tuple[str, ...] = ()

    @property
    def over(self) -> bool:
        return self.phase in (Phase.DONE, Phase.ABORTED)

    @property
    def ended_at_s(self) -> float:
        return self.opened_at_s + self.elapsed_s

    @property
    def title(self) -> str:
        return f"{self.kind} {self.ranks_before} → {self.ranks_after} ranks"

    @cached_property
    def links(self) -> tuple[Link, ...]:
        """Bytes by source, target and step, all rounds of a step together."""
        found: dict[tuple[str, str, str], tuple[int, float]] = {}
        for source, target, step, size_bytes, elapsed_s in self._pushes():
            before = found.get((source, target, step), (0, 0.0))
            found[source, target, step] = (before[0] + size_bytes, before[1] + elapsed_s)
        return tuple(Link(*key, *value) for key, value in found.items())

    def _pushes(self) -> Iterator[tuple[str, str, str, int, float]]:
        for span in self.steps:
            size_bytes = int(span.facts.get("size_bytes", 0))
            if span.step not in _MOVING or not size_bytes:
                continue
            elapsed_s = float(span.facts.get("elapsed_s", span.elapsed_s))
            if span.step == Step.LOAD:
                yield DISK, span.worker, span.step, size_bytes, elapsed_s
            for target, to_target in span.facts.get("links", {}).items():
                yield span.worker, target, span.step, int(to_target), elapsed_s

    @property
    def moved_bytes(self) -> int:
        return sum(link.size_bytes for link in self.links)

    @property
    def joiners(self) -> tuple[Joiner, ...]:
        return tuple(
            Joiner(
                s.worker,
                str(s.facts["tier"]),
                float(s.facts.get("ready_s", 0.0)),
                tuple(s.facts.get("fell_through", ())),
            )
            for s in self.steps
            if s.step == Step.RESTORE and "tier" in s.facts
        )

    @property
    def switch(self) -> StepSpan | None:
        """The step of the rank that paused longest at the switch; None if nobody has switched."""
        switched = [s for s in self.steps if s.step == Step.SWITCH and s.facts.get("switched")]
        return max(switched, key=lambda s: float(s.facts.get("gap_s", 0.0)), default=None)

    @property
    def switch_gap_s(self) -> float:
        """Longest pause between two steps of any rank at the switch."""
        return float(self.switch.facts.get("gap_s", 0.0)) if self.switch else 0.0

    @property
    def requests_moved(self) -> int:
        return sum(int(s.facts.get("moved", 0)) for s in self.steps if s.step == Step.DRAIN)

    @property
    def troubles(self) -> tuple[StepSpan, ...]:
        """Steps that were not done."""
        return tuple(s for s in self.steps if s.outcome is not StepOutcome.DONE)

    @cached_property
    def bins(self) -> tuple[float, list[Bin]]:
        """Width in seconds, and tokens of all workers over time."""
        return merged(self.traffic)

    @cached_property
    def gaps(self) -> list[Gap]:
        """Gaps of streams that overlap the operation, longest first."""
        return [
            g
            for g in all_gaps(self.traffic)
            if g.ended_at_s >= self.opened_at_s and g.began_at_s <= self.ended_at_s
        ]

    @property
    def longest_gap(self) -> Gap | None:
        return self.gaps[0] if self.gaps else None

    def longest_gap_of(self, moved: bool) -> Gap | None:
        """Of streams that were moved to another rank meanwhile, or of those that were not."""
        return next((g for g in self.gaps if bool(g.moved_from) == moved), None)

    def phase_at(self, at_s: float) -> str:
        """The phase that was under way at `at_s`, '' outside of all."""
        began = [p.phase for p in self.phases if p.began_at_s <= at_s]
        return began[-1] if began and at_s <= self.ended_at_s else ""


_STORY = TypeAdapter(Story)
_ENVELOPE = TypeAdapter(dict[str, Any])


def encode_story(story: Story) -> bytes:
    """JSON with a schema version."""
    return b'{"schema_version":%d,"story":%s}\n' % (SCHEMA_VERSION, _STORY.dump_json(story))


def decode_story(raw: bytes) -> Story:
    """The inverse of encode_story(). Raises StoryError."""
    try:
        envelope = _ENVELOPE.validate_json(raw)
        if envelope.get("schema_version") != SCHEMA_VERSION:
            version = envelope.get("schema_version")
            raise StoryError(f"schema version {version}, this program reads {SCHEMA_VERSION}")
        return _STORY.validate_python(envelope.get("story"))
    except ValidationError as exc:
        raise StoryError(f"not a story: {exc.error_count()} faults") from exc
