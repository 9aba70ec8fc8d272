"""The seam to images of engines, and what stands in its place where there are none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from dynamo_elastic.agent.ladder import Obstacle, Why
from dynamo_elastic.errors import SnapshotNotFound
from dynamo_elastic.snapshot.base import Namespace
from dynamo_elastic.snapshot.process import ProcessRef


@dataclass(frozen=True, slots=True)
class RunningImage:
    """A process that an image was turned into. `process`: in our namespace."""

    process: ProcessRef
    image_id: str


class ImageSource(Protocol):
    """Where images of slots come from (agent/images.py)."""

    def obstacle(self, slot: int) -> Obstacle | None:
        """Why no image of `slot` can be restored; None if one can."""
        ...

    def newest(self, slot: int) -> str:
        """Id of the newest usable image of `slot`; '' if there is none."""
        ...

    def restore(self, slot: int, namespace: Namespace, *, timeout_s: float) -> RunningImage:
        """Run the newest usable image of `slot`, and hold it until release(slot). Raises
        SnapshotError or ResourceMissing; then it is not held."""
        ...

    def report(self, image_id: str, failure: str) -> None:
        """The engine from that image answered ('' as `failure`), or did not, and why."""
        ...

    def quarantined(self) -> dict[str, str]:
        """Images that failed too often -> why they are not tried now."""
        ...

    def hold(self, slot: int, image_id: str) -> None:
        """The image of the engine in `slot` is not removed before release(slot). Raises
        SnapshotError."""
        ...

    def release(self, slot: int) -> None:
        """The engine in `slot` is gone. Idempotent."""
        ...

    def tidy(self) -> tuple[str, ...]:
        """Remove images that are stale or too many; one line for each. Raises SnapshotError."""
        ...


class NoImages:
    """In place of Images where this host or deployment has none."""

    def __init__(self, reason: str, why: Why = Why.ABSENT) -> None:
        self._reason = Obstacle(why, reason)

    def obstacle(self, slot: int) -> Obstacle | None:
        return self._reason

    def newest(self, slot: int) -> str:
        return ""

    def restore(self, slot: int, namespace: Namespace, *, timeout_s: float) -> RunningImage:
        raise SnapshotNotFound(str(self._reason))

    def report(self, image_id: str, failure: str) -> None:
        """Nothing was tried."""

    def quarantined(self) -> dict[str, str]:
        return {}

    def hold(self, slot: int, image_id: str) -> None:
        """Nothing to hold."""

    def release(self, slot: int) -> None:
        """Nothing was held."""

    def tidy(self) -> tuple[str, ...]:
        return ()
