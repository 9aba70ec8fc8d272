"""Named places at which a test may stop the program; one `is None` check in production."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

KILL_AT = "DYNAMO_ELASTIC_FAILPOINT"
"""Environment: kill this process, every time, at the failpoint of this name."""

KILL_ONCE_DIR = "DYNAMO_ELASTIC_FAILPOINT_DIR"
"""Environment: kill this process at a failpoint for which a file exists in this directory, and
consume the file. The file is named like the failpoint, or '<scope>:<failpoint>'."""

_hook: Callable[[str], None] | None = None


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
        set_hook(lambda at: _die_once(Path(directory), scope, at))


def _die_once(directory: Path, scope: str, name: str) -> None:
    for file in (directory / name, directory / f"{scope}:{name}"):
        try:
            file.unlink()
        except FileNotFoundError:
            continue
        _die()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
