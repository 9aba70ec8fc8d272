"""Restoring a snapshot: compare, verify, and only then let CRIU run it."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dynamo_elastic.errors import PidClash, ProcessesLost, SnapshotMismatch
from dynamo_elastic.failpoints import failpoint
from dynamo_elastic.snapshot.base import (
    BOOT_LOG,
    RESTORE_MOVES,
    Imager,
    Namespace,
    Notify,
    RestorePhase,
    Track,
)
from dynamo_elastic.snapshot.catalog import Catalog
from dynamo_elastic.snapshot.fingerprint import Fingerprint, mismatches
from dynamo_elastic.snapshot.freeze import cuda_processes, thaw
from dynamo_elastic.snapshot.gpu import NO_GPU, Gpu, check_free
from dynamo_elastic.snapshot.locks import work_directory
from dynamo_elastic.snapshot.manifest import Manifest
from dynamo_elastic.snapshot.process import ProcessRef, kill_tree

_REAP_TIMEOUT_S = 2.0
_KILL_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Restored:
    """A process that runs again and polls for its new identity. `process`: in our namespace."""

    process: ProcessRef
    timings_s: dict[str, float]


def restore_snapshot(
    manifest: Manifest,
    *,
    here: Fingerprint,
    catalog: Catalog,
    imager: Imager,
    namespace: Namespace,
    timeout_s: float,
    gpu: Gpu = NO_GPU,
    notify: Notify[RestorePhase] | None = None,
) -> Restored:
    """The image's process runs in `namespace`, on its GPUs; the caller gives it its identity.
    Restores of different images may run side by side.

    Nobody can remove the image meanwhile. Raises SnapshotNotFound, SnapshotMismatch,
    GpuMemoryShort or SnapshotDamaged, before anything of the image was run; PidClash, ImagerError,
    CudaError or ProcessesLost, and nothing is left running.
    """
    deadline = time.monotonic() + timeout_s
    track = Track(RESTORE_MOVES, RestorePhase.START, notify, name="restore")
    try:
        track.to(RestorePhase.COMPARE)
        differences = mismatches(manifest.fingerprint, here)
        if differences:
            raise SnapshotMismatch(manifest.image_id, differences)
        check_free(gpu.inventory, manifest.gpu.device_bytes)
        track.to(RestorePhase.VERIFY)
        with catalog.hold(manifest.image_id):
            directory = catalog.verify(manifest)
            track.to(RestorePhase.RESTORE)
            process = _restore(manifest, directory, imager, namespace, timeout_s)
        with _ended_on_failure(process):
            track.to(RestorePhase.THAW)
            _thaw(manifest, process, gpu, deadline - time.monotonic())
            catalog.touch(manifest.image_id)
            track.to(RestorePhase.DONE)
    except BaseException:
        track.to(RestorePhase.FAILED)
        raise
    return Restored(process, track.timings_s())


def _restore(
    manifest: Manifest, directory: Path, imager: Imager, namespace: Namespace, timeout_s: float
) -> ProcessRef:
    # The image has its boot log open for appending: CRIU opens it by path, and checks its mode.
    log = namespace.view(Path(manifest.fingerprint.control_dir)) / BOOT_LOG
    log.touch()
    log.chmod(0o600)
    namespace.wait_reaped(manifest.root_pid, timeout_s=_REAP_TIMEOUT_S)
    holder = namespace.holder({manifest.root_pid, *manifest.thread_ids})
    if holder is not None:
        argv = ("restore", manifest.image_id)
        raise PidClash(argv, errno.EEXIST, str(holder), pid=holder.pid)
    with work_directory() as work_dir:
        return imager.restore(directory, namespace, work_dir=work_dir, timeout_s=timeout_s)


@contextmanager
def _ended_on_failure(process: ProcessRef) -> Iterator[None]:
    try:
        yield
    except BaseException:
        kill_tree(process.pid, timeout_s=_KILL_TIMEOUT_S)
        raise


def _thaw(manifest: Manifest, process: ProcessRef, gpu: Gpu, timeout_s: float) -> None:
    """Its CUDA processes, if it has any, are back on their GPUs. Raises CudaError or ProcessesLost:
    then not all of them are."""
    wanted = manifest.gpu.processes
    if wanted == 0:
        return
    failpoint("restore.before_thaw")
    holders = cuda_processes(process, gpu.driver)
    if len(holders) != wanted:
        raise ProcessesLost(
            {process.pid: "unknown"},
            f"{wanted} held CUDA when the image was made, {len(holders)} do after its restore",
        )
    thaw(holders, gpu.driver, timeout_s=timeout_s)
    failpoint("restore.thawed")
