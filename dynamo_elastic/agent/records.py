"""What the agent writes down of engines, so that its successor can adopt them.

A slot's directory has `engine.json` from the start of an engine on, or `parked.json`. Where both
are found, an agent died between two states of the slot: neither is adopted.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from dynamo_elastic.agent.base import Lease, StartedEngine, Tier
from dynamo_elastic.engine.base import ATTACH_FILE, DETACHED_FILE, SOCKET_FILE, Attach
from dynamo_elastic.snapshot.fingerprint import Fingerprint
from dynamo_elastic.snapshot.park import ParkedReport
from dynamo_elastic.snapshot.process import ProcessRef
from dynamo_elastic.types import Incarnation

ENGINE_FILE = "engine.json"
PARKED_FILE = "parked.json"
ENGINE_LOG = "engine.log"


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """One engine, from its start on. `attached`: it answered; only then it may be adopted."""

    slot: int
    lease: Lease
    incarnation: Incarnation
    tier: Tier
    process: ProcessRef
    fingerprint: Fingerprint
    """Of its boot, however long ago that was and wherever the process has been since."""
    attached: bool = False
    ready_s: float = 0.0
    image_id: str = ""
    """Of the image that the process was restored from; '' if it was booted."""
    fell_through: tuple[str, ...] = ()

    def ready(self, ready_s: float) -> EngineRecord:
        return replace(self, attached=True, ready_s=ready_s)

    def leaving(self) -> EngineRecord:
        """It must not be adopted any more."""
        return replace(self, attached=False)

    def started(self, control_dir: Path) -> StartedEngine:
        return StartedEngine(
            incarnation=self.incarnation,
            pid=self.process.pid,
            socket_path=str(control_dir / SOCKET_FILE),
            tier=self.tier,
            ready_s=self.ready_s,
            fell_through=self.fell_through,
        )


@dataclass(frozen=True, slots=True)
class ParkedRecord:
    """One parked engine. `fingerprint` and `image_id` are those that it was started with."""

    slot: int
    report: ParkedReport
    fingerprint: Fingerprint
    image_id: str
    parked_at_s: float
    """Seconds since the epoch."""
    host_bytes: int

    @property
    def process(self) -> ProcessRef:
        return self.report.process


_RECORD = TypeAdapter(EngineRecord)
_PARKED = TypeAdapter(ParkedRecord)
_ATTACH = TypeAdapter(Attach)


def write_whole(path: Path, data: bytes) -> None:
    """`path` holds `data` or what it held before, never a part. Mode 0600."""
    partial = _partial(path)
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
    partial.rename(path)


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


def write_record(control_dir: Path, record: EngineRecord) -> None:
    write_whole(control_dir / ENGINE_FILE, _RECORD.dump_json(record))


def read_record(control_dir: Path) -> EngineRecord | None:
    """The engine last started there; None if none was, or the record is of another version."""
    try:
        return _RECORD.validate_json((control_dir / ENGINE_FILE).read_bytes())
    except (OSError, ValidationError):
        return None


def write_parked(control_dir: Path, parked: ParkedRecord) -> None:
    """The slot's engine is parked, and no longer what `engine.json` said."""
    write_whole(control_dir / PARKED_FILE, _PARKED.dump_json(parked))
    (control_dir / ENGINE_FILE).unlink(missing_ok=True)


def write_started(control_dir: Path, record: EngineRecord) -> None:
    """The slot's engine is on its way from wherever it was."""
    write_record(control_dir, record)
    (control_dir / PARKED_FILE).unlink(missing_ok=True)


def read_parked(control_dir: Path) -> ParkedRecord | None:
    """The engine parked there; None if none is, or the record is of another version."""
    try:
        return _PARKED.validate_json((control_dir / PARKED_FILE).read_bytes())
    except (OSError, ValidationError):
        return None


def write_attach(control_dir: Path, attach: Attach) -> None:
    write_whole(control_dir / ATTACH_FILE, _ATTACH.dump_json(attach))


def clear(control_dir: Path) -> None:
    """Nothing of an earlier engine is left that a new one, or its shell, could take for its own."""
    control_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in (ENGINE_FILE, PARKED_FILE, DETACHED_FILE, ATTACH_FILE, SOCKET_FILE):
        (control_dir / name).unlink(missing_ok=True)
        _partial(control_dir / name).unlink(missing_ok=True)


def forget_attach(control_dir: Path) -> None:
    """No identity lies about that an engine could take for its own."""
    (control_dir / ATTACH_FILE).unlink(missing_ok=True)
    _partial(control_dir / ATTACH_FILE).unlink(missing_ok=True)
