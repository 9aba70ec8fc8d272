"""A seeded trace of requests whose rate doubles, and what its clients saw by windows. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

FAILED_S = 30.0
"""What a request that failed counts as: nobody waits longer for a first token."""
WINDOW_S = 30.0
STEP_S = 5.0
_OUTPUT = (32, 64, 96)
_PROMPT = (16, 48)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace."""

    at_s: float
    prompt: tuple[int, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class Waited:
    """What became of one: seconds to its first token, FAILED_S if it failed."""

    at_s: float
    first_token_s: float
    failed: bool


def arrivals(rate: float, seconds: float, seed: int = 11) -> list[Arrival]:
    """Requests of a Poisson process whose rate grows from `rate` a second to twice that."""
    source = random.Random(seed)
    found: list[Arrival] = []
    at_s = 0.0
    while True:
        # Thinned from the highest rate.
        at_s += source.expovariate(2 * rate)
        if at_s >= seconds:
            return found
        if source.random() * 2 <= 2 ** (at_s / seconds):
            length = source.randint(*_PROMPT)
            prompt = tuple(source.randrange(5, 500) for _ in range(length))
            found.append(Arrival(at_s, prompt, source.choice(_OUTPUT)))


def percentile(values: Sequence[float], share: float) -> float:
    """By nearest rank.

    >>> percentile([4.0, 1.0, 2.0, 3.0], 0.5), percentile([4.0, 1.0, 2.0, 3.0], 0.95)
    (2.0, 4.0)
    """
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def windows(
    waited: Sequence[Waited], seconds: float, window_s: float = WINDOW_S
) -> Iterator[tuple[float, float]]:
    """(its end, 95th percentile of the time to the first token) of each window, by arrival. None
    begins before the trace does; one without a request is left out."""
    step_s = STEP_S * min(1.0, window_s / WINDOW_S)
    steps = int((seconds - window_s) / step_s + 1e-9)
    for number in range(steps + 1):
        end_s = window_s + number * step_s
        inside = [w.first_token_s for w in waited if end_s - window_s <= w.at_s < end_s]
        if inside:
            yield round(end_s, 3), percentile(inside, 0.95)


def p95_between(waited: Sequence[Waited], since_s: float, until_s: float) -> float | None:
    """Of those who came between two moments of the trace; None if nobody did."""
    inside = [w.first_token_s for w in waited if since_s <= w.at_s < until_s]
    return percentile(inside, 0.95) if inside else None
