"""What a process holds that an image must not hold: found before CRIU is asked."""

from __future__ import annotations

import os
import re
import stat
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dynamo_elastic.errors import NotQuiescent
from dynamo_elastic.snapshot.cuda_findings import is_driver_device
from dynamo_elastic.snapshot.namespace import namespace_of
from dynamo_elastic.snapshot.process import (
    PROC,
    ProcessRef,
    children_of,
    command,
    threads_of,
)
from dynamo_elastic.snapshot.sockets import socket_names

_PLAIN_DEVICES = frozenset({"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"})
_PLAIN_ANON = frozenset({"[eventpoll]", "[eventfd]", "[timerfd]", "[signalfd]", "inotify"})
_MAPS = re.compile(r"^\S+ (?P<mode>\S{4}) \S+ \S+ \S+\s*(?P<path>.*)$")
_ADDED_BY_SHELL = frozenset({"PWD", "OLDPWD", "_"})
_WRITABLE = os.O_WRONLY | os.O_RDWR
_DELETED = " (deleted)"
_CUDA_LISTENER = "a listening unix socket @cuda-uvmfd-"
"""Every process that has initialised CUDA keeps it for good. The network namespace is shared, so a
second copy of one image, in whatever pid namespace, can't be restored while the first one lives."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """What may be in an image. `directories`: files of these may be open. `pids`: those of its
    slot, None if its pid was not chosen. `gpu`: it is on its GPU still, and has the driver open."""

    directories: tuple[Path, ...]
    environment: Callable[[str], bool]
    pids: range | None = None
    gpu: bool = False

    def holds(self, path: str) -> bool:
        return any(Path(path).is_relative_to(directory) for directory in self.directories)

    def device(self, path: str) -> bool:
        return self.gpu and is_driver_device(path)


@dataclass(frozen=True, slots=True)
class Descriptor:
    """One open descriptor; `target` and `flags` as /proc shows them."""

    fd: int
    target: str
    flags: int
    device: bool = False
    """A character or block device, wherever its node is."""

    @property
    def writable(self) -> bool:
        return bool(self.flags & _WRITABLE)


@dataclass(frozen=True, slots=True)
class _World:
    """What a descriptor is judged by. `sockets`: inode -> what it is."""

    allowed: Allowed
    sockets: Mapping[str, str]
    pipes: dict[str, set[bool]] = field(default_factory=lambda: defaultdict(set))


def check_quiescent(process: ProcessRef, allowed: Allowed) -> None:
    """Return if an image may be made of it. Raises NotQuiescent with every finding at once."""
    findings = tuple(quiescence_findings(process, allowed))
    if findings:
        raise NotQuiescent(findings)


def quiescence_findings(process: ProcessRef, allowed: Allowed) -> Iterator[str]:
    """Everything that it holds and an image must not."""
    pid = process.pid
    yield from descriptor_findings(_descriptors(pid), allowed, socket_names(pid))
    yield from mapping_findings((PROC / str(pid) / "maps").read_text(), allowed)
    yield from environment_findings((PROC / str(pid) / "environ").read_bytes(), allowed)
    yield from _company_findings(process)
    yield from thread_findings(threads_of(pid), allowed)


def descriptor_findings(
    descriptors: Collection[Descriptor], allowed: Allowed, sockets: Mapping[str, str]
) -> Iterator[str]:
    """Findings in open descriptors: what ties the process to others, or would not be there."""
    world = _World(allowed, sockets)
    for descriptor in descriptors:
        if descriptor.target.startswith("pipe:"):
            world.pipes[descriptor.target].add(descriptor.writable)
    for descriptor in descriptors:
        problem = _problem(descriptor, world)
        if problem:
            yield f"descriptor {descriptor.fd} ({descriptor.target}): {problem}"


def _problem(d: Descriptor, world: _World) -> str:
    kind, _, rest = d.target.partition(":")
    if kind == "socket":
        name = world.sockets.get(rest.strip("[]"), "a socket")
        return "" if name.startswith(_CUDA_LISTENER) else name
    if kind == "pipe":
        return "" if world.pipes[d.target] == {True, False} else "a pipe to another process"
    if kind == "anon_inode":
        return "" if rest in _PLAIN_ANON else f"{rest.strip('[]')} can't be in an image"
    if d.target in _PLAIN_DEVICES or d.target.startswith("/memfd:"):
        return ""
    if d.device or d.target.startswith("/dev/"):
        return "" if world.allowed.device(d.target) else "a device"
    return _file_problem(d, world.allowed)


def _file_problem(d: Descriptor, allowed: Allowed) -> str:
    if not allowed.holds(d.target):
        return "a file outside the control directory"
    if d.target.endswith(_DELETED):
        return "a deleted file: every copy would find another one, or none"
    if d.writable and not d.flags & os.O_APPEND:
        return "written without O_APPEND: it can't grow between dump and restore"
    return ""


def mapping_findings(maps: str, allowed: Allowed) -> Iterator[str]:
    """Findings in memory mappings: device memory, and files shared with other processes."""
    found: dict[str, None] = {}
    for line in maps.splitlines():
        match = _MAPS.match(line)
        if match is not None and not allowed.device(match["path"]):
            finding = _mapping_finding(match["path"], match["mode"])
            if finding:
                found[finding] = None
    yield from found


def _mapping_finding(path: str, mode: str) -> str:
    if path.startswith("anon_inode:"):
        return f"mapping of {path}"
    if not path.startswith("/") or path.startswith(("/dev/zero", "/memfd:")):
        return ""
    if path.startswith("/dev/") and not path.startswith("/dev/shm/"):
        return f"mapping of device {path}"
    if mode.endswith("s") and ("w" in mode or path.startswith("/dev/shm/")):
        return f"mapping of {path}, shared with other processes"
    return ""


def environment_findings(environ: bytes, allowed: Allowed) -> Iterator[str]:
    """Findings among the variables it was started with: names only, values may be secrets."""
    for item in environ.split(b"\0"):
        name = item.partition(b"=")[0].decode(errors="replace")
        if name and name not in _ADDED_BY_SHELL and not allowed.environment(name):
            yield f"environment variable {name}: not on the allow-list"


def thread_findings(threads: Collection[int], allowed: Allowed) -> Iterator[str]:
    """Threads that would take pids of another slot's images."""
    strange = [] if allowed.pids is None else [t for t in threads if t not in allowed.pids]
    if strange and allowed.pids is not None:
        yield (
            f"{len(strange)} threads (first {strange[0]}) outside of the slot's pids "
            f"{allowed.pids.start}-{allowed.pids.stop - 1}: start fewer"
        )


def _company_findings(process: ProcessRef) -> Iterator[str]:
    """Other processes: children, and what was started and left to the namespace's first process."""
    for child in children_of(process.pid):
        yield f"child process {child} ({command(child)}): end it"
    namespace = namespace_of(process)
    if namespace is None:
        return
    children = set(children_of(process.pid))
    for other in namespace.processes():
        if other != process and other.pid not in children:
            yield f"process {other.pid} ({command(other.pid)}) in its namespace: end it"


def _descriptors(pid: int) -> list[Descriptor]:
    found = []
    for path in (PROC / str(pid) / "fd").iterdir():
        info = (PROC / str(pid) / "fdinfo" / path.name).read_text()
        flags = next(line for line in info.splitlines() if line.startswith("flags:"))
        mode = path.stat().st_mode
        device = stat.S_ISCHR(mode) or stat.S_ISBLK(mode)
        target = os.readlink(path)
        found.append(Descriptor(int(path.name), target, int(flags.split()[1], 8), device))
    return sorted(found, key=lambda d: d.fd)
