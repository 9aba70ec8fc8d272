"""Tokens as they pass through this shell: counted for metrics, and kept for a few minutes so that
the report of an operation can show what its clients saw."""

from __future__ import annotations

import time
from collections.abc import Callable

from dynamo_elastic.metrics import WorkerMetrics
from dynamo_elastic.report.traffic import BIN_S, Gap, WorkerTraffic, bin_width, widened

KEPT_BINS = 12_000
"""Ten minutes of tokens without a pause."""
KEPT_STREAMS = 512
"""Streams whose first or last token is remembered, to join those that were moved."""
NAMED_GAPS = 4
GONE, MOVED = "gone", "moved"


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
        self._bins: dict[int, int] = {}
        self._gaps: dict[int, tuple[float, float, str]] = {}
        """By bin: the longest gap that ended in it, when it began, and whose it was."""
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
        self._bins[index] = self._bins.get(index, 0) + count
        if len(self._bins) > KEPT_BINS:
            oldest = next(iter(self._bins))
            del self._bins[oldest]
            self._gaps.pop(oldest, None)
        self._metrics.tokens.inc(count)
        if before_s is None:
            _remember(self._arrived, request_id, at_s)
        else:
            gap_s = clock_s - before_s
            self._metrics.token_gap_seconds.observe(gap_s)
            if gap_s > self._gaps.get(index, (0.0,))[0]:
                self._gaps[index] = (gap_s, at_s - gap_s, request_id)
        return clock_s

    def ended(self, request_id: str, outcome: str, last_s: float | None) -> None:
        """A stream ended here; one that moves goes on from its last token elsewhere."""
        self._metrics.requests_running.dec()
        self._metrics.requests.labels(outcome).inc()
        if outcome == MOVED and last_s is not None:
            _remember(self._left, request_id, self._now() - (self._clock() - last_s))

    def window(self, worker: str, since_s: float, until_s: float) -> WorkerTraffic | None:
        """What there was from `since_s` to `until_s` (wall clock); None if there was nothing."""
        first, last = int(since_s / BIN_S), int(until_s / BIN_S)
        narrow = {
            k: (count, self._gaps.get(k, (0.0,))[0])
            for k, count in self._bins.items()
            if first <= k <= last
        }
        if not narrow:
            return None
        width_s = bin_width(until_s - since_s)
        wide = widened(narrow, width_s)
        span = range(min(wide), max(wide) + 1)
        longest = sorted((self._gaps[k] for k in narrow if k in self._gaps), reverse=True)
        return WorkerTraffic(
            worker=worker,
            bin_s=width_s,
            first_bin=span.start,
            tokens=tuple(wide.get(k, (0, 0.0))[0] for k in span),
            gaps_s=tuple(round(wide.get(k, (0, 0.0))[1], 6) for k in span),
            longest=tuple(
                Gap(began_at_s, gap_s, worker, request)
                for gap_s, began_at_s, request in longest[:NAMED_GAPS]
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
