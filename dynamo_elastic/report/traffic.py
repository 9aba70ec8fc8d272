"""Tokens as the worker shells hand them out: how many, and how long each stream had to wait.

Times are wall-clock seconds. Bins lie on multiples of their width, so that those of several workers
add up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

BIN_S = 0.05
"""Width of the narrowest bin; wider ones are this times a power of two."""
MAX_BINS = 240
"""Of one worker in one record: wider bins are taken rather than more."""


@dataclass(frozen=True, slots=True)
class Gap:
    """A stream waited from `began_at_s` for `elapsed_s` seconds for its next token."""

    began_at_s: float
    elapsed_s: float
    worker: str
    """Which handed out the token that ended it."""
    request_id: str
    moved_from: str = ""
    """The worker that had the stream before, if it was moved meanwhile."""

    @property
    def ended_at_s(self) -> float:
        return self.began_at_s + self.elapsed_s


@dataclass(frozen=True, slots=True)
class WorkerTraffic:
    """What one worker handed out around one operation."""

    worker: str
    bin_s: float
    first_bin: int
    """Bin k of the lists begins at (first_bin + k) * bin_s."""
    tokens: tuple[int, ...]
    gaps_s: tuple[float, ...]
    """The longest gap that ended in each bin."""
    longest: tuple[Gap, ...] = ()
    """The longest gaps, longest first."""
    arrived: dict[str, float] = field(default_factory=dict)
    """Request -> first token here."""
    left: dict[str, float] = field(default_factory=dict)
    """Request that was moved away -> its last token here."""


@dataclass(frozen=True, slots=True)
class Bin:
    """All workers together, from `began_at_s` on."""

    began_at_s: float
    tokens: int
    gap_s: float


def bin_width(span_s: float) -> float:
    """The narrowest width of which MAX_BINS cover `span_s`."""
    width_s = BIN_S
    while width_s * MAX_BINS < span_s:
        width_s *= 2
    return width_s


def merged(traffic: Iterable[WorkerTraffic]) -> tuple[float, list[Bin]]:
    """Bin width and the bins of all workers, from the first to the last without a hole."""
    traffic = [t for t in traffic if t.tokens]
    if not traffic:
        return BIN_S, []
    width_s = max(t.bin_s for t in traffic)
    tokens: dict[int, int] = defaultdict(int)
    gaps: dict[int, float] = defaultdict(float)
    for one in traffic:
        for k, count in enumerate(one.tokens):
            at = int((one.first_bin + k + 0.5) * one.bin_s / width_s)
            tokens[at] += count
            gaps[at] = max(gaps[at], one.gaps_s[k])
    bins = [Bin(k * width_s, tokens[k], gaps[k]) for k in range(min(tokens), max(tokens) + 1)]
    return width_s, bins


def all_gaps(traffic: Iterable[WorkerTraffic]) -> list[Gap]:
    """The longest gaps of all streams, longest first, those of streams that moved from one worker
    to another among them: no worker alone sees both ends."""
    traffic = list(traffic)
    gaps = [gap for one in traffic for gap in one.longest]
    arrivals = [(r, at, one.worker) for one in traffic for r, at in one.arrived.items()]
    for one in traffic:
        gaps += _moves(one, arrivals)
    return sorted(gaps, key=lambda g: -g.elapsed_s)


def _moves(one: WorkerTraffic, arrivals: list[tuple[str, float, str]]) -> Iterable[Gap]:
    for request_id, left_at_s in one.left.items():
        later = [
            (at, worker)
            for request, at, worker in arrivals
            if request == request_id and worker != one.worker and at >= left_at_s
        ]
        if later:
            at, worker = min(later)
            yield Gap(left_at_s, at - left_at_s, worker, request_id, moved_from=one.worker)


def widened(bins: Mapping[int, tuple[int, float]], width_s: float) -> dict[int, tuple[int, float]]:
    """Bins of BIN_S (index -> tokens, longest gap) as bins of `width_s`."""
    factor = round(width_s / BIN_S)
    wide: dict[int, tuple[int, float]] = {}
    for index, (tokens, gap_s) in bins.items():
        before = wide.get(index // factor, (0, 0.0))
        wide[index // factor] = (before[0] + tokens, max(before[1], gap_s))
    return wide
