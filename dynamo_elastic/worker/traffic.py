"""Tokens as they pass through this shell: counted for metrics, and kept for a few minutes so that
the report of an operation can show what its clients saw."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dynamo_elastic.metrics import WorkerMetrics
from dynamo_elastic.report.traffic import BIN_S, Gap, WorkerTraffic, bin_width, widened

KEPT_BINS = 12_000
"""Ten minutes of tokens without a pause."""
KEPT_STREAMS = 512
"""Streams whose first or last token is remembered, to join those that were moved."""
NAMED_GAPS = 4
GONE, MOVED = "gone", "moved"


@dataclass(frozen=True, slots=True)
class _Held:
    """One bin, and the longest gap that ended in it: when it began, and whose it was."""

    index: int
    tokens: int
    gap_s: float
    began_at_s: float
    request_id: str


class _Bins:
    """The newest bins, in memory that is taken once: however long a shell hands out tokens, it
    holds no more than at first."""

    def __init__(self) -> None:
        self._index = array("q", [-1]) * KEPT_BINS
        self._tokens = array("q", [0]) * KEPT_BINS
        self._gap_s = array("d", [0.0]) * KEPT_BINS
        self._began_at_s = array("d", [0.0]) * KEPT_BINS
        self._request_ids = [""] * KEPT_BINS

    def add(self, index: int, count: int) -> None:
        """`count` tokens in that bin; what stood in its place, KEPT_BINS ago, is forgotten."""
        at = index % KEPT_BINS
        if self._index[at] != index:
            self._index[at], self._tokens[at], self._gap_s[at] = index, 0, 0.0
            self._request_ids[at] = ""
        self._tokens[at] += count

    def gap(self, index: int, gap_s: float, began_at_s: float, request_id: str) -> None:
        """A gap that ended in that bin, after add()."""
        at = index % KEPT_BINS
        if gap_s > self._gap_s[at]:
            self._gap_s[at], self._began_at_s[at] = gap_s, began_at_s
            self._request_ids[at] = request_id

    def within(self, first: int, last: int) -> Iterator[_Held]:
        for at, index in enumerate(self._index):
            if first <= index <= last:
                yield _Held(
                    index,
                    self._tokens[at],
                    self._gap_s[at],
                    self._began_at_s[at],
                    self._request_ids[at],
                )


class TokenMeter:
    """Feeds `metrics`. Times are the wall clock's, lengths the monotonic clock's."""

    def __init__(
        self,
        metrics: WorkerMetrics | None = None,
        *,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics or WorkerMetrics()
        self._now = now
        self._clock = clock
        self._bins = _Bins()
        self._arrived: dict[str, float] = {}
        self._left: dict[str, float] = {}

    def stream(self, request_id: str) -> StreamMeter:
        """A request begins here; `request_id` is the frontend's, which it keeps when it moves."""
        self._metrics.requests_running.inc()
        return StreamMeter(self, request_id)

    def token(self, request_id: str, count: int, before_s: float | None) -> float:
        """`count` tokens of a stream whose last token was at `before_s`; returns this one's time by
        the monotonic clock."""
        at_s, clock_s = self._now(), self._clock()
        index = int(at_s / BIN_S)
        self._bins.add(index, count)
        self._metrics.tokens.inc(count)
        if before_s is None:
            _remember(self._arrived, request_id, at_s)
        else:
            gap_s = clock_s - before_s
            self._metrics.token_gap_seconds.observe(gap_s)
            self._bins.gap(index, gap_s, at_s - gap_s, request_id)
        return clock_s

    def ended(self, request_id: str, outcome: str, last_s: float | None) -> None:
        """A stream ended here; one that moves goes on from its last token elsewhere."""
        self._metrics.requests_running.dec()
        self._metrics.requests.labels(outcome).inc()
        if outcome == MOVED and last_s is not None:
            _remember(self._left, request_id, self._now() - (self._clock() - last_s))

    def window(self, worker: str, since_s: float, until_s: float) -> WorkerTraffic | None:
        """What there was from `since_s` to `until_s` (wall clock); None if there was nothing."""
        held = list(self._bins.within(int(since_s / BIN_S), int(until_s / BIN_S)))
        if not held:
            return None
        width_s = bin_width(until_s - since_s)
        wide = widened({b.index: (b.tokens, b.gap_s) for b in held}, width_s)
        span = range(min(wide), max(wide) + 1)
        longest = sorted((b for b in held if b.request_id), key=lambda b: -b.gap_s)
        return WorkerTraffic(
            worker=worker,
            bin_s=width_s,
            first_bin=span.start,
            tokens=tuple(wide.get(k, (0, 0.0))[0] for k in span),
            gaps_s=tuple(round(wide.get(k, (0, 0.0))[1], 6) for k in span),
            longest=tuple(
                Gap(b.began_at_s, b.gap_s, worker, b.request_id) for b in longest[:NAMED_GAPS]
            ),
            arrived={r: at for r, at in self._arrived.items() if since_s <= at <= until_s},
            left={r: at for r, at in self._left.items() if since_s <= at <= until_s},
        )


class StreamMeter:
    """One stream here, from its request to its end."""

    def __init__(self, meter: TokenMeter, request_id: str) -> None:
        self._meter = meter
        self._request_id = request_id
        self._last_s: float | None = None

    def tokens(self, count: int) -> None:
        """So many tokens were handed out just now."""
        if count:
            self._last_s = self._meter.token(self._request_id, count, self._last_s)

    def ended(self, outcome: str) -> None:
        """Why it ended here: a finish reason, MOVED or GONE."""
        self._meter.ended(self._request_id, outcome, self._last_s)


def _remember(streams: dict[str, float], request_id: str, at_s: float) -> None:
    streams.pop(request_id, None)
    streams[request_id] = at_s
    if len(streams) > KEPT_STREAMS:
        del streams[next(iter(streams))]
