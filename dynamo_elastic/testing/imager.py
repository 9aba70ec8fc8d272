"""An imager without CRIU, which starts the dumped command again, for tests without root; and one
with which made-up CUDA state goes into an image, for tests without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import TypeAdapter

from dynamo_elastic.errors import ImagerError, PidClash
from dynamo_elastic.snapshot.base import Command, CudaState, Imager, Namespace
from dynamo_elastic.snapshot.namespace import HostNamespace
from dynamo_elastic.snapshot.process import PROC, ProcessRef, alive, kill_and_wait, tree_of
from dynamo_elastic.testing.cuda import FakeCudaProcess, FakeGpuHost

_IMAGE = "pages-1.img"
_TIMEOUT_S = 5.0
_CUDA = "fake-cuda.json"
_STATES = TypeAdapter(list[FakeCudaProcess | None])


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


class GpuImager:
    """Another imager, with which the CUDA state of FakeGpuHost's processes goes along. Like CRIU it
    can't dump one that is still on its GPU."""

    def __init__(self, inner: Imager, host: FakeGpuHost) -> None:
        self._inner = inner
        self._host = host

    def version(self) -> str:
        return self._inner.version()

    def dump(
        self, process: ProcessRef, directory: Path, namespace: Namespace, *, timeout_s: float
    ) -> None:
        pids = tree_of(process.pid)
        states = [self._host.processes[p] if self._host.holds_cuda(p) else None for p in pids]
        if any(state and state.state is not CudaState.CHECKPOINTED for state in states):
            raise ImagerError(["fake", "dump"], 1, "can't dump /dev/nvidia0")
        self._inner.dump(process, directory, namespace, timeout_s=timeout_s)
        (directory / _CUDA).write_bytes(_STATES.dump_json(states))
        for pid in pids:
            self._host.processes.pop(pid, None)

    def restore(
        self, directory: Path, namespace: Namespace, *, work_dir: Path, timeout_s: float
    ) -> ProcessRef:
        process = self._inner.restore(directory, namespace, work_dir=work_dir, timeout_s=timeout_s)
        states = _STATES.validate_json((directory / _CUDA).read_bytes())
        for pid, state in zip(tree_of(process.pid), states, strict=True):
            if state is not None:
                self._host.processes[pid] = state
        return process
