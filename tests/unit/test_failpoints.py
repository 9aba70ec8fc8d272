"""What a file in the failpoint directory does to the process that comes by."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo_elastic.failpoints import (
    HITS_FILE,
    KILL_ONCE_DIR,
    TRACE_FILE,
    FailpointError,
    arm_from_environment,
    failpoint,
    set_hook,
)


@pytest.fixture
def armed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(KILL_ONCE_DIR, str(tmp_path))
    arm_from_environment("slot1")
    yield tmp_path
    set_hook(None)


def test_an_error_is_raised_once_and_noted(armed: Path) -> None:
    (armed / "slot1:here").write_text("error")
    failpoint("elsewhere")
    with pytest.raises(FailpointError, match="here"):
        failpoint("here")
    failpoint("here")
    assert (armed / HITS_FILE).read_text() == "slot1 here error\n"


def test_what_is_passed_is_traced_where_that_is_wanted(armed: Path) -> None:
    failpoint("before")
    (armed / TRACE_FILE).touch()
    failpoint("here")
    assert (armed / TRACE_FILE).read_text() == "slot1 here\n"


def test_another_scope_is_left_alone(armed: Path) -> None:
    (armed / "slot2:here").write_text("error")
    failpoint("here")


def test_a_delay_takes_its_time(armed: Path) -> None:
    (armed / "here").write_text("delay 0.05")
    began_s = time.monotonic()
    failpoint("here")
    assert time.monotonic() - began_s >= 0.05


FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)


@pytest.mark.skipif(FAKETIME is None, reason="needs libfaketime of the distribution")
def test_under_a_clock_that_jumps_a_delay_is_one_too(tmp_path: Path) -> None:
    """Coordinators of the fault matrix run so; there time.sleep() raises OSError."""
    clock, directory = tmp_path / "clock", tmp_path / "armed"
    clock.write_text("+0")
    directory.mkdir()
    (directory / "here").write_text("delay 0.3")
    jumping = {
        "LD_PRELOAD": str(FAKETIME),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    environment = {**os.environ, **jumping, KILL_ONCE_DIR: str(directory)}
    began_s = time.monotonic()
    argv = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(argv, env=environment, timeout=20, check=False, capture_output=True)
    assert done.stdout == b"1\n", done.stderr
    assert time.monotonic() - began_s >= 0.3


PROGRAM = (
    "from dynamo_elastic.failpoints import *; arm_from_environment(); failpoint('here'); print(1)"
)


def test_a_stopped_process_goes_on_and_a_killed_one_does_not(tmp_path: Path) -> None:
    environment = {**os.environ, KILL_ONCE_DIR: str(tmp_path)}
    for act, code in (("stop 0.1", 0), ("", -signal.SIGKILL), ("kill", -signal.SIGKILL)):
        (tmp_path / "here").write_text(act)
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, timeout=20, check=False
        )
        assert done.returncode == code, act
