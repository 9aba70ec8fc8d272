"""What came of one run, wherever it was played."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

RUNS = "runs.jsonl"
"""Verdicts, one a line: a run that was played again has several, and the last one counts."""


@dataclass(slots=True)
class Verdict:
    """What came of one run."""

    number: int
    scenario: str
    resize: str
    place: str
    process: str
    act: str
    fired: bool
    seconds: float = 0.0
    requests: int = 0
    retried: int = 0
    """Requests that ended with an error that says that they may be sent again."""
    lost: int = 0
    silence_s: float = 0.0
    hang: str = ""
    violations: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return not self.violations and not self.hang

    def as_json(self) -> dict[str, Any]:
        return asdict(self)
