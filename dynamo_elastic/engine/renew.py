"""What every engine renews when it takes its identity: two copies of one image share nothing.

RENEWALS is the whole list; docs/snapshots.md says what needs no renewal, and what stays shared.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import platform
import random
import secrets
import ssl
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from dynamo_elastic.engine.base import Attach

_MULTICAST_BIT = 1 << 40
_ARCH_PRCTL, _REQUEST, _TILES = 158, 0x1023, 18


def renew(attach: Attach, renewals: Mapping[str, Callable[[Attach], None]] | None = None) -> None:
    """Random state is seeded from `attach.seed` or the kernel, the environment is that of `attach`,
    and values derived from either are forgotten. All of RENEWALS unless told which."""
    for act in (RENEWALS if renewals is None else renewals).values():
        act(attach)


def redirect(path: str, descriptors: tuple[int, ...]) -> None:
    """Point `descriptors` at `path`, appending."""
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    for descriptor in descriptors:
        os.dup2(file, descriptor)
    os.close(file)


def adopt_standard_files() -> None:
    """Close what was inherited beyond 0, 1 and 2, and open what of these is closed."""
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def ask_for_matrix_unit() -> None:
    """Let this process use AMX, which the kernel gives to who asks, where the processor has it."""
    if os.uname().machine == "x86_64":
        ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST, _TILES)


def _log(attach: Attach) -> None:
    redirect(attach.log_path, (1, 2))


def _environment(attach: Attach) -> None:
    os.environ.update(attach.environment)
    time.tzset()


def _random(attach: Attach) -> None:
    random.seed(attach.seed)


def _numpy(attach: Attach) -> None:
    numpy = _loaded("numpy")
    if numpy is not None:
        numpy.random.seed(attach.seed % (1 << 32))


def _torch(attach: Attach) -> None:
    torch = _loaded("torch")
    if torch is not None:
        torch.manual_seed(attach.seed)


def _openssl(_: Attach) -> None:
    # Its generator lives in our memory, and reseeds itself after a fork, not after a restore.
    fresh = os.urandom(64)
    ssl.RAND_add(fresh, len(fresh))


def _uuid1(_: Attach) -> None:
    # libuuid keeps node and clock sequence out of our reach; Python's own generator draws the
    # sequence anew for each uuid. RFC 4122 allows a random node with the multicast bit set.
    _set(uuid, "_generate_time_safe", None)
    _set(uuid, "_last_timestamp", None)
    _set(uuid, "_node", secrets.randbits(48) | _MULTICAST_BIT)


def _temporary_names(attach: Attach) -> None:
    # The generator of names is reseeded when the pid changes; copies have the same pid.
    _set(tempfile, "_name_sequence", None)
    if not {"TMPDIR", "TEMP", "TMP"}.isdisjoint(attach.environment):
        tempfile.tempdir = None


def _host_name(_: Attach) -> None:
    _set(platform, "_uname_cache", None)


def _process_key(_: Attach) -> None:
    multiprocessing.current_process().authkey = os.urandom(32)


def _matrix_unit(_: Attach) -> None:
    # CRIU does not ask for it, nor does a library that did before: its next product of matrices
    # would end the process (SIGILL).
    ask_for_matrix_unit()


RENEWALS: dict[str, Callable[[Attach], None]] = {
    "log": _log,
    "environment": _environment,
    "random": _random,
    "numpy": _numpy,
    "torch": _torch,
    "openssl": _openssl,
    "uuid1": _uuid1,
    "temporary names": _temporary_names,
    "host name": _host_name,
    "process key": _process_key,
    "matrix unit": _matrix_unit,
}
"""Name -> act. uuid4, os.urandom and secrets ask the kernel, and need none."""


def _loaded(name: str) -> ModuleType | None:
    """Not imported by us: what was not loaded holds no state."""
    return sys.modules.get(name)


def _set(module: ModuleType, name: str, value: Any) -> None:
    """Set a private cache of the standard library. Where a version of Python has none, there is
    nothing to forget."""
    if hasattr(module, name):
        setattr(module, name, value)
