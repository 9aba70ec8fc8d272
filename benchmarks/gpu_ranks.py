"""What the benchmarks of ranks on GPUs share: a deadline, processes that end with it, a result."""

from __future__ import annotations

import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from gpu_report import Report

from dynamo_elastic.errors import ElasticError
from dynamo_elastic.testing.expert_buffer_group import RankFailed

Body = Callable[[Report, ExitStack], None]


class OutOfTime(Exception):
    """The benchmark's own deadline has passed."""


def gpu_count() -> int:
    """GPUs of this host, counted without the driver."""
    return sum(path.name[6:].isdigit() for path in Path("/dev").glob("nvidia[0-9]*"))


def run_ranks(name: str, body: Body, *, deadline_s: int) -> None:
    """Run `body` within its deadline; what it puts on the stack is closed, the result written. Ends
    with 1 if it did not end well."""
    report = Report(name)
    signal.signal(signal.SIGALRM, _out_of_time)
    signal.signal(signal.SIGTERM, _out_of_time)
    signal.alarm(deadline_s)
    began_s = time.monotonic()
    try:
        with ExitStack() as stack:
            body(report, stack)
        report.metric("completed", 1)
    except Exception as exc:  # noqa: BLE001 - any end is a result
        report.metric("completed", 0)
        report.note("stopped_by", f"{type(exc).__name__}: {exc}"[:3000])
        traceback.print_exc()
    finally:
        signal.alarm(0)
        report.metric("wall_s", time.monotonic() - began_s)
        report.write()
    sys.exit(0 if report.metrics["completed"] else 1)


def attempt(report: Report, name: str, part: Callable[[], None]) -> bool:
    """One part whose failure is an answer too: the others still run."""
    try:
        part()
    except (RankFailed, ElasticError) as exc:
        report.metric(f"{name}_ok", 0)
        report.note(f"{name}_failed", str(exc)[:2000])
        return False
    report.metric(f"{name}_ok", 1)
    return True


def _out_of_time(number: int, frame: FrameType | None) -> None:
    raise OutOfTime(f"{signal.Signals(number).name}: its own deadline has passed, or it was ended")
