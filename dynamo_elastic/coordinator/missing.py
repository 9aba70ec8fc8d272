"""Members whose lease ran out: after an outage of the store they all come back in a moment, and
nobody is to be evicted who would have."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from dynamo_elastic.types import WorkerId

LEASE_RAN_OUT = "its lease ran out"
"""Why somebody is missing who may come back."""
COMES_BACK_S = 3.0
"""A shell opens a new session 0.5 s after the store answers again, and claims its slot in it."""


class Missing:
    """Who is missing, and since when. `clock`: seconds that only rise."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since_s: dict[WorkerId, float] = {}

    def look(self, wanted: Iterable[WorkerId], there: Collection[WorkerId]) -> None:
        """Take in who of those `wanted` is there now."""
        gone = [w for w in wanted if w not in there]
        self._since_s = {w: self._since_s.get(w, self._clock()) for w in gone}

    def gone(self, worker: WorkerId) -> None:
        self._since_s.setdefault(worker, self._clock())

    def back(self, worker: WorkerId) -> None:
        self._since_s.pop(worker, None)

    def lost(self, workers: Iterable[WorkerId]) -> list[WorkerId]:
        """Those of `workers` that have been missing for too long to come back."""
        now_s = self._clock()
        return [w for w in workers if now_s >= self._since_s.get(w, now_s) + COMES_BACK_S]

    def until_s(self, workers: Iterable[WorkerId] | None = None) -> float | None:
        """When the next of `workers` (of all, without) is lost; None if nobody is waited for."""
        now_s = self._clock()
        among = self._since_s if workers is None else workers
        ends = (self._since_s[w] + COMES_BACK_S for w in among if w in self._since_s)
        return min((end_s for end_s in ends if end_s > now_s), default=None)

    def __str__(self) -> str:
        return ", ".join(sorted(self._since_s))
