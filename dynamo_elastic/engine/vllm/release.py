"""What a process of an engine lets go of before an image is made of it. Imports no vLLM.

A replica on the CPU is a world of one: nobody ever connects to the sockets that its process groups
listen on, and nobody opens its shared memory by name once all of its processes have.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from dynamo_elastic.errors import EngineError

SHARED_MEMORY = Path("/dev/shm")
_MOST_HOLDERS = 1 << 16
_POLL_S = 0.01


def release_tcp() -> int:
    """No TCP socket is open in this process any more; returns how many were. What polls one of them
    sees a descriptor that is never ready, so it must be sure that nobody ever writes to them."""
    sockets = _tcp_descriptors()
    for descriptor in sockets:
        quiet = os.eventfd(0, os.EFD_CLOEXEC)
        os.dup2(quiet, descriptor, inheritable=False)
        os.close(quiet)
    return len(sockets)


def wait_no_tcp(timeout_s: float) -> None:
    """Return once this process has no TCP socket: ZMQ closes those that it was told to close on a
    thread of its own. Raises EngineError if one is left."""
    deadline = time.monotonic() + timeout_s
    while left := _tcp_descriptors():
        if time.monotonic() > deadline:
            raise EngineError(f"{len(left)} TCP sockets are still open after {timeout_s:g} s")
        time.sleep(_POLL_S)


def _tcp_descriptors() -> list[int]:
    return [descriptor for descriptor in _socket_descriptors() if _is_inet(descriptor)]


def _is_inet(descriptor: int) -> bool:
    try:
        with socket.socket(fileno=os.dup(descriptor)) as found:
            return found.family in (socket.AF_INET, socket.AF_INET6)
    except OSError:
        return False  # closed meanwhile


def _socket_descriptors() -> list[int]:
    return [number for number, path in _open_files().items() if path.startswith("socket:")]


def _open_files() -> dict[int, str]:
    """Each open descriptor of this process, and what it is."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing itself
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def release_process() -> None:
    """What any process of an engine lets go of: log files, NVML, and memory that it does not
    use. CUDA's own devices stay, and the driver's checkpoint closes them."""
    close_log_files()
    shut_nvml()
    trim()


def trim() -> None:
    """Memory that this process does not use is the kernel's again, and not in the image."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def close_log_files() -> int:
    """No log file of Python's own logging is open; how many were. Each is opened again by the next
    line that goes there: FlashInfer has one in its cache, which an image would hold by its path."""
    # Not by way of the loggers: FlashInfer's is not among those that logging knows.
    handlers = [reference() for reference in logging._handlerList]  # type: ignore[attr-defined]
    files = [h for h in handlers if isinstance(h, logging.FileHandler) and h.stream is not None]
    for handler in files:
        handler.close()
    return len(files)


def shut_nvml(nvml: Any = None) -> int:
    """NVML holds no device of the driver in this process; returns how often it was open. torch
    opens it to count GPUs and never shuts it down, in every process of an engine, and no image can
    hold its devices. Whoever needs it opens it again."""
    library = nvml or _nvml()
    count = 0
    while library is not None and count < _MOST_HOLDERS and library.nvmlShutdown() == 0:
        count += 1
    return count


def _nvml() -> Any:
    """NVML's library; None on a host without the driver."""
    try:
        return ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None


def unlink_shared_memory(pids: Iterable[int]) -> tuple[Path, ...]:
    """The shared memory of these processes has no name any more: it goes into the image, and two
    copies share nothing. Returns the names it had."""
    # By inode: a semaphore shows up under the name that it was made with, which is gone at once.
    used = {inode for pid in pids for inode in _shared_inodes(pid)}
    names = [path for path in SHARED_MEMORY.iterdir() if path.stat().st_ino in used]
    for path in names:
        path.unlink()
    return tuple(names)


def _shared_inodes(pid: int) -> set[int]:
    device = SHARED_MEMORY.stat().st_dev
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    found = {int(line.split()[4]) for line in lines if f" {SHARED_MEMORY}/" in line}
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            status = descriptor.stat()
            if status.st_dev == device:
                found.add(status.st_ino)
    return found


def unlink_sockets(directory: Path) -> None:
    """No socket in `directory` has a name any more; connections that are open stay."""
    for path in directory.iterdir():
        if path.is_socket():
            path.unlink()


def processes_of_session() -> tuple[int, ...]:
    """Pids of all processes of our session, ourselves included."""
    own = os.getsid(0)
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if os.getsid(int(entry.name)) == own:
                    found.append(int(entry.name))
    return tuple(sorted(found))
