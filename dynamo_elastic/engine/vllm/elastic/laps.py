"""Where the time of one act goes, part by part."""

from __future__ import annotations

import time
from collections.abc import Callable


class Laps:
    """Seconds since the last mark, by name; `s` has them in order."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_s = clock()
        self.s: dict[str, float] = {}

    def mark(self, name: str) -> None:
        """What went on until now is `name`."""
        now_s = self._clock()
        self.s[name] = round(self.s.get(name, 0.0) + now_s - self._last_s, 4)
        self._last_s = now_s
