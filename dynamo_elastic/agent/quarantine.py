"""Images that failed again and again are left alone for a while."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

FAILURES = 2
"""In a row, until an image is in quarantine."""


@dataclass(slots=True)
class _Case:
    failures: int = 0
    reason: str = ""
    until: float = 0.0


class Quarantine:
    """Failures by image. It is not kept across a restart of the agent: a new one tries anew."""

    def __init__(self, cool_down_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._cool_down_s = cool_down_s
        self._clock = clock
        self._cases: dict[str, _Case] = {}

    def failed(self, image_id: str, reason: str) -> None:
        """Count one failure. After a cool-down one more is enough for the next."""
        case = self._cases.setdefault(image_id, _Case())
        case.failures += 1
        case.reason = reason
        if case.failures >= FAILURES:
            case.until = self._clock() + self._cool_down_s

    def worked(self, image_id: str) -> None:
        """Forget its failures."""
        self._cases.pop(image_id, None)

    def reason(self, image_id: str) -> str:
        """Why it must not be tried now; '' if it may."""
        case = self._cases.get(image_id)
        left_s = case.until - self._clock() if case is not None else 0.0
        if case is None or left_s <= 0:
            return ""
        return f"in quarantine for {left_s:.0f} s after {case.failures} failures: {case.reason}"

    def reasons(self) -> dict[str, str]:
        """Of every image in quarantine now."""
        return {image_id: why for image_id in self._cases if (why := self.reason(image_id))}
