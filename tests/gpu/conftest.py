"""Every GPU test runs in a process of its own, with a deadline, and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from dynamo_elastic.testing.gpu_world import WORLD, end_leftovers, leftovers
from dynamo_elastic.testing.isolated import run_isolated

_DEADLINE_S = 110.0
"""Below the timeout of pytest itself, which can't end a process that hangs in the driver."""
_TOLERANCE_MIB = 64


def pytest_sessionfinish() -> None:
    directory = os.environ.pop(WORLD, None)
    if directory is not None:
        end_leftovers(Path(directory))
        shutil.rmtree(directory, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    if item.get_closest_marker("gpu") is None or item.get_closest_marker("skip") is not None:
        return None
    if WORLD not in os.environ:
        os.environ[WORLD] = tempfile.mkdtemp(prefix="de-gpu-")
    before = _used_mib()

    def after() -> str:
        world = Path(os.environ[WORLD])
        found = leftovers(world)
        end_leftovers(world)
        grown = [now - was for now, was in zip(_used_mib(), before, strict=True)]
        if any(mib > _TOLERANCE_MIB for mib in grown):
            found.append(f"GPU memory in use has grown by {grown} MiB")
        return "; ".join(found)

    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in run_isolated(item, deadline_s=_DEADLINE_S, after=after):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _used_mib() -> list[int]:
    """Of each GPU, asked in another process: NVML does not survive a fork."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    return [int(line) for line in done.stdout.split()]
