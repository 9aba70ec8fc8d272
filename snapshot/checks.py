"""An image is code: what must hold of its files before anything of it runs."""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from dynamo_elastic.errors import SnapshotDamaged
from dynamo_elastic.snapshot.manifest import MANIFEST_FILE, ImageFile, Manifest, decode

PIECE_BYTES = 64 << 20
_MAX_THREADS = 8
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
    """xxh3_128 of a file's bytes, in hex; of a file of more than PIECE_BYTES that of its pieces'
    digests, which are made side by side: a restore waits for them."""
    with path.open("rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes == 0:
            return xxhash.xxh3_128(b"").hexdigest()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data, memoryview(data) as view:
            if size_bytes <= PIECE_BYTES:
                return xxhash.xxh3_128(view).hexdigest()
            return xxhash.xxh3_128(b"".join(_pieces(view))).hexdigest()


def _pieces(data: memoryview) -> list[bytes]:
    def digest(start: int) -> bytes:
        with data[start : start + PIECE_BYTES] as piece:
            return xxhash.xxh3_128(piece).digest()  # without the interpreter's lock

    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as threads:
        return list(threads.map(digest, range(0, len(data), PIECE_BYTES)))


def read_manifest(directory: Path) -> Manifest:
    """The manifest in a private directory. Raises SnapshotDamaged."""
    path = directory / MANIFEST_FILE
    private_file(path)
    return decode(path.read_bytes(), str(path))


def file_findings(directory: Path, manifest: Manifest) -> Iterator[str]:
    """Everything that is wrong with the files: one line each, naming the file."""
    known = {file.name for file in manifest.files} | {MANIFEST_FILE}
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
