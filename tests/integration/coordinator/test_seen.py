"""A coordinator process on a real etcd, seen by the command line and by a scrape; no engines: the
shells are fakes of this process. With engines and clients: tests/integration/test_observe.py."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml

from dynamo_elastic.coordinator.etcd import EtcdStore
from dynamo_elastic.coordinator.targets import request_scale, wait_outcome
from dynamo_elastic.phases import Phase, Step
from dynamo_elastic.report.history import History
from dynamo_elastic.testing.coordination import CONFIG, SHAPE, World, world
from dynamo_elastic.testing.etcd_process import etcd_process, free_port
from dynamo_elastic.testing.pages import PageReader, bar_faults, number_faults
from dynamo_elastic.testing.participants import Misbehaviour, Script
from dynamo_elastic.testing.served import CLI, run_cli

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(300)]

TIMEOUT_S = 60.0


@asynccontextmanager
async def coordinator(file: Path) -> AsyncIterator[Path]:
    """A coordinator process; where it logs to."""
    argv = ["-m", "dynamo_elastic.coordinator", "--elastic-config", str(file)]
    log = file.with_suffix(".log")
    with log.open("wb") as out:
        child = await asyncio.create_subprocess_exec(
            sys.executable, *argv, f"--num-experts={SHAPE.num_experts}", stdout=out, stderr=out
        )
    try:
        yield log
    finally:
        child.terminate()
        assert await child.wait() == 0, log.read_text()


async def scaled(here: World, ranks: int) -> None:
    request_id = await request_scale(here.store, here.keys, ranks, "test")
    await wait_outcome(here.store, here.keys, request_id, timeout_s=TIMEOUT_S)


def test_reports_metrics_logs_and_commands_agree(tmp_path: Path) -> None:
    asyncio.run(_seen(tmp_path))


async def _seen(tmp_path: Path) -> None:
    port = free_port()
    with etcd_process(tmp_path / "etcd") as etcd:
        settings = {
            "deployment": "test",
            "model": {"path": "model", "name": "m"},
            "engine": {"slots_per_rank": SHAPE.slots_per_rank},
            "scale": CONFIG.model_dump(),
            "etcd": {"start": False, "endpoints": [etcd.url]},
            "coordinator": {"metrics_port": port},
            "observe": {"log_format": "json", "operations_dir": str(tmp_path / "kept")},
            "run_dir": str(tmp_path),
        }
        file = tmp_path / "d.yaml"
        file.write_text(yaml.safe_dump(settings))
        store = EtcdStore((etcd.url,))
        async with world(store, 4) as here, coordinator(file) as log:
            await here.until(CONFIG.initial_ranks, timeout_s=TIMEOUT_S)
            here[3].script = Script({Step.CHECK: Misbehaviour.FAIL})
            await scaled(here, 4)  # undone once, and tried again
            history = History(tmp_path / "kept", keep=100)
            while len(history.names()) < 3:
                await asyncio.sleep(0.05)
            done, undone, _ = history.newest(3)
            for story in (done, undone):
                page = history.page_of(story.operation_id)
                assert page is not None
                html = page.read_text()
                assert number_faults(story, html) == bar_faults(story, html) == []
                assert PageReader(html).foreign == []
            assert (done.phase, undone.phase) == (Phase.DONE, Phase.ABORTED)
            assert [(s.worker, s.step) for s in undone.troubles][-1:] == [("slot3", "check")]
            await asyncio.to_thread(_commands, file, history)
            await asyncio.to_thread(_watched, file)
            scraped = await asyncio.to_thread(_scraped, port)
            for sample in (
                'operations_total{kind="up",outcome="aborted"} 1.0',
                'operations_total{kind="up",outcome="done"} 1.0',
                'phase_seconds_count{kind="up",outcome="failed",phase="check"} 1.0',
                'step_seconds_count{outcome="failed",step="check"} 1.0',
                "leading 1.0",
                "ranks 4.0",
            ):
                assert f"dynamo_elastic_{sample}" in scraped
            lines = [json.loads(line) for line in log.read_text().splitlines()]
            (reason,) = [r for r in lines if r["message"].startswith("aborted: ")]
            assert "slot3 failed check" in reason["message"]
            told = {r["operation_id"] for r in lines if r["message"].startswith("report of")}
            assert {done.operation_id, undone.operation_id} <= told
        await store.close()


def _scraped(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def _commands(file: Path, history: History) -> None:
    done, undone = history.names()[:2]
    status = run_cli("status", "-f", str(file)).stdout
    assert "test: epoch 3, 4 ranks; leader" in status
    assert f"report: {history.page_of(done)}" in status
    assert "GPU slots of this host: " in status
    once = run_cli("watch", "-f", str(file)).stdout  # into a pipe
    assert f"({done}, by test): done" in once
    assert "\x1b" not in once
    gantt = run_cli("timeline", undone, "-f", str(file)).stdout
    assert "slot3 failed check" in gantt
    assert "✕" in gantt
    listed = run_cli("timeline", "--list", "-f", str(file)).stdout
    assert [row.split()[0] for row in listed.splitlines()[1:]] == history.names()
    missing = run_cli("timeline", "nothing", "-f", str(file))
    assert (missing.returncode, "kept are: up-" in missing.stderr) == (1, True)


def _watched(file: Path) -> None:
    """`watch` on a terminal, ended by Ctrl-C, leaves it as it was."""
    leader, follower = pty.openpty()
    watch = subprocess.Popen(
        [*CLI, "watch", "-f", str(file)],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "140", "LINES": "50"},
        start_new_session=True,
    )
    os.close(follower)
    out, deadline_s = b"", time.monotonic() + TIMEOUT_S
    while b"Ctrl-C to end" not in out and time.monotonic() < deadline_s:
        out += _read(leader)
    watch.send_signal(signal.SIGINT)
    while watch.poll() is None and time.monotonic() < deadline_s:
        out += _read(leader)
    out += _read(leader)
    os.close(leader)
    assert watch.wait(5) == 0
    assert b"4 ranks" in out
    assert b"Traceback" not in out
    # The alternate screen was left, and the cursor is shown again.
    assert out.count(b"\x1b[?1049h") == out.count(b"\x1b[?1049l") == 1
    assert out.rindex(b"\x1b[?25h") > out.rindex(b"\x1b[?25l")


def _read(terminal: int) -> bytes:
    if not select.select([terminal], [], [], 0.2)[0]:
        return b""
    try:
        return os.read(terminal, 65536)
    except OSError:  # nobody has it any more
        return b""
