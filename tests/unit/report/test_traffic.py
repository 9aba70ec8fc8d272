"""Tokens of several workers together: throughput, gaps, and streams that moved between workers."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_elastic.metrics import WorkerMetrics
from dynamo_elastic.report.traffic import BIN_S, MAX_BINS, all_gaps, bin_width, merged
from dynamo_elastic.worker.traffic import KEPT_BINS, KEPT_STREAMS, MOVED, TokenMeter

START_S = 1000.0


class Clock:
    def __init__(self) -> None:
        self.now_s = START_S

    def __call__(self) -> float:
        return self.now_s


def meter(clock: Clock, metrics: WorkerMetrics | None = None) -> TokenMeter:
    return TokenMeter(metrics, now=clock, clock=clock)


def test_a_stream_that_moves_has_one_gap_over_both_workers() -> None:
    clock = Clock()
    old, new = meter(clock), meter(clock)
    stream = old.stream("r")
    for _ in range(3):
        stream.tokens(1)
        clock.now_s += 0.02
    stream.ended(MOVED)
    clock.now_s += 0.3
    moved = new.stream("r")
    moved.tokens(1)
    told = [m.window(w, START_S, clock.now_s) for m, w in ((old, "slot2"), (new, "slot0"))]
    longest = all_gaps([t for t in told if t is not None])[0]
    assert longest.elapsed_s == pytest.approx(0.32)
    assert (longest.moved_from, longest.worker, longest.request_id) == ("slot2", "slot0", "r")


def test_metrics_count_tokens_gaps_and_ends() -> None:
    clock, metrics = Clock(), WorkerMetrics()
    one = meter(clock, metrics)
    stream = one.stream("r")
    stream.tokens(0)  # nothing was handed out
    stream.tokens(2)
    clock.now_s += 0.03
    stream.tokens(1)
    assert metrics.value("requests_running") == 1
    stream.ended("stop")
    assert metrics.value("tokens_total") == 3
    assert metrics.value("token_gap_seconds_count") == 1
    assert metrics.value("token_gap_seconds_bucket", le="0.035") == 1
    assert metrics.value("requests_total", outcome="stop") == 1
    assert metrics.value("requests_running") == 0


def test_nothing_seen_is_nothing_told() -> None:
    clock = Clock()
    one = meter(clock)
    assert one.window("slot0", 0.0, 2 * START_S) is None
    one.stream("r").tokens(1)
    assert one.window("slot0", START_S + 1, START_S + 2) is None


def test_what_is_remembered_has_a_bound() -> None:
    clock = Clock()
    one = meter(clock)
    for k in range(KEPT_STREAMS + 10):
        one.stream(f"r{k}").tokens(1)
    told = one.window("slot0", START_S - 1, START_S + 1)
    assert told is not None
    assert len(told.arrived) == KEPT_STREAMS
    assert "r0" not in told.arrived


def test_tokens_of_hours_take_no_more_memory_than_those_of_minutes() -> None:
    clock = Clock()
    one = meter(clock)
    stream = one.stream("r")

    def go_on(bins: int) -> int:
        for _ in range(bins):
            clock.now_s += BIN_S
            stream.tokens(1)
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = go_on(1000)
        assert go_on(2 * KEPT_BINS) - before < 10_000
    finally:
        tracemalloc.stop()
    told = one.window("slot0", START_S, clock.now_s)
    assert told is not None
    assert sum(told.tokens) == KEPT_BINS


@given(
    times=st.lists(st.floats(0, 50), min_size=1, max_size=60).map(sorted),
    second=st.lists(st.floats(0, 90), min_size=1, max_size=60).map(sorted),
)
def test_no_token_is_lost_and_no_gap_shortened(times: list[float], second: list[float]) -> None:
    clock = Clock()
    told = []
    for worker, at in (("slot0", times), ("slot1", second)):
        one = meter(clock)
        stream = one.stream(worker)
        for t in at:
            clock.now_s = START_S + t
            stream.tokens(1)
        window = one.window(worker, START_S - 1, START_S + at[-1] + 1)
        assert window is not None
        assert len(window.tokens) <= MAX_BINS + 1
        told.append(window)
    width_s, bins = merged(told)
    assert sum(b.tokens for b in bins) == len(times) + len(second)
    gaps = [b - a for at in (times, second) for a, b in pairwise(at)]
    assert max(b.gap_s for b in bins) == pytest.approx(max(gaps, default=0.0), abs=1e-5)
    steps = [round((b.began_at_s - a.began_at_s) / width_s) for a, b in pairwise(bins)]
    assert steps == [1] * (len(bins) - 1)


def test_bins_widen_with_the_window() -> None:
    assert bin_width(1.0) == BIN_S
    assert bin_width(BIN_S * MAX_BINS) == BIN_S
    assert bin_width(60.0) == 0.4
