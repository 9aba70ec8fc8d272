"""Drain: no new engines on this host, until it is undone; it outlives the agent."""

from __future__ import annotations

from pathlib import Path

from dynamo_elastic.agent.records import write_whole
from dynamo_elastic.errors import EngineError

DRAIN_FILE = "drain"


class Drain:
    """Whether the host drains: a file in the state directory that holds the reason."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / DRAIN_FILE

    @property
    def reason(self) -> str:
        """Why it drains; '' if it does not."""
        try:
            return self._path.read_text().strip() or "no reason given"
        except FileNotFoundError:
            return ""

    def begin(self, reason: str) -> None:
        """From now on no engine is started. Idempotent; the last reason counts."""
        write_whole(self._path, reason.encode())

    def end(self) -> None:
        """Idempotent."""
        self._path.unlink(missing_ok=True)

    def check(self) -> None:
        """Raises EngineError, with the reason, if the host drains."""
        if self.reason:
            raise EngineError(
                f"this host drains ({self.reason}): no new engines until `dynamo-elastic agent "
                "undrain`"
            )
