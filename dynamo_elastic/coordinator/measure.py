"""What the coordinator's metrics are counted from: events, what is stored, and finished stories."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamo_elastic.coordinator.observe import Event, EventName, Observer
from dynamo_elastic.coordinator.records import OperationRecord
from dynamo_elastic.coordinator.status import Status
from dynamo_elastic.metrics import CoordinatorMetrics
from dynamo_elastic.phases import Kind, Step
from dynamo_elastic.report.story import Story


class Measure(Observer):
    """Counts on `metrics`."""

    def __init__(self, metrics: CoordinatorMetrics) -> None:
        self._metrics = metrics
        self._idle()

    def event(self, record: OperationRecord, event: Event) -> None:
        metrics, kind, phase = self._metrics, record.kind, record.phase
        if event.name is EventName.STEP:
            self._step(event.detail["step"], event.detail["workers"])
        elif event.name is EventName.LOST:
            metrics.members_lost.labels(phase).inc()
        elif event.name in (EventName.DONE, EventName.FAILED):
            metrics.phase_seconds.labels(kind, phase, event.name).observe(event.elapsed_s)
        elif event.name is EventName.END:
            metrics.operations.labels(kind, phase).inc()
            metrics.operation_seconds.labels(kind, phase).observe(event.elapsed_s)
        running = event.name is not EventName.END
        metrics.operations_running.labels(kind).set(int(running))

    def _step(self, step: str, workers: Mapping[str, Mapping[str, Any]]) -> None:
        metrics = self._metrics
        for said in workers.values():
            metrics.step_seconds.labels(step, said["outcome"]).observe(said["elapsed_s"])
            facts = said.get("facts", {})
            if step == Step.RESTORE and "tier" in facts:
                metrics.joins.labels(facts["tier"]).inc()
            if facts.get("size_bytes"):
                metrics.moved_bytes.labels(step).inc(facts["size_bytes"])
                metrics.push_seconds.labels(step).inc(facts["elapsed_s"])
            if step == Step.SWITCH and facts.get("switched"):
                metrics.switch_gap_seconds.observe(facts["gap_s"])
                metrics.decided_to_switched_seconds.observe(facts["decided_to_first_step_s"])
            if step == Step.DRAIN:
                metrics.requests_moved.inc(facts.get("moved", 0))

    def status(self, status: Status | None) -> None:
        metrics = self._metrics
        metrics.leading.set(int(status is not None))
        if status is None:
            self._idle()
            return
        metrics.ranks.set(status.width)
        metrics.ranks_wanted.set(status.target.ranks if status.target else status.width)
        metrics.ranks_lost.set(len(status.lost_reasons()))
        metrics.standby_slots.set(len(status.standby()))
        metrics.suspects.set(len(status.strikes))
        metrics.epoch.set(status.in_force.epoch if status.in_force else 0)

    def _idle(self) -> None:
        for kind in Kind:
            self._metrics.operations_running.labels(kind).set(0)

    def saved(self, ok: bool) -> None:
        """A report was written, or could not be."""
        self._metrics.reports.labels("ok" if ok else "failed").inc()

    def story(self, story: Story) -> None:
        """An operation has ended, and all is known of it."""
        if story.longest_gap is not None:
            gap_s = story.longest_gap.elapsed_s
            self._metrics.longest_gap_seconds.labels(story.kind).observe(gap_s)
