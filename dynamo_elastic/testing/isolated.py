"""pytest items in processes of their own: a crash or a hang there is a failure of that item alone.

A hook of a conftest hands items to run_isolated(). The process leads a session, so whatever it
started can be ended with it; it must be forked from one that has not used CUDA or NVML.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

_READ_BYTES = 1 << 16


def run_isolated(
    item: pytest.Item, *, deadline_s: float, after: Callable[[], str]
) -> list[pytest.TestReport]:
    """Reports of the item, run in a process that is killed with its session at the deadline.
    `after` looks, in this process, for what was left behind: its text, if any, fails the item."""
    began_s = time.time()
    read, write = os.pipe()
    with warnings.catch_warnings():
        # Of threads: ours are idle pools of libraries, which know what a fork is.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        os.close(read)
        _child(item, write)
    os.close(write)
    data, in_time = _read_all(read, deadline_s)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    left = after()
    reports = _reports(item, data)
    if not in_time:
        left = f"killed: it did not end in {deadline_s:g} s. {left}"
    elif not reports:
        left = f"its process ended with wait status {status}. {left}"
    if left:
        reports.append(_failure(item, left, began_s))
    return reports


def _child(item: pytest.Item, write: int) -> None:
    """Never returns: the parent's cleanup is not ours to run."""
    try:
        os.setsid()
        reports = runtestprotocol(item, log=False)
        convert = item.config.hook.pytest_report_to_serializable
        data = [convert(config=item.config, report=report) for report in reports]
        with os.fdopen(write, "wb") as pipe:
            pickle.dump(data, pipe)
    finally:
        sys.stdout.flush()
        os._exit(0)


def _read_all(read: int, deadline_s: float) -> tuple[bytes, bool]:
    """What was written until the other end was closed, and whether that was in time."""
    deadline = time.monotonic() + deadline_s
    data = b""
    with os.fdopen(read, "rb", buffering=0) as pipe:
        while True:
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return data, False
            piece = pipe.read(_READ_BYTES)
            if not piece:
                return data, True
            data += piece


def _reports(item: pytest.Item, data: bytes) -> list[pytest.TestReport]:
    try:
        rows: list[dict[str, Any]] = pickle.loads(data)
    except (EOFError, pickle.UnpicklingError):
        return []  # it was cut short
    convert = item.config.hook.pytest_report_from_serializable
    return [convert(config=item.config, data=row) for row in rows]


def _failure(item: pytest.Item, text: str, began_s: float) -> pytest.TestReport:
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords={},
        outcome="failed",
        longrepr=text,
        when="teardown",
        start=began_s,
        stop=time.time(),
        duration=time.time() - began_s,
    )
