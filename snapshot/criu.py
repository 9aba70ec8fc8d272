"""CRIU behind the Imager seam: finds it, builds its command lines, and maps its failures."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from dynamo_elastic.errors import ImagerError, PidClash, ResourceMissing, SnapshotError
from dynamo_elastic.failpoints import failpoint
from dynamo_elastic.snapshot.base import Namespace
from dynamo_elastic.snapshot.criu_images import PROCESSES, first_number
from dynamo_elastic.snapshot.image_view import view_for
from dynamo_elastic.snapshot.page_server import PageServer
from dynamo_elastic.snapshot.process import ProcessRef, kill_tree, namespace_pid, tree_of

MINIMUM = (4, 2)
PREFIX = Path("/opt/dynamo-elastic/criu")
OVERRIDE = "DYNAMO_ELASTIC_CRIU"
INSTALL = "run deploy/criu/install.sh as root"

_DUMP_LOG, _RESTORE_LOG = "dump.log", "restore.log"
_PID_FILE = "restored.pid"
_GHOST_LIMIT = "64M"
_USERFAULT = "uffd-noncoop"
"""What CRIU calls the kernel's ability that `--lazy-pages` needs."""
_LOCKS = "--file-locks"
"""Locks that a process holds on files are taken again for it; without this it is not dumped."""
_FIRST_NAMESPACE = Path("/proc/1/ns/pid")
"""Inside, the number of the pid namespace."""
_VERSION_TIMEOUT_S = 10.0
_KILL_TIMEOUT_S = 5.0
_TAIL_LINES = 4
_HARMLESS = "RLIMIT_NOFILE"
_CLASH = re.compile(
    r"Can't fork for (\d+): File exists|Unable to create a thread (\d+).*File exists"
)


def dump_argv(criu: Path, pid: int, directory: Path) -> list[str]:
    """`pid` is that inside the namespace in which the command runs."""
    return [
        *(str(criu), "dump", "--tree", str(pid), "--images-dir", str(directory)),
        *("--log-file", _DUMP_LOG, "-v1", "--ghost-limit", _GHOST_LIMIT, _LOCKS),
    ]


def restore_argv(
    criu: Path, directory: Path, work_dir: Path, *, page_server: bool = False
) -> list[str]:
    """CRIU ends once the process runs; the process then belongs to the namespace's first. With
    `page_server` it is stopped, and a PageServer has to fill its memory."""
    return [
        *(str(criu), "restore", "--images-dir", str(directory), "--work-dir", str(work_dir)),
        *("--log-file", _RESTORE_LOG, "-v1", "--restore-detached", _LOCKS),
        *("--pidfile", str(work_dir / _PID_FILE)),
        *(("--lazy-pages", "--leave-stopped") if page_server else ()),
    ]


def parse_version(text: str) -> tuple[int, ...]:
    """(4, 2, 1) from the output of `criu --version`; () if it isn't one."""
    match = re.search(r"^Version:\s*(\d+(?:\.\d+)*)", text, re.MULTILINE)
    return tuple(int(part) for part in match[1].split(".")) if match else ()


def failure(argv: Sequence[str], returncode: int, log: str) -> ImagerError:
    """The error that a failed run with this log means."""
    errors = [line for line in log.splitlines() if "Error" in line and _HARMLESS not in line]
    lines = errors or log.splitlines()
    tail = " | ".join(line.strip() for line in lines[-_TAIL_LINES:]) or "no log"
    clash = _CLASH.search(log)
    if clash is not None:
        return PidClash(argv, returncode, tail, pid=int(clash[1] or clash[2]))
    return ImagerError(argv, returncode, tail)


def find_criu(environment: Mapping[str, str]) -> Path:
    """Path of the CRIU to use: $DYNAMO_ELASTIC_CRIU, the private prefix, or PATH. Raises
    ResourceMissing naming the remedy if there is none."""
    override = environment.get(OVERRIDE)
    if override is not None:
        if not os.access(override, os.X_OK):
            raise ResourceMissing(f"{OVERRIDE}={override} can't be run", remedy="correct the path")
        return Path(override)
    private = PREFIX / "bin" / "criu"
    if os.access(private, os.X_OK):
        return private
    on_path = shutil.which("criu", path=environment.get("PATH"))
    if on_path is None:
        raise ResourceMissing("CRIU is not installed", remedy=INSTALL)
    return Path(on_path)


