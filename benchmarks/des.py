"""A discrete-event loop: events in the order of their time, and servers with a queue."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Event = Callable[[], None]


class Simulation:
    """Virtual time, in seconds. run() returns when nothing is left to happen."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Event]] = []
        self._count = 0

    def after(self, delay_s: float, event: Event) -> None:
        """Let `event` happen in `delay_s`; events of one moment happen in the order given."""
        self._count += 1
        heapq.heappush(self._events, (self.now_s + delay_s, self._count, event))

    def run(self) -> float:
        """Until nothing is left; the time then."""
        while self._events:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
        return self.now_s


class Server:
    """Serves one request after another, in the order in which they come."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._free_at_s = 0.0
        self.busy_s = 0.0

    def serve(self, duration_s: float, done: Event) -> None:
        """Queue a request that takes `duration_s`; `done` happens at its end."""
        now_s = self._simulation.now_s
        self._free_at_s = max(now_s, self._free_at_s) + duration_s
        self.busy_s += duration_s
        self._simulation.after(self._free_at_s - now_s, done)
