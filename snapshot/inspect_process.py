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
    tree_of,
)
from dynamo_elastic.snapshot.sockets import socket_names

_PLAIN_DEVICES = frozenset({"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"})
_PLAIN_ANON = frozenset({"[eventpoll]", "[eventfd]", "[timerfd]", "[signalfd]", "inotify"})
_MAPS = re.compile(r"^\S+ (?P<mode>\S{4}) \S+ \S+ \S+\s*(?P<path>.*)$")
_ADDED_BY_SHELL = frozenset({"PWD", "OLDPWD", "_"})
_WRITABLE = os.O_WRONLY | os.O_RDWR
_DELETED = " (deleted)"
_SHARED_MEMORY = "/dev/shm/"
_CUDA_LISTENER = "a listening unix socket @cuda-uvmfd-"
"""Every process that has initialised CUDA keeps it for good; see image_view for its name."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """What may be in an image. `directories`: files of these may be open. `pids`: those of its
    slot, None if its pid was not chosen. `gpu`: it is on its GPU still, and has the driver open.
    `tree`: it and its descendants go into the image together, with pipes, unix sockets and shared
    memory without a name between them."""

    directories: tuple[Path, ...]
    environment: Callable[[str], bool]
    pids: range | None = None
    gpu: bool = False
    tree: bool = False

    def holds(self, path: str) -> bool:
        return any(Path(path).is_relative_to(directory) for directory in self.directories)

    def device(self, path: str) -> bool:
        return self.gpu and is_driver_device(path)

    def nameless(self, path: str) -> bool:
        """True of shared memory that no process outside of the tree can find."""
        return self.tree and path.startswith(_SHARED_MEMORY) and path.endswith(_DELETED)

    def between(self, socket: str) -> bool:
        """True of a unix socket that connects the tree with itself, as far as its name tells; CRIU
        refuses it if the other end is elsewhere."""
        _, is_unix, name = socket.partition(" unix socket")
        return self.tree and bool(is_unix) and (not name or self.holds(name.strip()))


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
    pids = tree_of(pid) if allowed.tree else (pid,)
    descriptors = [d for member in pids for d in _descriptors(member)]
    yield from descriptor_findings(descriptors, allowed, socket_names(pid))
    for member in pids:
        yield from mapping_findings((PROC / str(member) / "maps").read_text(), allowed)
    # What a process starts its children with is its own doing.
    yield from environment_findings((PROC / str(pid) / "environ").read_bytes(), allowed)
    yield from _company_findings(process, pids)
    yield from thread_findings([t for member in pids for t in threads_of(member)], allowed)


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
        ours = name.startswith(_CUDA_LISTENER) or world.allowed.between(name)
        return "" if ours else name
    if kind == "pipe":
        return "" if world.pipes[d.target] == {True, False} else "a pipe to another process"
    if kind == "anon_inode":
        return "" if rest in _PLAIN_ANON else f"{rest.strip('[]')} can't be in an image"
    if d.target in _PLAIN_DEVICES or d.target.startswith("/memfd:"):
        return ""
    if world.allowed.nameless(d.target):
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
        if match is None or allowed.device(match["path"]) or allowed.nameless(match["path"]):
            continue
        finding = _mapping_finding(match["path"], match["mode"])
        if finding:
            found[finding] = None
    yield from found


def _mapping_finding(path: str, mode: str) -> str:
    if path.startswith("anon_inode:"):
        return f"mapping of {path}"
    if not path.startswith("/") or path.startswith(("/dev/zero", "/memfd:")):
        return ""
    if path.startswith("/dev/") and not path.startswith(_SHARED_MEMORY):
        return f"mapping of device {path}"
    if mode.endswith("s") and ("w" in mode or path.startswith(_SHARED_MEMORY)):
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


def _company_findings(process: ProcessRef, members: Collection[int]) -> Iterator[str]:
    """Other processes: children, and what was started and left to the namespace's first process."""
    children = [c for c in children_of(process.pid) if c not in members]
    for child in children:
        yield f"child process {child} ({command(child)}): end it"
    namespace = namespace_of(process)
    if namespace is None:
        return
    for other in namespace.processes():
        if other.pid not in members and other.pid not in children:
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
