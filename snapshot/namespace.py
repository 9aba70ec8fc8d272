"""The engines' pid namespace, and the plain host where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dynamo_elastic.errors import EngineError, ResourceMissing
from dynamo_elastic.snapshot import namespace_init
from dynamo_elastic.snapshot.base import Command, PidHolder
from dynamo_elastic.snapshot.process import (
    PROC,
    ProcessRef,
    alive,
    children_of,
    identify,
    kill_and_wait,
    kill_session,
    namespace_pid,
    pids_inside,
)

_ENTER_TIMEOUT_S = 10.0
_END_TIMEOUT_S = 10.0
_POLL_S = 0.001
_PID_MAX = Path("/proc/sys/kernel/pid_max")

# An engine has none of root's powers, and gets none back. Where Yama lets processes see into
# their descendants only, ranks need one to map each other's GPU memory.
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_POWERLESS = ("setpriv", "--no-new-privs")
_NO_POWERS = ("--inh-caps=-all", "--ambient-caps=-all")

# The shell is the engine's parent inside and ends at once, so that the namespace's first process
# inherits the engine. $1: pid before the wanted one, or ''. $2: log.
_LAUNCH = """
[ -z "$1" ] || echo "$1" > /proc/sys/kernel/ns_last_pid || exit 1
log=$2; shift 2; cd /; umask 077
setsid "$@" < /dev/null >> "$log" 2>&1 &
echo $!
"""


# $1: lowest allowed; $2: above it, start over while there is room.
_GUARD = """
read last < /proc/sys/kernel/ns_last_pid
[ "$last" -ge "$1" ] && [ "$last" -le "$2" ] || echo "$1" > /proc/sys/kernel/ns_last_pid
"""
_PIDS_TO_SPARE = 1000


def _launch_argv(command: Command, last_pid: int | None) -> list[str]:
    before = "" if last_pid is None else str(last_pid)
    return [
        *("/bin/sh", "-c", _LAUNCH, "sh", before),
        *(str(command.log_path), *_powerless(), *command.argv),
    ]


def _powerless() -> tuple[str, ...]:
    """What runs a program without capabilities: none to use, and none to get by running another."""
    if os.geteuid() != 0:
        return (*_POWERLESS, "--")
    restricted = _YAMA.exists() and _YAMA.read_text().strip() != "0"
    bounds = "-all,+sys_ptrace" if restricted else "-all"
    return (*_POWERLESS, f"--bounding-set={bounds}", *_NO_POWERS, "--")


def _run(
    argv: Sequence[str],
    environment: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
) -> str:
    try:
        done = subprocess.run(
            list(argv),
            env=dict(environment) if environment is not None else None,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            pass_fds=pass_fds,
            timeout=_ENTER_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise EngineError(f"{argv[0]} did not end in {_ENTER_TIMEOUT_S:g} s") from exc
    if done.returncode != 0:
        raise ResourceMissing(
            f"{argv[0]} failed: {done.stderr.strip() or done.returncode}",
            remedy="pid and mount namespaces need root with CAP_SYS_ADMIN",
        )
    return done.stdout


@dataclass(frozen=True, slots=True)
class PidNamespace:
    """A pid and mount namespace, known by its first process. It outlives whoever made it."""

    init: ProcessRef

    def spawn(self, command: Command, *, pid: int | None = None) -> ProcessRef:
        """Start it inside; its parent there is the first process."""
        last = None if pid is None else pid - 1
        inside = int(_run(self.enter(_launch_argv(command, last)), command.environment))
        return self.host_process(inside)

    def enter(self, argv: Sequence[str]) -> list[str]:
        kinds = ("--pid", "--mount", "--net")
        return ["nsenter", *kinds, "--target", str(self.init.pid), "--", *argv]

    def host_process(self, pid: int) -> ProcessRef:
        for child in children_of(self.init.pid):
            process = identify(child)
            if process is not None and namespace_pid(child) == pid:
                return process
        raise ProcessLookupError(f"no process {pid} in the namespace of {self.init.pid}")

    def wait_reaped(self, pid: int, *, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self._has_zombie(pid) and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _has_zombie(self, pid: int) -> bool:
        return any(
            identify(child) is None and _namespace_pid_or_0(child) == pid
            for child in children_of(self.init.pid)
        )

    def processes(self) -> tuple[ProcessRef, ...]:
        """All that runs inside, but for the first process."""
        members = _members(_namespace_of(self.init.pid))
        found = (identify(pid) for pid in members if pid != self.init.pid)
        return tuple(process for process in found if process is not None)

    def view(self, path: Path) -> Path:
        return Path(f"/proc/{self.init.pid}/root{path}")

    def holder(self, pids: Collection[int]) -> PidHolder | None:
        """Who has one of `pids` inside, be it as a process, thread, session or group; None if all
        are free. A zombie has its pid too."""
        wanted = frozenset(pids)
        for process in _members(_namespace_of(self.init.pid)):
            for inside, what in pids_inside(process):
                if inside in wanted:
                    return PidHolder(inside, what, process)
        return None

    def guard_pids(self, first: int) -> None:
        """New processes, and new threads of running engines, get pids from `first` on: those below
        belong to images. The kernel counts up to pid_max and begins again at 300, so this has to be
        done again and again. Raises ResourceMissing if pid_max is too low."""
        highest = int(_run(self.enter(["cat", str(_PID_MAX)])))
        if first + _PIDS_TO_SPARE >= highest:
            raise ResourceMissing(
                f"kernel.pid_max is {highest}, engines need pids up to {first + _PIDS_TO_SPARE}",
                remedy=f"sysctl kernel.pid_max={4 * (first + _PIDS_TO_SPARE)}",
            )
        latest = highest - (highest - first) // 2
        _run(self.enter(["/bin/sh", "-c", _GUARD, "sh", str(first), str(latest)]))

    def end(self, *, timeout_s: float) -> None:
        kill_and_wait(self.init, timeout_s=timeout_s)

    @property
    def alive(self) -> bool:
        return alive(self.init)


def create_namespace(
    binds: Mapping[Path, Path] | None = None, *, lifeline: int = -1, own_network: bool = False
) -> PidNamespace:
    """A new namespace whose first process only reaps. `binds`: path inside -> directory shown
    there. `lifeline`: the read end of a pipe, with whose other end the namespace ends.
    `own_network`: with no interface but `lo`, and abstract sockets of its own. Raises
    ResourceMissing without root. Caller ends it."""
    if os.geteuid() != 0:
        raise ResourceMissing("pid namespaces need root", remedy="run as root")
    pairs = [str(p) for target, source in (binds or {}).items() for p in (source, target)]
    script = str(Path(namespace_init.__file__).resolve())
    network = "own" if own_network else "shared"
    argv = [sys.executable, "-I", "-S", script, str(lifeline), network, *pairs]
    pid = int(_run(argv, pass_fds=() if lifeline < 0 else (lifeline,)))
    init = identify(pid)
    if init is None:
        raise ResourceMissing(
            "the namespace's first process ended at once", remedy="see the kernel log"
        )
    return PidNamespace(init)


@contextmanager
def temporary_namespace(
    binds: Mapping[Path, Path], *, own_network: bool = False
) -> Iterator[PidNamespace]:
    """A namespace, see create_namespace(), for as long as we are in the context, and alive."""
    read, write = os.pipe()
    try:
        namespace = create_namespace(binds, lifeline=read, own_network=own_network)
    except BaseException:
        os.close(write)
        raise
    finally:
        os.close(read)
    try:
        yield namespace
    finally:
        os.close(write)
        namespace.end(timeout_s=_END_TIMEOUT_S)


def namespace_of(process: ProcessRef) -> PidNamespace | None:
    """The namespace in which it runs; None if that is our own, or it is gone."""
    inside = _namespace_of(process.pid)
    if inside in ("", _namespace_of(os.getpid())):
        return None
    for pid in _members(inside):
        init = identify(pid)
        if init is not None and _namespace_pid_or_0(pid) == 1:
            return PidNamespace(init)
    return None


def _members(inside: str) -> list[int]:
    pids = (int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit())
    return [pid for pid in pids if _namespace_of(pid) == inside]


def _namespace_of(pid: int) -> str:
    try:
        return os.readlink(PROC / str(pid) / "ns" / "pid")
    except OSError:
        return ""


def _namespace_pid_or_0(pid: int) -> int:
    try:
        return namespace_pid(pid)
    except ProcessLookupError:
        return 0


class HostNamespace:
    """No namespace: engines are plain processes of the host, each in its own session."""

    def __init__(self) -> None:
        self._started: list[ProcessRef] = []

    def spawn(self, command: Command, *, pid: int | None = None) -> ProcessRef:
        if pid is not None:
            raise ResourceMissing("choosing a pid needs a pid namespace", remedy="run as root")
        started = int(_run(_launch_argv(command, None), command.environment))
        process = identify(started)
        if process is None:
            raise ProcessLookupError(f"process {started} ended at once")
        self._started.append(process)
        return process

    def enter(self, argv: Sequence[str]) -> list[str]:
        return list(argv)

    def host_process(self, pid: int) -> ProcessRef:
        process = identify(pid)
        if process is None:
            raise ProcessLookupError(f"no process {pid}")
        return process

    def wait_reaped(self, pid: int, *, timeout_s: float) -> None:
        """Nothing to wait for: here no pid is chosen."""

    def holder(self, pids: Collection[int]) -> PidHolder | None:
        """Nobody: here no pid is chosen."""

    def view(self, path: Path) -> Path:
        return path

    def end(self, *, timeout_s: float) -> None:
        for process in self._started:
            kill_session(process, timeout_s=timeout_s)
        self._started.clear()
