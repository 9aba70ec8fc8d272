"""What happened in a deployment: every write to etcd, what engines said, and what clients got.

Times are seconds of one monotonic clock, that of who recorded it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec


class Write(msgspec.Struct, frozen=True):
    """One event of etcd's watch. Writes with one revision were one transaction. `value` is None if
    the key was deleted or its lease ran out."""

    at_s: float
    revision: int
    key: str
    value: bytes | None


class Seen(msgspec.Struct, frozen=True):
    """What one engine said when all were asked in round `round_`."""

    at_s: float
    round_: int
    worker: str
    incarnation: str
    serving: bool
    epoch: int


class Answer(msgspec.Struct, frozen=True):
    """One request as its client saw it. `error` is '' if it ended well; `tokens_s` are the times of
    its tokens."""

    started_s: float
    ended_s: float
    prompt: str
    text: str
    error: str
    tokens_s: list[float]


@dataclass(slots=True)
class History:
    """All of it, in order. `before` is what was stored when it began; `reference` is the text of
    each prompt, from ranks that never scaled."""

    prefix: str
    before: list[Write] = field(default_factory=list)
    reference: dict[str, str] = field(default_factory=dict)
    writes: list[Write] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """As JSON, for another look."""
        path.write_bytes(msgspec.json.encode(_Stored(**{n: getattr(self, n) for n in _NAMES})))

    @classmethod
    def load(cls, path: Path) -> History:
        """The inverse of save(). Raises msgspec.ValidationError."""
        stored = msgspec.json.decode(path.read_bytes(), type=_Stored)
        return cls(**{n: getattr(stored, n) for n in _NAMES})


class _Stored(msgspec.Struct):
    prefix: str
    before: list[Write]
    reference: dict[str, str]
    writes: list[Write]
    seen: list[Seen]
    answers: list[Answer]


_NAMES = ("prefix", "before", "reference", "writes", "seen", "answers")


def transactions(writes: Sequence[Write]) -> list[list[Write]]:
    """Writes of one revision together."""
    found: list[list[Write]] = []
    for write in writes:
        if found and found[-1][0].revision == write.revision:
            found[-1].append(write)
        else:
            found.append([write])
    return found
