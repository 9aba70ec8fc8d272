"""What the agent writes down of an engine, so that its successor can adopt it."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from dynamo_elastic.agent.base import StartedEngine, Tier
from dynamo_elastic.engine.base import ATTACH_FILE, DETACHED_FILE, SOCKET_FILE, Attach
from dynamo_elastic.snapshot.process import ProcessRef
from dynamo_elastic.types import Incarnation, OperationId, WorkerId

ENGINE_FILE = "engine.json"
ENGINE_LOG = "engine.log"


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """One engine, from its start on. `attached`: it answered; only then it may be adopted."""

    slot: int
    worker_id: WorkerId
    operation_id: OperationId
    incarnation: Incarnation
    tier: Tier
    process: ProcessRef
    attached: bool = False
    ready_s: float = 0.0
    image_id: str = ""
    """Of the image it was restored from; '' if it was booted."""
    fell_through: tuple[str, ...] = ()

    def ready(self, ready_s: float) -> EngineRecord:
        return replace(self, attached=True, ready_s=ready_s)

    def started(self, control_dir: Path) -> StartedEngine:
        return StartedEngine(
            incarnation=self.incarnation,
            pid=self.process.pid,
            socket_path=str(control_dir / SOCKET_FILE),
            tier=self.tier,
            ready_s=self.ready_s,
            fell_through=self.fell_through,
        )


_RECORD = TypeAdapter(EngineRecord)
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


def write_attach(control_dir: Path, attach: Attach) -> None:
    write_whole(control_dir / ATTACH_FILE, _ATTACH.dump_json(attach))


def clear(control_dir: Path) -> None:
    """Nothing of an earlier engine is left that a new one, or its shell, could take for its own."""
    control_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in (ENGINE_FILE, DETACHED_FILE, ATTACH_FILE, SOCKET_FILE):
        (control_dir / name).unlink(missing_ok=True)
        _partial(control_dir / name).unlink(missing_ok=True)


def forget_attach(control_dir: Path) -> None:
    """No identity lies about that an engine could take for its own."""
    (control_dir / ATTACH_FILE).unlink(missing_ok=True)
    _partial(control_dir / ATTACH_FILE).unlink(missing_ok=True)
