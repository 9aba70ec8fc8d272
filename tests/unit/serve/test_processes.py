"""The supervisor of child processes, on real ones: readiness, restarts, critical ends."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from dynamo_elastic.serve.processes import ProcessFailed, ProcessSpec, Supervisor

FOREVER = "import signal; signal.pause()"


def spec(tmp_path: Path, code: str, *, critical: bool = False) -> ProcessSpec:
    argv = [sys.executable, "-S", "-c", code]
    return ProcessSpec("child", argv, tmp_path / "child.log", critical=critical, stop_timeout_s=0.3)


async def exists(path: Path) -> None:
    while not path.exists():
        await asyncio.sleep(0.01)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_start_waits_until_ready_and_stop_ends_it(tmp_path: Path) -> None:
    async def run() -> None:
        up = tmp_path / "up"
        supervisor = Supervisor()
        code = f"open({str(up)!r}, 'w').close(); {FOREVER}"
        await supervisor.start(spec(tmp_path, code), lambda: exists(up), timeout_s=10)
        pid = supervisor.pids["child"]
        await supervisor.stop("child")
        assert gone(pid)
        await supervisor.stop("child")

    asyncio.run(run())


def test_a_process_that_ends_before_it_is_ready_shows_its_log(tmp_path: Path) -> None:
    async def run() -> None:
        supervisor = Supervisor()
        with pytest.raises(ProcessFailed, match=r"exited with 3: .*no luck"):
            await supervisor.start(
                spec(tmp_path, "print('no luck', flush=True); raise SystemExit(3)"),
                lambda: exists(tmp_path / "never"),
                timeout_s=10,
            )
        await supervisor.stop("child")

    asyncio.run(run())


def test_a_process_that_is_never_ready_is_a_failure(tmp_path: Path) -> None:
    async def run() -> None:
        supervisor = Supervisor()
        never = exists(tmp_path / "never")
        with pytest.raises(ProcessFailed, match=r"not ready within 0\.1 s"):
            await supervisor.start(spec(tmp_path, FOREVER), lambda: never, timeout_s=0.1)
        await supervisor.stop("child")

    asyncio.run(run())


def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    async def run() -> None:
        up = tmp_path / "up"
        code = (
            "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
            f"open({str(up)!r}, 'w').close()\nwhile True: signal.pause()"
        )
        supervisor = Supervisor()
        await supervisor.start(spec(tmp_path, code), lambda: exists(up), timeout_s=10)
        pid = supervisor.pids["child"]
        await supervisor.stop("child")
        assert gone(pid)

    asyncio.run(run())


def test_a_process_that_fails_is_started_again(tmp_path: Path) -> None:
    async def run() -> None:
        lives = tmp_path / "lives"
        code = f"open({str(lives)!r}, 'a').write('x'); raise SystemExit(1)"
        supervisor = Supervisor()
        await supervisor.start(spec(tmp_path, code), None, timeout_s=10)
        async with asyncio.timeout(10):
            while not lives.exists() or len(lives.read_text()) < 2:
                await asyncio.sleep(0.02)
        await supervisor.stop("child")

    asyncio.run(run())


def test_the_end_of_a_critical_process_is_told(tmp_path: Path) -> None:
    async def run() -> None:
        supervisor = Supervisor()
        await supervisor.start(spec(tmp_path, "", critical=True), None, timeout_s=10)
        failure = await asyncio.wait_for(supervisor.failed, 10)
        assert "exited with 0" in str(failure)
        await supervisor.stop("child")

    asyncio.run(run())
