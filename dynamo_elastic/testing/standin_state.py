"""State of the standard library, numpy and torch that a stand-in engine uses before it is dumped:
tests tell by it what a restored copy shares with another."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import platform
import random
import secrets
import socket
import ssl
import sys
import tempfile
import time
import uuid
from typing import Any

from dynamo_elastic.engine.base import Attach
from dynamo_elastic.engine.renew import RENEWALS, ask_for_matrix_unit, renew

SKIP = "STANDIN_SKIP_RENEWALS"
"""In the environment of an attach: names of renewals to leave out, separated by commas."""

STALE_HOST = "host-of-the-image"
_ARCH_PRCTL, _GRANTED, _TILES = 158, 0x1022, 18


def warm() -> dict[str, str]:
    """Use everything once; what was drawn. The cache of the host's name then holds a stale one."""
    cache = platform.uname()._replace(node=STALE_HOST)
    platform._uname_cache = cache  # type: ignore[attr-defined]
    tempfile.gettempdir()
    ask_for_matrix_unit()  # as a library does that is going to use it
    return draws()


def draws() -> dict[str, str]:
    """One value of each source, as text."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    return {
        "random": str(random.random()),
        "numpy": str(numpy.random.random()) if numpy else "",
        "torch": str(torch.rand(1).item()) if torch else "",
        "openssl": ssl.RAND_bytes(16).hex(),
        "uuid1": str(uuid.uuid1()),
        "uuid1 node": f"{uuid.uuid1().node:012x}",
        "uuid4": str(uuid.uuid4()),
        "urandom": os.urandom(16).hex(),
        "secrets": secrets.token_hex(16),
        "temporary names": os.path.basename(tempfile.mktemp()),
        "process key": bytes(multiprocessing.current_process().authkey).hex(),
    }


def facts() -> dict[str, Any]:
    """What a process believes of itself and of where it is."""
    record = logging.makeLogRecord({})
    return {
        "pids": [os.getpid(), multiprocessing.current_process().pid, record.process or os.getpid()],
        "host": platform.node(),
        "host_now": socket.gethostname(),
        "environment": {k: os.environ.get(k, "") for k in ("TZ", "TMPDIR", "COLOUR")},
        "time_zone": time.tzname[0],
        "zone_offset_s": time.timezone,
        "temporary_directory": tempfile.gettempdir(),
        "monotonic_s": time.monotonic(),
        "hash": hash("a string"),
        "matrix_unit": _matrix_unit_granted(),
    }


def _matrix_unit_granted() -> bool:
    """Whether this process may use AMX; False, too, where the processor has none."""
    granted = ctypes.c_uint64()
    if os.uname().machine == "x86_64":
        ctypes.CDLL(None).syscall(_ARCH_PRCTL, _GRANTED, ctypes.byref(granted))
    return bool(granted.value >> _TILES & 1)


def take_identity(attach: Attach) -> None:
    """As every engine does, but for the renewals that the test leaves out."""
    skipped = attach.environment.get(SKIP, "").split(",")
    renew(attach, {name: act for name, act in RENEWALS.items() if name not in skipped})
