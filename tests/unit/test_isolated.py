"""Tests in processes of their own: a hang, a crash and what is left behind are failures."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

_CONFTEST = """
import pytest
from pathlib import Path
from dynamo_elastic.testing.isolated import run_isolated

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    left = Path(__file__).with_name("left")

    def after():
        text = left.read_text() if left.exists() else ""
        left.unlink(missing_ok=True)
        return text

    for report in run_isolated(item, deadline_s=2.0, after=after):
        item.ihook.pytest_runtest_logreport(report=report)
    return True
"""
_TESTS = """
import os, pytest, subprocess, sys, time
from pathlib import Path

def test_passes(): os.environ["SEEN"] = "1"
def test_is_alone(): assert "SEEN" not in os.environ
def test_fails(): assert 1 == 2
def test_skips(): pytest.skip("no such thing")
def test_hangs():
    code = f"import time; time.sleep(600) # {Path(__file__).parent}"
    subprocess.Popen([sys.executable, "-c", code])
    time.sleep(600)
def test_crashes(): os._exit(3)
def test_leaves(): Path(__file__).with_name("left").write_text("a process is left")
"""


def test_each_way_to_end(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(_CONFTEST)
    (tmp_path / "test_ways.py").write_text(_TESTS)
    began_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rA", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env=dict(os.environ, PYTEST_ADDOPTS=""),
        check=False,
    )
    assert time.monotonic() - began_s < 50
    summary = done.stdout[done.stdout.rindex("short test summary info") :]
    for name in ("passes", "is_alone"):
        assert f"PASSED test_ways.py::test_{name}" in summary
    assert "FAILED test_ways.py::test_fails" in summary
    assert "no such thing" in summary
    for name in ("hangs", "crashes", "leaves"):
        assert f"ERROR test_ways.py::test_{name}" in summary
    assert "killed: it did not end in 2 s" in done.stdout
    assert "its process ended with wait status 768" in done.stdout
    assert "a process is left" in done.stdout
    left = [
        path
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if str(tmp_path).encode() in _bytes(path) and path.parent.name != str(os.getpid())
    ]
    assert left == []


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
