"""A trace of each operation, if wanted: the one importer of OpenTelemetry.

One span for the operation, a child for each phase, and in it one for each step of each rank; made
of the finished story, so that tracing costs an operation nothing. Where spans go is said by
OpenTelemetry's own variables (OTEL_EXPORTER_OTLP_ENDPOINT and its like).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dynamo_elastic.errors import ConfigError
from dynamo_elastic.phases import Phase
from dynamo_elastic.report.story import StepOutcome, StepSpan, Story

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

SERVICE = "dynamo-elastic"


class Tracer:
    """Sends stories as traces. `provider` is ours from now on: close() shuts it down."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer(SERVICE)

    def record(self, story: Story) -> None:
        """Queue the spans of `story`; they are sent by a thread, or dropped if they can't be."""
        root = self._span(
            f"scale {story.kind}",
            None,
            story.opened_at_s,
            story.elapsed_s,
            {
                "operation_id": story.operation_id,
                "kind": story.kind,
                "outcome": story.phase,
                "epoch": story.epoch,
                "ranks_before": story.ranks_before,
                "ranks_after": story.ranks_after,
                "moved_bytes": story.moved_bytes,
                "switch_gap_s": story.switch_gap_s,
                "longest_gap_s": story.longest_gap.elapsed_s if story.longest_gap else 0.0,
            },
            error=story.failure if story.phase == Phase.ABORTED else "",
        )
        for phase in story.phases:
            elapsed_s = phase.elapsed_s or 0.0
            error = story.failure if phase.failed else ""
            about = {"phase": phase.phase}
            span = self._span(phase.phase, root, phase.began_at_s, elapsed_s, about, error=error)
            until_s = phase.began_at_s + elapsed_s
            for step in story.steps:
                if step.phase == phase.phase and phase.began_at_s <= step.began_at_s <= until_s:
                    self._step(step, span)

    def close(self) -> None:
        """Send what is queued; waits a few seconds at most."""
        self._provider.shutdown()

    def _step(self, step: StepSpan, parent: Any) -> None:
        about: dict[str, Any] = {
            "worker": step.worker,
            "step": step.step,
            "outcome": step.outcome.value,
        }
        about |= {k: v for k, v in step.facts.items() if isinstance(v, str | int | float)}
        error = "" if step.outcome is StepOutcome.DONE else step.reason or step.outcome.value
        name = f"{step.step} {step.worker}"
        self._span(name, parent, step.began_at_s, step.elapsed_s, about, error=error)

    def _span(
        self,
        name: str,
        parent: Any,
        began_at_s: float,
        elapsed_s: float,
        about: Mapping[str, Any],
        *,
        error: str,
    ) -> Any:
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        span = self._tracer.start_span(
            name,
            context=set_span_in_context(parent) if parent is not None else None,
            start_time=int(began_at_s * 1e9),
            attributes={f"dynamo_elastic.{k}": v for k, v in about.items()},
        )
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(end_time=int((began_at_s + elapsed_s) * 1e9))
        return span


def open_tracer(deployment: str) -> Tracer:
    """Raises ConfigError if OpenTelemetry is not installed."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as exc:
        raise ConfigError(
            [f"observe.traces: {exc.name} is missing; pip install 'dynamo-elastic[otel]', or false"]
        ) from exc
    about = {"service.name": SERVICE, "service.namespace": deployment}
    provider = TracerProvider(resource=Resource.create(about))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracer(provider)
