"""From the end of an engine's boot to its identity, by two files."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo_elastic.agent.records import write_attach
from dynamo_elastic.engine.base import ATTACH_FILE, DETACHED_FILE, Attach
from dynamo_elastic.engine.vllm.life import wait_attach
from dynamo_elastic.types import Incarnation, WorkerId

SAY = """
import os, sys, time
from pathlib import Path
from dynamo_elastic.engine.vllm.life import say_detached

say_detached(Path(sys.argv[1]), time.monotonic() - 2, probe=[7])
assert os.readlink("/proc/self/fd/0") == "/dev/null"
"""

END = """
import threading, time
from dynamo_elastic.engine.vllm.life import run
from dynamo_elastic.errors import ConfigError

async def live():
    threading.Thread(target=time.sleep, args=(600,)).start()
    raise %s

run(live)
"""


@pytest.mark.parametrize(
    ("fault", "said", "traced"),
    [
        ("ConfigError(['one', 'two'])", "engine ends: one; two", False),
        ("KeyError('name')", "engine ends: a fault of its own", True),
    ],
)
def test_what_goes_wrong_is_in_the_log_and_ends_the_process(
    fault: str, said: str, traced: bool
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", END % fault], stderr=subprocess.PIPE, text=True, timeout=60
    )
    assert ended.returncode == 1
    assert said in ended.stderr
    assert ("Traceback" in ended.stderr) is traced


def test_what_is_true_of_a_detached_engine_is_in_its_file(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", SAY, str(tmp_path)], stdin=subprocess.PIPE)
    process.communicate(timeout=60)
    assert process.returncode == 0
    said = json.loads((tmp_path / DETACHED_FILE).read_text())
    assert (said["pid"], said["probe"]) == (process.pid, [7])
    assert said["warm_s"] >= 2
    assert "vllm" in said["versions"]
    assert [path.name for path in tmp_path.iterdir()] == [DETACHED_FILE]


def test_an_identity_is_taken_once(tmp_path: Path) -> None:
    attach = Attach(Incarnation("i"), WorkerId("w"), 3, "/log", {"NAME": "value"})

    async def taken() -> Attach:
        waiting = asyncio.ensure_future(wait_attach(tmp_path))
        await asyncio.sleep(0)
        assert not waiting.done()
        write_attach(tmp_path, attach)
        return await asyncio.wait_for(waiting, 10)

    assert asyncio.run(taken()) == attach
    assert not (tmp_path / ATTACH_FILE).exists()
