"""Restoring a snapshot: compare, verify, and only then let CRIU run it."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path

from dynamo_elastic.errors import PidClash, SnapshotMismatch
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
from dynamo_elastic.snapshot.locks import work_directory
from dynamo_elastic.snapshot.manifest import Manifest
from dynamo_elastic.snapshot.process import ProcessRef

_REAP_TIMEOUT_S = 2.0


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
    notify: Notify[RestorePhase] | None = None,
) -> Restored:
    """The image's process runs in `namespace`; the caller gives it its identity.

    Nobody can remove the image meanwhile. Raises SnapshotNotFound, SnapshotMismatch or
    SnapshotDamaged, before anything of the image was run; PidClash or ImagerError, and nothing is
    left running.
    """
    track = Track(RESTORE_MOVES, RestorePhase.START, notify)
    try:
        track.to(RestorePhase.COMPARE)
        differences = mismatches(manifest.fingerprint, here)
        if differences:
            raise SnapshotMismatch(manifest.image_id, differences)
        track.to(RestorePhase.VERIFY)
        with catalog.hold(manifest.image_id):
            directory = catalog.verify(manifest)
            track.to(RestorePhase.RESTORE)
            process = _restore(manifest, directory, imager, namespace, timeout_s)
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
