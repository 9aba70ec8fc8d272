"""A part of a spike in a child process: a crash or a hang there costs that part only."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import OutOfTime, Report
from rank_process import kill_all


def isolated(
    report: Report, name: str, step: Callable[..., Any], *args: Any, timeout_s: float = 120
) -> bool:
    """As Report.attempt, in a child; the parent must not hold CUDA or NVML when it forks."""
    folder = Path(tempfile.mkdtemp(prefix="part-"))
    child = os.fork()
    if child == 0:
        _run_child(report.name, folder, name, step, args)
    status = _wait(child, timeout_s)
    _end_ranks(folder)
    outcome = folder / "outcome.json"
    if not outcome.exists():
        report.metric(f"{name}_ok", 0)
        report.note(f"{name}_failed", f"its driver process ended with wait status {status}")
        return False
    found = json.loads(outcome.read_text())
    report.metrics.update(found["metrics"])
    report.detail.update(found["detail"])
    return bool(report.metrics.get(f"{name}_ok"))


def _run_child(
    spike: str, folder: Path, name: str, step: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """Never returns: the child ends without running the parent's cleanup."""
    code = 1
    try:
        tempfile.tempdir = str(folder)
        part = Report(spike)
        try:
            part.attempt(name, step, *args)
        except (RuntimeError, AttributeError, TypeError) as error:
            part.metric(f"{name}_ok", 0)
            part.note(f"{name}_failed", f"{type(error).__name__}: {error}"[:1500])
        kill_all()
        draft = folder / "outcome.tmp"
        draft.write_text(json.dumps({"metrics": part.metrics, "detail": part.detail}, default=str))
        draft.rename(folder / "outcome.json")
        code = 0
    finally:
        os._exit(code)


def _wait(child: int, timeout_s: float) -> int:
    deadline = time.monotonic() + timeout_s
    try:
        while time.monotonic() < deadline:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return status
            time.sleep(0.02)
    except OutOfTime:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def _end_ranks(folder: Path) -> None:
    """End the ranks that a crashed child left behind; each is told by its own folder."""
    for ready in folder.glob("rank-*/ready"):
        try:
            pid = int(ready.read_text())
            if str(ready.parent).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
        except (OSError, ValueError) as error:
            print(f"rank of {ready.parent.name} is gone already: {error}", flush=True)
