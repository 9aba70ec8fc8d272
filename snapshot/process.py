"""Processes by pid and start time, so that a recycled pid is never taken for the process it was."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dynamo_elastic.errors import EngineError

PROC = Path("/proc")
_SHOWN_CHARS = 80
_STATE, _SESSION, _START = 0, 3, 19
"""Positions in /proc/PID/stat, counted after the command name."""


@dataclass(frozen=True, slots=True)
class ProcessRef:
    """One process of this host for good. `pid` is in our own pid namespace."""

    pid: int
    start_ticks: int
    """Clock ticks after boot at which it started."""


def _stat(pid: int) -> list[str] | None:
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def identify(pid: int) -> ProcessRef | None:
    """The process that has `pid` now; None if there is none or it is a zombie."""
    fields = _stat(pid)
    if fields is None or fields[_STATE] in "ZX":
        return None
    return ProcessRef(pid, int(fields[_START]))


def session_of(pid: int) -> int | None:
    """Session id of `pid` as we see it; None if it is gone."""
    fields = _stat(pid)
    return None if fields is None else int(fields[_SESSION])


def alive(process: ProcessRef) -> bool:
    """True while that very process runs; a zombie does not."""
    return identify(process.pid) == process


def open_pidfd(process: ProcessRef) -> int | None:
    """A descriptor that becomes readable when the process ends; None if it has. Caller closes."""
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    if alive(process):
        return fd
    os.close(fd)
    return None


def kill_and_wait(process: ProcessRef, *, timeout_s: float) -> None:
    """SIGKILL it; it is gone on return. Idempotent. Raises EngineError if the kernel can't end it
    in time (it is then stuck in the kernel, and still holds what it held)."""
    fd = open_pidfd(process)
    if fd is None:
        return
    try:
        signal.pidfd_send_signal(fd, signal.SIGKILL)
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        if not poller.poll(timeout_s * 1000):
            raise EngineError(f"process {process.pid} outlives SIGKILL for {timeout_s:g} s")
    except ProcessLookupError:
        return
    finally:
        os.close(fd)


def kill_session(leader: ProcessRef, *, timeout_s: float) -> None:
    """SIGKILL it and all of the session that it leads; they are gone on return. Idempotent. Raises
    EngineError like kill_and_wait()."""
    while members := _session(leader):
        for process in members:
            kill_and_wait(process, timeout_s=timeout_s)


def _session(leader: ProcessRef) -> list[ProcessRef]:
    now = identify(leader.pid)
    if now is not None and now != leader:
        return []  # nobody gets the id of a session that somebody is still in
    members = (int(e.name) for e in PROC.iterdir() if e.name.isdigit())
    found = [identify(pid) for pid in members if session_of(pid) == leader.pid]
    return [process for process in found if process is not None]


def namespace_pid(pid: int) -> int:
    """The pid of `pid` in its innermost pid namespace. Raises ProcessLookupError if gone."""
    try:
        status = (PROC / str(pid) / "status").read_text()
    except OSError as exc:
        raise ProcessLookupError(pid) from exc
    return _innermost(status, "NSpid:")


def threads_of(pid: int) -> tuple[int, ...]:
    """Ids of all threads of `pid` in its innermost pid namespace."""
    found = []
    for task in (PROC / str(pid) / "task").iterdir():
        try:
            status = (task / "status").read_text()
        except OSError:
            continue
        found.append(_innermost(status, "NSpid:"))
    return tuple(sorted(found))


def tree_of(pid: int) -> tuple[int, ...]:
    """`pid` and all its descendants, as we see them, parents first."""
    tree = [pid]
    for member in tree:
        tree += children_of(member)
    return tuple(tree)


def pids_inside(pid: int) -> Iterator[tuple[int, str]]:
    """What `pid` occupies in its innermost pid namespace: its own pid, those of its threads, and
    its session's and group's, which stay taken after their leader has died."""
    try:
        status = (PROC / str(pid) / "status").read_text()
        yield _innermost(status, "NSpid:"), "process"
        yield _innermost(status, "NSsid:"), "session"
        yield _innermost(status, "NSpgid:"), "group"
        for thread in threads_of(pid):
            yield thread, "thread"
    except OSError:
        return


@dataclass(frozen=True, slots=True)
class HostMemory:
    """What a process has in host memory."""

    private_bytes: int
    shared_bytes: int
    """In memfds, shared anonymous memory and /dev/shm, as far as it is mapped."""

    @property
    def total_bytes(self) -> int:
        return self.private_bytes + self.shared_bytes

    def since(self, before: HostMemory) -> HostMemory:
        """What was gained; negative if less is left."""
        return HostMemory(
            self.private_bytes - before.private_bytes, self.shared_bytes - before.shared_bytes
        )


def memory_of(processes: Iterable[ProcessRef]) -> HostMemory:
    """Of all of them; one that is gone has none."""
    private = shared = 0
    for process in processes:
        try:
            status = (PROC / str(process.pid) / "status").read_text()
        except OSError:
            continue
        private += 1024 * _number(status, "RssAnon:")
        shared += 1024 * _number(status, "RssShmem:")
    return HostMemory(private, shared)


def command(pid: int) -> str:
    """Its command line, cut short, for messages."""
    try:
        words = (PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return "gone"
    return b" ".join(words[:4]).decode(errors="replace").strip()[:_SHOWN_CHARS] or "a zombie"


def _innermost(status: str, name: str) -> int:
    line = next(line for line in status.splitlines() if line.startswith(name))
    return int(line.split()[-1])


def _number(status: str, name: str) -> int:
    """The first number of that line of /proc/PID/status; 0 of a zombie, which has not all lines."""
    line = next((line for line in status.splitlines() if line.startswith(name)), "")
    return int((line.split() or ["", "0"])[1])


def children_of(pid: int) -> tuple[int, ...]:
    """Pids of the direct children of all threads of `pid`."""
    found: list[int] = []
    for path in (PROC / str(pid) / "task").glob("*/children"):
        try:
            found += [int(word) for word in path.read_text().split()]
        except OSError:
            continue
    return tuple(found)


def kill_tree(pid: int, *, timeout_s: float) -> None:
    """`pid` and all its descendants are gone, except that the caller has to reap `pid` if it is its
    child. Raises EngineError like kill_and_wait()."""
    tree: list[ProcessRef] = []
    todo = [pid]
    while todo:
        process = identify(todo.pop())
        if process is None:
            continue
        # Stopped, it starts no more children; those that it has are found next. (Only where the
        # whole tree is ended: nsenter stops itself when its child is stopped.)
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGSTOP)
        tree.append(process)
        todo += children_of(process.pid)
    for process in tree:
        kill_and_wait(process, timeout_s=timeout_s)
