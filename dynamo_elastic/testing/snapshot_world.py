"""One slot's snapshots, with whatever imager, namespace and GPUs a test wants."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

from dynamo_elastic.snapshot.base import (
    BOOT_LOG,
    Command,
    Imager,
    Namespace,
    RestorePhase,
    TakePhase,
)
from dynamo_elastic.snapshot.catalog import Catalog
from dynamo_elastic.snapshot.cuda_findings import IPC_CACHE, REPORT, REPORTED
from dynamo_elastic.snapshot.gpu import NO_GPU, Gpu
from dynamo_elastic.snapshot.inspect_process import Allowed
from dynamo_elastic.snapshot.manifest import Manifest
from dynamo_elastic.snapshot.namespace import temporary_namespace
from dynamo_elastic.snapshot.process import PROC, identify, kill_and_wait
from dynamo_elastic.snapshot.restore import Restored, restore_snapshot
from dynamo_elastic.snapshot.take import TakeRequest, take_snapshot
from dynamo_elastic.testing.cuda import FakeGpuHost
from dynamo_elastic.testing.imager import FakeNamespace
from dynamo_elastic.testing.snapshots import FINGERPRINT

READY = "ready.json"
WAIT = "import time; time.sleep(600)"
CLEAN = {REPORT: dict.fromkeys(REPORTED, 0)}
"""What an engine says that holds nothing that is in the way."""
_LIVE_ENVIRONMENT = {"PATH": "/usr/bin:/bin"}
_GPU_ENVIRONMENT = {**_LIVE_ENVIRONMENT, IPC_CACHE: "n"}


def come_up(report: Mapping[str, object] | None = None) -> str:
    """Code of a process that says so, and waits."""
    text = repr(json.dumps(report or {}))
    return (
        f"import os, sys; open(sys.argv[1] + '.tmp', 'w').write({text}); "
        f"os.rename(sys.argv[1] + '.tmp', sys.argv[1]); {WAIT}"
    )


def fake_gpu_host() -> FakeGpuHost:
    """GPUs on which every process is that was started for them, see SnapshotWorld."""

    def adopts(pid: int) -> bool:
        return f"{IPC_CACHE}=n".encode() in (PROC / str(pid) / "environ").read_bytes()

    def kill(pid: int) -> None:
        process = identify(pid)
        if process is not None:
            kill_and_wait(process, timeout_s=5)

    return FakeGpuHost(kill=kill, adopts=adopts)


class SnapshotWorld:
    """A slot on one host. Without `real` its processes are plain ones of the host, and pids are not
    chosen; with it they run in pid namespaces, which needs root. Processes are started for GPUs
    if there are any. `tree`: a process and its descendants go into an image. Close it."""

    def __init__(
        self,
        root: Path,
        imager: Imager,
        *,
        gpu: Gpu = NO_GPU,
        real: bool = False,
        slot: int = 0,
        tree: bool = False,
    ) -> None:
        self.control_dir = root / f"slot{slot}"
        self.catalog = Catalog(root / "images")
        self.imager = imager
        self.gpu = gpu
        self.slot = slot
        self.max_bytes = 1 << 30
        self.phases: list[TakePhase | RestorePhase] = []
        self.here = replace(FINGERPRINT, slot=slot, control_dir=str(self.control_dir))
        self._environment = _LIVE_ENVIRONMENT if gpu is NO_GPU else _GPU_ENVIRONMENT
        self._real = real
        self._tree = tree
        self._shared = FakeNamespace()

    def make_namespace(self, binds: Mapping[Path, Path]) -> AbstractContextManager[Namespace]:
        return temporary_namespace(binds) if self._real else self._host(binds)

    @contextmanager
    def _host(self, binds: Mapping[Path, Path]) -> Iterator[Namespace]:
        if list(binds) != [self.control_dir]:
            raise ValueError(f"unexpected binds {binds}")
        try:
            yield self._shared
        finally:
            self._shared.end(timeout_s=5)

    def take(self, code: str, *, timeout_s: float = 10.0) -> Manifest:
        """An image of a process that runs `code`; its argument is the path of its ready file."""
        ready = str(self.control_dir / READY)
        request = TakeRequest(
            slot=self.slot,
            command=Command(
                (sys.executable, "-I", "-S", "-c", code, ready),
                self._environment,
                self.control_dir / BOOT_LOG,
            ),
            control_dir=self.control_dir,
            ready_file=READY,
            allowed=Allowed(
                (self.control_dir,),
                {*self._environment, "LC_CTYPE"}.__contains__,
                tree=self._tree,
            ),
            fingerprint=self.here,
            boot_timeout_s=timeout_s,
            dump_timeout_s=timeout_s,
            max_bytes=self.max_bytes,
        )
        return take_snapshot(
            request,
            catalog=self.catalog,
            imager=self.imager,
            make_namespace=self.make_namespace,
            gpu=self.gpu,
            notify=self.phases.append,
        )

    def restore(self, manifest: Manifest, namespace: Namespace | None = None) -> Restored:
        return restore_snapshot(
            manifest,
            here=self.here,
            catalog=self.catalog,
            imager=self.imager,
            namespace=namespace or self._shared,
            timeout_s=10.0,
            gpu=self.gpu,
            notify=self.phases.append,
        )

    def close(self) -> None:
        self._shared.end(timeout_s=5)
