"""Named places at which a test may hurt the program; one `is None` check in production.

Which there are, and what must hold after each fault at each of them, is in failpoint_table.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path

from dynamo_elastic.errors import (
    DeviceMemoryError,
    ElasticError,
    EngineError,
    PeerUnreachable,
    RebindFailed,
    RegistrationFailed,
    SnapshotError,
    StoreUnavailable,
    TransferError,
)

KILL_AT = "DYNAMO_ELASTIC_FAILPOINT"
"""Environment: kill this process, every time, at the failpoint of this name."""

KILL_ONCE_DIR = "DYNAMO_ELASTIC_FAILPOINT_DIR"
"""Environment: at a failpoint for which a file exists in this directory, consume the file, and do
to this process what it holds: an Act and its seconds, or nothing, which is to kill it. The file is
named like the failpoint, or '<scope>:<failpoint>'."""

HITS_FILE = "hits.log"
"""In that directory: a line for each failpoint that was hit, 'scope failpoint act'."""

TRACE_FILE = "trace.log"
"""If it is in that directory, a line 'scope failpoint' is added whenever a process passes one."""

_hook: Callable[[str], None] | None = None


class Act(StrEnum):
    """What can be done to a real process at a failpoint."""

    KILL = "kill"
    STOP = "stop"
    """SIGSTOP, and SIGCONT after so many seconds."""
    ERROR = "error"
    """The error is raised that a real fault at that place raises."""
    DELAY = "delay"
    """The thread stands still for so many seconds."""


class FailpointError(ElasticError):
    """Raised by a failpoint of no family, because a test wants it so."""


_ERRORS: Mapping[str, Callable[[str], ElasticError]] = {
    "coordinator": StoreUnavailable,
    "scale": StoreUnavailable,
    "kubernetes": StoreUnavailable,
    "worker": EngineError,
    "registration": RegistrationFailed,
    "agent": EngineError,
    "engine": EngineError,
    "group": lambda message: PeerUnreachable((), message),
    "buffer": lambda message: PeerUnreachable((), message),
    "weights": lambda message: TransferError(message, remote="a peer"),
    "transfer": lambda message: TransferError(message, remote="a peer"),
    "memory": lambda message: DeviceMemoryError(message, "injected"),
    "graphs": RebindFailed,
    "rebind": RebindFailed,
    "take": SnapshotError,
    "restore": SnapshotError,
    "park": SnapshotError,
    "unpark": SnapshotError,
    "cuda": SnapshotError,
    "catalog": SnapshotError,
}


def error_at(name: str) -> ElasticError:
    """What the code at `name` raises if something real goes wrong there."""
    family = name.partition(".")[0]
    return _ERRORS.get(family, FailpointError)(f"a test wants {name} to fail")


def failpoint(name: str) -> None:
    """Let a test act at `name`. Names are dotted: 'scale.before_commit'."""
    if _hook is not None:
        _hook(name)


def set_hook(hook: Callable[[str], None] | None) -> None:
    """Install (or, with None, remove) the one hook. For tests only."""
    global _hook
    _hook = hook


def arm_from_environment(scope: str = "") -> None:
    """Do as KILL_AT and KILL_ONCE_DIR say, if they are set. `scope` tells processes of one kind
    apart (an engine's worker id). For tests on real processes: death is SIGKILL."""
    name, directory = os.environ.get(KILL_AT), os.environ.get(KILL_ONCE_DIR)
    if name:
        set_hook(lambda at: _die() if at == name else None)
    elif directory:
        set_hook(lambda at: _act_once(Path(directory), scope, at))


def _act_once(directory: Path, scope: str, name: str) -> None:
    if (directory / TRACE_FILE).exists():
        with (directory / TRACE_FILE).open("a") as trace:
            trace.write(f"{scope} {name}\n")
    for file in (directory / name, directory / f"{scope}:{name}"):
        try:
            what, _, seconds = file.read_text().partition(" ")
            file.unlink()
        except FileNotFoundError:
            continue
        act = Act(what or Act.KILL)
        with (directory / HITS_FILE).open("a") as hits:
            hits.write(f"{scope} {name} {act}\n")
        _do(act, name, float(seconds or 0))


def _do(act: Act, name: str, seconds: float) -> None:
    if act is Act.KILL:
        _die()
    elif act is Act.STOP:
        # Nobody else may know this process by the pid that it sees itself.
        waker = f"(sleep {seconds:g}; kill -CONT {os.getpid()}) &"
        subprocess.run(["sh", "-c", waker], check=True, close_fds=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    elif act is Act.DELAY:
        # Not time.sleep(): libfaketime, which coordinators may run under, lets that fail.
        threading.Event().wait(seconds)
    else:
        raise error_at(name)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
