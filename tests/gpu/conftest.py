"""Every GPU test runs in a process of its own, with a deadline, and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest

from dynamo_elastic.testing.gpu_meter import Meter
from dynamo_elastic.testing.gpu_world import WORLD, end_leftovers, leftovers
from dynamo_elastic.testing.isolated import run_isolated

_DEADLINE_S = 95.0
"""Of tests without a timeout of their own."""
_MARGIN_S = 25.0
"""The deadline of the process comes before pytest's, which can't end what hangs in the driver."""
_TOLERANCE_MIB = 64
_RELEASE_S = 5.0
_POLL_S = 0.05
_METER = pytest.StashKey[Meter]()


def pytest_unconfigure(config: pytest.Config) -> None:
    directory = os.environ.pop(WORLD, None)
    if directory is not None:
        end_leftovers(Path(directory))
        shutil.rmtree(directory, ignore_errors=True)
    if _METER in config.stash:
        config.stash[_METER].close()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    if item.get_closest_marker("gpu") is None or item.get_closest_marker("skip") is not None:
        return None
    if WORLD not in os.environ:
        os.environ[WORLD] = tempfile.mkdtemp(prefix="de-gpu-")
    world = Path(os.environ[WORLD])
    if _METER not in item.config.stash:
        item.config.stash[_METER] = Meter()
    meter = item.config.stash[_METER]
    before = meter.used_mib()

    def after() -> str:
        found = leftovers(world)
        end_leftovers(world)
        grown = _grown(meter, before)
        if grown:
            found.append(f"GPU memory in use has grown by {grown} MiB")
        return "; ".join(found)

    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in run_isolated(item, deadline_s=_deadline_s(item), after=after):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _deadline_s(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    return _DEADLINE_S if marker is None else float(marker.args[0]) - _MARGIN_S


def _grown(meter: Meter, before: list[int]) -> list[int]:
    """By GPU, if any holds more for good than it did; the driver takes a moment to free memory."""
    deadline = time.monotonic() + _RELEASE_S
    while True:
        grown = [now - was for now, was in zip(meter.used_mib(), before, strict=True)]
        if not any(mib > _TOLERANCE_MIB for mib in grown):
            return []
        if time.monotonic() > deadline:
            return grown
        time.sleep(_POLL_S)
