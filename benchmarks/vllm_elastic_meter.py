"""What streaming clients of a vLLM group saw: gaps between tokens, failures, first tokens. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass
class Stream:
    """One request: when it began, when its tokens came, why it failed."""

    rank: int
    began_s: float
    tokens_s: list[float] = field(default_factory=list)
    error: str = ""
    complete: bool = False
    """All of its tokens came."""
    prompt: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    moved: int | None = None
    """How many tokens it had when it was moved to another rank, which is now `rank`."""

    def gaps(self) -> Iterator[tuple[float, float, bool]]:
        """Its gaps: seconds, when it began, whether it is that of its move."""
        for number, (a, b) in enumerate(pairwise(self.tokens_s), 1):
            yield b - a, a, number == self.moved


@dataclass(frozen=True)
class Seen:
    """What clients saw in one window of time."""

    requests: int
    failed: int
    tokens: int
    longest_gap_s: float
    """Between two tokens of one stream, at whatever rank."""
    longest_gap_at_s: float
    """From the beginning of the window to the beginning of that gap."""
    longest_gap_by_rank_s: dict[int, float]
    moved_gap_max_s: float | None
    """Of those who were moved to another rank meanwhile; they are in none of the other gaps."""
    all_silent_s: float
    """The longest time without a token of any stream: what other benchmarks call the gap."""
    first_token_p50_s: float
    errors: list[str]


def seen(streams: Sequence[Stream], since_s: float, until_s: float) -> Seen:
    """What happened between two readings of time.monotonic(). A gap counts if any of it lies
    inside."""
    under_way = [s for s in streams if s.began_s < until_s and _end_s(s) > since_s]
    all_gaps = [
        (gap_s, a, s.rank, moved)
        for s in under_way
        for gap_s, a, moved in s.gaps()
        if a + gap_s > since_s and a < until_s
    ]
    gaps = [gap[:3] for gap in all_gaps if not gap[3]]
    moved_s = [gap[0] for gap in all_gaps if gap[3]]
    # Who waits still has a gap, too, up to now.
    waiting = [s for s in under_way if s.tokens_s and not (s.complete or s.error)]
    gaps += [
        (until_s - s.tokens_s[-1], s.tokens_s[-1], s.rank)
        for s in waiting
        if s.tokens_s[-1] < until_s
    ]
    by_rank: dict[int, float] = {}
    for gap_s, _, rank in gaps:
        by_rank[rank] = round(max(gap_s, by_rank.get(rank, 0.0)), 4)
    everywhere = sorted(t for s in under_way for t in s.tokens_s if since_s <= t <= until_s)
    silent = [b - a for a, b in pairwise(everywhere)]
    longest = max(gaps, default=(0.0, since_s, 0))
    first = sorted(s.tokens_s[0] - s.began_s for s in under_way if s.tokens_s)
    failed = [s for s in under_way if s.error]
    return Seen(
        requests=len(under_way),
        failed=len(failed),
        tokens=len(everywhere),
        longest_gap_s=round(longest[0], 4),
        longest_gap_at_s=round(longest[1] - since_s, 4),
        longest_gap_by_rank_s=by_rank,
        moved_gap_max_s=round(max(moved_s), 4) if moved_s else None,
        all_silent_s=round(max(silent, default=0.0), 4),
        first_token_p50_s=round(first[len(first) // 2], 4) if first else 0.0,
        errors=sorted({s.error for s in failed})[:5],
    )


def silent_s(streams: Sequence[Stream], rank: int, since_s: float, until_s: float) -> float:
    """The longest time in which no stream at `rank` had a token; all of it if none had any."""
    came = sorted(t for s in streams if s.rank == rank for t in s.tokens_s)
    inside = [since_s, *(t for t in came if since_s < t < until_s), until_s]
    return max(b - a for a, b in pairwise(inside))


def _end_s(stream: Stream) -> float:
    return stream.tokens_s[-1] if stream.complete else float("inf")
