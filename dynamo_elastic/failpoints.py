"""Named places at which a test may stop the program; one `is None` check in production."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

_ENV = "DYNAMO_ELASTIC_FAILPOINT"

_hook: Callable[[str], None] | None = None


def failpoint(name: str) -> None:
    """Let a test act at `name`. Names are dotted: 'scale.before_commit'."""
    if _hook is not None:
        _hook(name)


def set_hook(hook: Callable[[str], None] | None) -> None:
    """Install (or, with None, remove) the one hook. For tests only."""
    global _hook
    _hook = hook


def arm_from_environment() -> None:
    """Kill this process with SIGKILL at the failpoint that the environment names, if any.

    For tests on real processes: the variable DYNAMO_ELASTIC_FAILPOINT holds the name.
    """
    wanted = os.environ.get(_ENV)
    if wanted:

        def kill_here(name: str) -> None:
            if name == wanted:
                os.kill(os.getpid(), signal.SIGKILL)

        set_hook(kill_here)
