"""Traces: one span for the operation, one for each phase, one for each step of each rank."""

from __future__ import annotations

import sys

import pytest

from dynamo_elastic.errors import ConfigError
from dynamo_elastic.report.story import Story
from dynamo_elastic.testing.stories import grown, undone
from dynamo_elastic.tracing import Tracer, open_tracer

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="needs the extra 'otel'")


def spans_of(story: Story) -> list[sdk.ReadableSpan]:  # type: ignore[name-defined]
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    provider, exporter = sdk.TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = Tracer(provider)
    tracer.record(story)
    finished = list(exporter.get_finished_spans())
    tracer.close()
    return finished


def test_spans_are_the_story() -> None:
    story = grown()
    spans = spans_of(story)
    (root,) = [s for s in spans if s.parent is None]
    assert root.name == "scale up"
    assert root.attributes["dynamo_elastic.operation_id"] == story.operation_id
    assert root.start_time == int(story.opened_at_s * 1e9)
    assert (root.end_time - root.start_time) / 1e9 == pytest.approx(story.elapsed_s, abs=1e-6)
    phases = {s.context.span_id: s for s in spans if s.parent == root.context}
    assert [s.name for s in phases.values()] == [p.phase for p in story.phases]
    steps = [s for s in spans if s.parent is not None and s.parent.span_id in phases]
    assert len(steps) == len(story.steps)
    for step in steps:
        phase = phases[step.parent.span_id]
        assert phase.start_time <= step.start_time <= step.end_time <= phase.end_time + 1000
    assert {s.status.status_code.name for s in spans} == {"UNSET"}
    (restored,) = [s for s in steps if s.name == "restore slot3"]
    assert restored.attributes["dynamo_elastic.tier"] == "image"


def test_what_failed_is_an_error() -> None:
    story = undone("too slow")
    wrong = [s for s in spans_of(story) if s.status.status_code.name == "ERROR"]
    assert {s.name for s in wrong} == {"check slot3", "check", "scale up"}
    assert {s.status.description for s in wrong} == {story.failure, "too slow"}


def test_without_the_package_the_setting_is_a_clear_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [m for m in sys.modules if m.startswith("opentelemetry")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match=r"observe\.traces: .*dynamo-elastic\[otel\]"):
        open_tracer("d")
