"""AgentMetrics: on a registry of their own, on loopback, off unless asked for."""

from __future__ import annotations

import socket
import urllib.request

import pytest

from dynamo_elastic.agent.base import Tier
from dynamo_elastic.engine.base import Finish
from dynamo_elastic.errors import ResourceMissing
from dynamo_elastic.metrics import (
    FINISHES,
    LOOPBACK,
    TIERS,
    AgentMetrics,
    CoordinatorMetrics,
    serve,
)


def free_port() -> int:
    with socket.socket() as held:
        held.bind((LOOPBACK, 0))
        return int(held.getsockname()[1])


def test_what_is_counted_can_be_scraped() -> None:
    metrics = AgentMetrics()
    metrics.engine_starts.labels("image", "ok").inc()
    metrics.start_seconds.labels("image").observe(0.2)
    metrics.parked_engines.set(2)
    port = free_port()
    with serve(metrics, port):
        with urllib.request.urlopen(f"http://{LOOPBACK}:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        with (
            pytest.raises(ResourceMissing, match=f"port {port} on {LOOPBACK}"),
            serve(AgentMetrics(), port),
        ):
            pass
    assert 'dynamo_elastic_engine_starts_total{outcome="ok",tier="image"} 1.0' in text
    assert "dynamo_elastic_parked_engines 2.0" in text
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://{LOOPBACK}:{port}/metrics", timeout=10)


def test_nothing_is_served_unless_asked_for() -> None:
    with serve(AgentMetrics(), 0):
        pass


def test_what_happens_seldom_is_there_before_it_happens() -> None:
    coordinator = {s.name for m in CoordinatorMetrics().registry.collect() for s in m.samples}
    assert "dynamo_elastic_operation_longest_gap_seconds_bucket" in coordinator
    assert tuple(Tier) == TIERS
    assert {f.value for f in Finish if f is not Finish.FAILED} | {"gone"} == set(FINISHES)
    samples = [s for m in CoordinatorMetrics().registry.collect() for s in m.samples]
    assert len(samples) < 1500  # whatever the number of ranks


def test_processes_count_for_themselves() -> None:
    one, two = AgentMetrics(), AgentMetrics()
    one.parks.labels("ok").inc()
    assert one.value("parks_total", outcome="ok") == 1
    assert two.value("parks_total", outcome="ok") == 0
