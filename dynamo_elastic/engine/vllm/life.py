"""The life of an engine's process: its end, whatever goes wrong in it, and from the end of its boot
to its identity `detached.json`, and `attach.json` after it. Imports no vLLM. engine.base says what
the two files are."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from dynamo_elastic.engine.base import ATTACH_FILE, DETACHED_FILE, Attach
from dynamo_elastic.engine.renew import adopt_standard_files, redirect
from dynamo_elastic.engine.vllm.release import trim
from dynamo_elastic.engine.vllm.versions import installed
from dynamo_elastic.errors import ElasticError

_POLL_S = 0.01
_log = logging.getLogger(__name__)


def run(live: Callable[[], Coroutine[Any, Any, None]]) -> NoReturn:
    """All of this process from here on: `live` until it is killed. The one place that catches all
    errors: whatever goes wrong is in the log, and the end of the process."""
    adopt_standard_files()
    try:
        asyncio.run(live())
    except ElasticError as exc:
        _log.error("engine ends: %s", exc)
    except Exception:  # noqa: BLE001 - nobody else is there to say what happened
        _log.exception("engine ends: a fault of its own")
    # Threads of vLLM and of Dynamo's runtime would keep a normal exit waiting.
    logging.shutdown()
    os._exit(1)


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
