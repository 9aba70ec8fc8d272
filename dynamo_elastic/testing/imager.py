"""An imager without CRIU: it starts the dumped command again. For tests without root."""

from __future__ import annotations

import json
from pathlib import Path

from dynamo_elastic.errors import ImagerError, PidClash
from dynamo_elastic.snapshot.base import Command, Namespace
from dynamo_elastic.snapshot.namespace import HostNamespace
from dynamo_elastic.snapshot.process import PROC, ProcessRef, alive, kill_and_wait

_IMAGE = "pages-1.img"
_TIMEOUT_S = 5.0


class FakeNamespace(HostNamespace):
    """The host, where a wish for a pid is not heard."""

    def spawn(self, command: Command, *, pid: int | None = None) -> ProcessRef:
        return super().spawn(command)


class FakeImager:
    """Keeps Imager's promises but one: memory is lost, the process begins anew. One that it
    restored still runs: restoring it again is a PidClash."""

    def __init__(self, version: str = "4.2.1") -> None:
        self._version = version
        self._running: dict[Path, ProcessRef] = {}

    def version(self) -> str:
        return self._version

    def dump(
        self, process: ProcessRef, directory: Path, namespace: Namespace, *, timeout_s: float
    ) -> None:
        if not alive(process):
            raise ImagerError(["fake", "dump"], 1, f"no process {process.pid}")
        raw = (PROC / str(process.pid) / "cmdline").read_text()
        log = (PROC / str(process.pid) / "fd" / "1").readlink()
        image = {"argv": raw.split("\0")[:-1], "log": str(log)}
        (directory / _IMAGE).write_text(json.dumps(image))
        kill_and_wait(process, timeout_s=_TIMEOUT_S)

    def restore(
        self, directory: Path, namespace: Namespace, *, work_dir: Path, timeout_s: float
    ) -> ProcessRef:
        argv = ["fake", "restore"]
        running = self._running.get(directory)
        if running is not None and alive(running):
            raise PidClash(argv, 1, f"pid {running.pid} is taken", pid=running.pid)
        try:
            image = json.loads((directory / _IMAGE).read_text())
        except (OSError, ValueError) as exc:
            raise ImagerError(argv, 1, str(exc)) from exc
        command = Command(tuple(image["argv"]), {}, Path(image["log"]))
        process = namespace.spawn(command)
        self._running[directory] = process
        return process
