"""What a process holds that an image must not hold: found before CRIU is asked."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from dynamo_elastic.errors import NotQuiescent
from dynamo_elastic.snapshot.process import PROC, children_of

_PLAIN_DEVICES = frozenset({"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"})
_PLAIN_ANON = frozenset({"[eventpoll]", "[eventfd]", "[timerfd]", "[signalfd]", "inotify"})
_MAPS = re.compile(r"^\S+ (?P<mode>\S{4}) \S+ \S+ \S+\s*(?P<path>.*)$")
_ADDED_BY_SHELL = frozenset({"PWD", "OLDPWD", "_"})
_WRITABLE = os.O_WRONLY | os.O_RDWR


@dataclass(frozen=True, slots=True)
class Allowed:
    """What may be in an image. `directories`: files of these may be open."""

    directories: tuple[Path, ...]
    environment: Callable[[str], bool]

    def holds(self, path: str) -> bool:
        return any(Path(path).is_relative_to(directory) for directory in self.directories)


@dataclass(frozen=True, slots=True)
class Descriptor:
    """One open descriptor; `target` and `flags` as /proc shows them."""

    fd: int
    target: str
    flags: int

    @property
    def writable(self) -> bool:
        return bool(self.flags & _WRITABLE)


def check_quiescent(pid: int, allowed: Allowed) -> None:
    """Return if an image may be made of `pid`. Raises NotQuiescent with every finding at once."""
    findings = [
        *descriptor_findings(_descriptors(pid), allowed),
        *mapping_findings((PROC / str(pid) / "maps").read_text()),
        *environment_findings((PROC / str(pid) / "environ").read_bytes(), allowed),
        *(f"child process {child}: end it" for child in children_of(pid)),
    ]
    if findings:
        raise NotQuiescent(findings)


def descriptor_findings(descriptors: Collection[Descriptor], allowed: Allowed) -> Iterator[str]:
    """Findings in open descriptors: what ties the process to others, or would not be there."""
    pipes: dict[str, set[bool]] = defaultdict(set)
    for descriptor in descriptors:
        if descriptor.target.startswith("pipe:"):
            pipes[descriptor.target].add(descriptor.writable)
    for descriptor in descriptors:
        problem = _problem(descriptor, allowed, pipes)
        if problem:
            yield f"descriptor {descriptor.fd} ({descriptor.target}): {problem}"


def _problem(d: Descriptor, allowed: Allowed, pipes: dict[str, set[bool]]) -> str:
    kind, _, rest = d.target.partition(":")
    if kind == "socket":
        return "a socket"
    if kind == "pipe":
        return "" if pipes[d.target] == {True, False} else "a pipe to another process"
    if kind == "anon_inode":
        return "" if rest in _PLAIN_ANON else "can't be in an image"
    if d.target in _PLAIN_DEVICES or d.target.startswith("/memfd:"):
        return ""
    if d.target.startswith("/dev/"):
        return "a device"
    if not allowed.holds(d.target):
        return "a file outside the control directory"
    if d.writable and not d.flags & os.O_APPEND:
        return "written without O_APPEND: it can't grow between dump and restore"
    return ""


def mapping_findings(maps: str) -> Iterator[str]:
    """Findings in memory mappings: device memory, and files shared with other processes."""
    seen: set[str] = set()
    for line in maps.splitlines():
        match = _MAPS.match(line)
        path = match["path"] if match else ""
        if match is None or not path.startswith("/") or path in seen:
            continue
        seen.add(path)
        if path.startswith(("/dev/zero", "/memfd:")):
            continue
        if path.startswith("/dev/") and not path.startswith("/dev/shm/"):
            yield f"mapping of device {path}"
        elif match["mode"].endswith("s") and "w" in match["mode"]:
            yield f"shared writable mapping of {path}"


def environment_findings(environ: bytes, allowed: Allowed) -> Iterator[str]:
    """Findings among the variables it was started with: names only, values may be secrets."""
    for item in environ.split(b"\0"):
        name = item.partition(b"=")[0].decode(errors="replace")
        if name and name not in _ADDED_BY_SHELL and not allowed.environment(name):
            yield f"environment variable {name}: not on the allow-list"


def _descriptors(pid: int) -> list[Descriptor]:
    found = []
    for path in (PROC / str(pid) / "fd").iterdir():
        info = (PROC / str(pid) / "fdinfo" / path.name).read_text()
        flags = next(line for line in info.splitlines() if line.startswith("flags:"))
        found.append(Descriptor(int(path.name), os.readlink(path), int(flags.split()[1], 8)))
    return sorted(found, key=lambda d: d.fd)