class Criu:
    """One CRIU executable. Stateless: calls may run side by side. `page_server`: whether we fill
    the memory of what it restores, with many threads; else CRIU does, with one."""

    def __init__(self, path: Path, version: str, *, page_server: bool) -> None:
        self._path = path
        self._version = version
        self.page_server = page_server

    @classmethod
    def find(cls, environment: Mapping[str, str] = os.environ) -> Criu:
        """The host's CRIU, checked. Raises ResourceMissing: not found, too old, or no root."""
        if os.geteuid() != 0:
            raise ResourceMissing("CRIU needs root", remedy="run as root, or without snapshots")
        path = find_criu(environment)
        done = _run([str(path), "--version"], timeout_s=_VERSION_TIMEOUT_S)
        version = parse_version(done.stdout)
        shown = ".".join(map(str, version))
        if version < MINIMUM:
            raise ResourceMissing(
                f"CRIU {shown or 'of unknown version'} at {path} is too old, 4.2 is needed",
                remedy=INSTALL,
            )
        probe = _run([str(path), "check", "--feature", _USERFAULT], timeout_s=_VERSION_TIMEOUT_S)
        return cls(path, shown, page_server=probe.returncode == 0)

    def version(self) -> str:
        return self._version

    def dump(
        self, process: ProcessRef, directory: Path, namespace: Namespace, *, timeout_s: float
    ) -> None:
        argv = dump_argv(self._path, namespace_pid(process.pid), directory)
        self._inside(namespace, argv, directory / _DUMP_LOG, timeout_s)

    def restore(
        self, directory: Path, namespace: Namespace, *, work_dir: Path, timeout_s: float
    ) -> ProcessRef:
        pid_namespace = namespace.view(_FIRST_NAMESPACE).stat().st_ino
        view = view_for(directory, pid_namespace, work_dir)
        argv = restore_argv(self._path, view, work_dir, page_server=self.page_server)
        restore = self._filled if self.page_server else self._plainly
        (work_dir / _PID_FILE).unlink(missing_ok=True)
        try:
            return restore(argv, directory, namespace, work_dir, timeout_s)
        except PidClash:
            raise
        except BaseException:
            _end_halves(directory, namespace)
            raise

    def _plainly(
        self, argv: list[str], _: Path, namespace: Namespace, work_dir: Path, timeout_s: float
    ) -> ProcessRef:
        self._inside(namespace, argv, work_dir / _RESTORE_LOG, timeout_s)
        return namespace.host_process(int((work_dir / _PID_FILE).read_text()))

    def _filled(
        self, argv: list[str], images: Path, namespace: Namespace, work_dir: Path, timeout_s: float
    ) -> ProcessRef:
        """CRIU makes the mappings, we fill them, and only then it runs."""
        deadline = time.monotonic() + timeout_s
        with PageServer(images, work_dir) as pages:
            try:
                process = self._plainly(argv, images, namespace, work_dir, timeout_s)
            except ImagerError:
                pages.check()
                raise
            failpoint("restore.before_fill")
            pages.fill(timeout_s=deadline - time.monotonic())
            failpoint("restore.filled")
        _continue(process)
        return process

    @staticmethod
    def _inside(namespace: Namespace, argv: list[str], log: Path, timeout_s: float) -> None:
        try:
            done = _run(namespace.enter(argv), timeout_s=timeout_s)
        except subprocess.TimeoutExpired as exc:
            raise ImagerError(argv, -signal.SIGKILL, f"no end after {timeout_s:g} s") from exc
        if done.returncode != 0:
            text = log.read_text(errors="replace") if log.exists() else done.stderr
            raise failure(argv, done.returncode, text)


def _continue(process: ProcessRef) -> None:
    """It runs, and all that it started."""
    for pid in reversed(tree_of(process.pid)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _end_halves(directory: Path, namespace: Namespace) -> None:
    """End what CRIU had made of the image when it was killed."""
    with suppress(OSError, SnapshotError):
        root_pid = first_number(directory / PROCESSES)
        kill_tree(namespace.host_process(root_pid).pid, timeout_s=_KILL_TIMEOUT_S)
        namespace.wait_reaped(root_pid, timeout_s=_KILL_TIMEOUT_S)


def _run(argv: list[str], *, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Its output and exit code. Raises TimeoutExpired; then it was killed with all it started."""
    # Not pipes: what CRIU leaves when it is killed would hold their other ends.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
        except OSError as exc:
            reason = f"{argv[0]} can't be run ({exc.strerror})"
            raise ResourceMissing(reason, remedy=INSTALL) from exc
        with process:
            if not _ends(process.pid, timeout_s):
                kill_tree(process.pid, timeout_s=_KILL_TIMEOUT_S)
                raise subprocess.TimeoutExpired(argv, timeout_s)
        written = [_text(file) for file in (out, err)]
    return subprocess.CompletedProcess(argv, process.returncode, *written)


def _ends(child: int, timeout_s: float) -> bool:
    """True as soon as our child has ended; Popen.wait() would look every 50 ms."""
    pidfd = os.pidfd_open(child)
    try:
        return bool(select.select([pidfd], [], [], timeout_s)[0])
    finally:
        os.close(pidfd)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
