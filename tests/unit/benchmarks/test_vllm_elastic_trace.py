"""The trace of the ramp, and its windows."""

from __future__ import annotations

import pytest
from vllm_elastic_trace import FAILED_S, Waited, arrivals, p95_between, windows


def test_a_trace_is_the_same_in_every_run() -> None:
    assert arrivals(20.0, 10.0) == arrivals(20.0, 10.0)
    assert arrivals(20.0, 10.0) != arrivals(20.0, 10.0, seed=12)


def test_the_rate_doubles() -> None:
    times = [arrival.at_s for arrival in arrivals(100.0, 60.0)]
    assert times == sorted(times)
    first = sum(t < 6 for t in times) / 6
    last = sum(t > 54 for t in times) / 6
    assert first == pytest.approx(100, rel=0.15)
    assert last == pytest.approx(200, rel=0.15)


def test_a_window_has_what_arrived_in_it() -> None:
    waited = [Waited(float(second), 0.1 if second < 45 else 2.0, False) for second in range(60)]
    found = dict(windows(waited, 60.0))
    assert list(found) == [30.0, 35.0, 40.0, 45.0, 50.0, 55.0, 60.0]
    assert found[45.0] == 0.1
    assert found[50.0] == 2.0


def test_a_request_that_failed_is_the_longest_wait() -> None:
    waited = [Waited(1.0, FAILED_S, True), Waited(2.0, 0.1, False)]
    assert p95_between(waited, 0.0, 3.0) == FAILED_S
    assert p95_between(waited, 5.0, 6.0) is None


def test_a_window_without_requests_is_left_out() -> None:
    assert list(windows([], 60.0)) == []
