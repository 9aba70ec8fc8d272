"""An image is code: what must hold of its files before anything of it runs."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from blake3 import blake3

from dynamo_elastic.errors import SnapshotDamaged
from dynamo_elastic.snapshot.manifest import (
    MANIFEST_FILE,
    SCHEMA_VERSION,
    ImageFile,
    Manifest,
    decode,
)
from dynamo_elastic.snapshot.signing import MOST_SIGNATURE_BYTES, SIGNATURE_FILE

_FOREIGN_BITS = 0o077


def private_directory(path: Path) -> None:
    """Raises SnapshotDamaged unless it is a directory, no link, ours, and closed to others."""
    _check_private(path, stat.S_ISDIR, "directory")


def private_file(path: Path) -> os.stat_result:
    """Like private_directory(); a second name for a file is refused too."""
    status = _check_private(path, stat.S_ISREG, "file")
    if status.st_nlink != 1:
        raise SnapshotDamaged(f"{path}: has {status.st_nlink} names, one may be outside")
    return status


def _check_private(path: Path, wanted: Callable[[int], bool], kind: str) -> os.stat_result:
    try:
        status = path.lstat()
    except OSError as exc:
        raise SnapshotDamaged(f"{path}: can't be read ({exc.strerror})") from exc
    if not wanted(status.st_mode):
        raise SnapshotDamaged(f"{path}: is not a plain {kind}")
    if status.st_uid != os.geteuid():
        raise SnapshotDamaged(f"{path}: is owned by uid {status.st_uid}, not by us")
    if status.st_mode & _FOREIGN_BITS:
        mode = stat.S_IMODE(status.st_mode)
        raise SnapshotDamaged(f"{path}: mode {mode:04o} lets others in; chmod go= it")
    return status


def digest_file(path: Path) -> str:
    """BLAKE3 of a file's bytes, in hex, on all cores: a restore waits for it. Nobody can make
    another file with the same one: whoever signs it signs the file."""
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()


def read_manifest(directory: Path) -> Manifest:
    """The manifest in a private directory. Raises SnapshotDamaged."""
    path = directory / MANIFEST_FILE
    private_file(path)
    return decode(path.read_bytes(), str(path))


def read_signature(directory: Path) -> bytes | None:
    """The signature beside a manifest, None if there is none. Raises SnapshotDamaged."""
    path = directory / SIGNATURE_FILE
    if not os.path.lexists(path):
        return None
    private_file(path)
    with path.open("rb") as file:
        return file.read(MOST_SIGNATURE_BYTES)


def file_findings(directory: Path, manifest: Manifest) -> Iterator[str]:
    """Everything that is wrong with the files: one line each, naming the file."""
    if manifest.schema_version != SCHEMA_VERSION:
        yield (
            f"{directory}: written in schema {manifest.schema_version}, images of {SCHEMA_VERSION} "
            "run: create the image anew"
        )
        return
    known = {file.name for file in manifest.files} | {MANIFEST_FILE, SIGNATURE_FILE}
    strange = sorted({path.name for path in directory.iterdir()} - known)
    if strange:
        yield f"{directory}: unknown files {', '.join(strange)}"
    for file in manifest.files:
        try:
            _check_file(directory, file)
        except SnapshotDamaged as exc:
            yield str(exc)


def _check_file(directory: Path, file: ImageFile) -> None:
    path = directory / file.name
    if path.parent != directory:
        raise SnapshotDamaged(f"{directory}: the manifest names {file.name!r}")
    status = private_file(path)
    if status.st_size != file.size_bytes:
        raise SnapshotDamaged(f"{path}: {status.st_size} bytes, not {file.size_bytes}")
    if digest_file(path) != file.digest:
        raise SnapshotDamaged(f"{path}: its content was altered")
