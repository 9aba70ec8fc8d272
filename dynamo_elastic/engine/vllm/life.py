"""The life of an engine's process: its end, whatever goes wrong in it, and from the end of its boot
to its identity `detached.json`, and `attach.json` after it. Imports no vLLM. engine.base says what
the two files are."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from dynamo_elastic.engine.base import ATTACH_FILE, DETACHED_FILE, Attach
from dynamo_elastic.engine.ending import until_it_ends
from dynamo_elastic.engine.renew import adopt_standard_files, redirect
from dynamo_elastic.engine.vllm.release import trim
from dynamo_elastic.engine.vllm.versions import installed

_POLL_S = 0.01


def run(live: Callable[[], Coroutine[Any, Any, None]]) -> NoReturn:
    """All of this process from here on; see until_it_ends()."""
    adopt_standard_files()
    until_it_ends(lambda: asyncio.run(live()))


def say_detached(control_dir: Path, began_s: float, **facts: Any) -> None:
    """This process, the root of its tree, has let go of everything, and `facts` are true of it.
    `began_s`: when it started, by time.monotonic()."""
    trim()
    redirect(os.devnull, (0,))
    report = {
        "pid": os.getpid(),
        "warm_s": time.monotonic() - began_s,
        "versions": installed(Path(sys.executable)),
        **facts,
    }
    path = control_dir / DETACHED_FILE
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(report))
    partial.replace(path)


async def wait_attach(control_dir: Path) -> Attach:
    """The identity in `attach.json`, which is consumed, once it is there. There is no deadline:
    whoever started the process has one, and ends it."""
    path = control_dir / ATTACH_FILE
    while True:
        with suppress(FileNotFoundError):
            attach = msgspec.convert(json.loads(path.read_text()), Attach)
            path.unlink()
            return attach
        await asyncio.sleep(_POLL_S)
