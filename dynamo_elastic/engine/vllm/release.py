"""What a process of an engine lets go of before an image is made of it. Imports no vLLM.

A replica on the CPU is a world of one: nobody ever connects to the sockets that its process groups
listen on, and nobody opens its shared memory by name once all of its processes have.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_SHARED_MEMORY = "/dev/shm/"
_DELETED = " (deleted)"


def release_tcp() -> int:
    """No TCP socket is open in this process any more; returns how many were. What polls one of them
    sees a descriptor that is never ready."""
    released = 0
    for descriptor in _socket_descriptors():
        with socket.socket(fileno=os.dup(descriptor)) as found:
            if found.family not in (socket.AF_INET, socket.AF_INET6):
                continue
        quiet = os.eventfd(0, os.EFD_CLOEXEC)
        os.dup2(quiet, descriptor, inheritable=False)
        os.close(quiet)
        released += 1
    return released


def _socket_descriptors() -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing itself
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.append(int(name))
    return found


def unlink_shared_memory(pids: Iterable[int]) -> tuple[str, ...]:
    """The shared memory of these processes has no name any more: it goes into the image, and two
    copies share nothing. Returns the names it had."""
    names = {name for pid in pids for name in _shared_memory_of(pid)}
    for name in names:
        Path(name).unlink(missing_ok=True)
    return tuple(sorted(names))


def _shared_memory_of(pid: int) -> set[str]:
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    paths = [line.split(maxsplit=5)[5] for line in maps if _SHARED_MEMORY in line]
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            paths.append(os.readlink(descriptor))
    return {p for p in paths if p.startswith(_SHARED_MEMORY) and not p.endswith(_DELETED)}


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
