"""Images on disk: private, whole or absent, and checked before anything of them runs.

CATALOG/                 0700, ours
  slot2-20260801T101500-3f9a/   0700; one image: CRIU's files and manifest.json
  .partial-.../                 an image being written; never listed
"""

from __future__ import annotations

import mmap
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from dynamo_elastic.errors import SnapshotDamaged, SnapshotError, SnapshotNotFound
from dynamo_elastic.snapshot.manifest import MANIFEST_FILE, ImageFile, Manifest, decode, encode

_PARTIAL = ".partial-"
_FOREIGN_BITS = 0o077


def _check_private(path: Path, wanted: Callable[[int], bool], kind: str) -> os.stat_result:
    """Ours, of the kind that is wanted, no link, closed to everybody else."""
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
    """xxh3_128 of a file's bytes, in hex."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return xxhash.xxh3_128(b"").hexdigest()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return xxhash.xxh3_128(data).hexdigest()


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Catalog:
    """The images of one host. A catalog that does not exist yet is empty; the first image makes it.
    Raises SnapshotDamaged if the directory is not private to us."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        if self._exists():
            _check_private(self.root, stat.S_ISDIR, "directory")

    def entries(self) -> dict[str, Manifest | SnapshotDamaged]:
        """Every image by id, newest first, then the damaged ones and what is wrong with them."""
        whole: list[Manifest] = []
        damaged: dict[str, SnapshotDamaged] = {}
        for name in sorted(p.name for p in self.root.iterdir()) if self._exists() else ():
            if name.startswith("."):
                continue
            try:
                whole.append(self.inspect(name))
            except SnapshotDamaged as exc:
                damaged[name] = exc
        whole.sort(key=lambda m: m.created_at, reverse=True)
        return {m.image_id: m for m in whole} | damaged

    def manifests(self) -> tuple[Manifest, ...]:
        """Of every image that is whole by its manifest, newest first."""
        return tuple(m for m in self.entries().values() if isinstance(m, Manifest))

    def inspect(self, image_id: str) -> Manifest:
        """Its manifest. Raises SnapshotNotFound or SnapshotDamaged."""
        directory = self.directory(image_id)
        path = directory / MANIFEST_FILE
        _check_private(path, stat.S_ISREG, "file")
        manifest = decode(path.read_bytes(), str(path))
        if manifest.image_id != image_id:
            raise SnapshotDamaged(f"{path}: is the manifest of {manifest.image_id}")
        return manifest

    def directory(self, image_id: str) -> Path:
        """Where its files are. Raises SnapshotNotFound, or SnapshotDamaged if not private."""
        directory = self._path(image_id)
        _check_private(directory, stat.S_ISDIR, "directory")
        return directory

    def verify(self, manifest: Manifest) -> Path:
        """Every byte is what was written, and nothing else is there; returns the directory.
        Raises SnapshotDamaged naming the file."""
        directory = self.directory(manifest.image_id)
        strange = {p.name for p in directory.iterdir()} - {f.name for f in manifest.files}
        strange.discard(MANIFEST_FILE)
        if strange:
            raise SnapshotDamaged(f"{directory}: unknown files {', '.join(sorted(strange))}")
        for file in manifest.files:
            path = directory / file.name
            if path.parent != directory:
                raise SnapshotDamaged(f"{directory}: the manifest names {file.name!r}")
            status = _check_private(path, stat.S_ISREG, "file")
            if status.st_size != file.size_bytes:
                raise SnapshotDamaged(f"{path}: {status.st_size} bytes, not {file.size_bytes}")
            if digest_file(path) != file.digest:
                raise SnapshotDamaged(f"{path}: its content was altered")
        return directory

    def newest(self, slot: int, usable: Callable[[Manifest], bool]) -> Manifest | None:
        """The newest image of `slot` that is `usable`; None if there is none."""
        return next((m for m in self.manifests() if m.slot == slot and usable(m)), None)

    @contextmanager
    def draft(self, image_id: str) -> Iterator[Path]:
        """A directory to write an image into; gone on leaving unless it was published."""
        directory = self.root / f"{_PARTIAL}{image_id}"
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            directory.mkdir(mode=0o700)
        except OSError as exc:
            raise SnapshotError(f"{directory}: can't be made ({exc.strerror})") from exc
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def seal(self, draft: Path) -> tuple[ImageFile, ...]:
        """Make a draft's files private and durable; returns them with their digests."""
        files = []
        for path in sorted(draft.iterdir()):
            path.chmod(0o600)
            _sync(path)
            files.append(ImageFile(path.name, path.stat().st_size, digest_file(path)))
        return tuple(files)

    def publish(self, draft: Path, manifest: Manifest) -> None:
        """The image exists: manifest last, then one rename."""
        path = draft / MANIFEST_FILE
        path.write_bytes(encode(manifest))
        path.chmod(0o600)
        _sync(path)
        _sync(draft)
        draft.rename(self.root / manifest.image_id)
        _sync(self.root)

    def remove(self, image_id: str) -> None:
        """Delete an image, damaged or not. Raises SnapshotNotFound."""
        directory = self._path(image_id)
        if directory.is_symlink():
            directory.unlink()
            return
        # Under this name it is no image any more, should the deletion be cut short.
        doomed = self.root / f"{_PARTIAL}{image_id}"
        directory.rename(doomed)
        shutil.rmtree(doomed)

    def _path(self, image_id: str) -> Path:
        path = self.root / image_id
        if image_id.startswith(".") or path.parent != self.root or not os.path.lexists(path):
            raise SnapshotNotFound(f"no snapshot {image_id} in {self.root}")
        return path

    def _exists(self) -> bool:
        try:
            return self.root.exists()
        except OSError as exc:
            raise SnapshotError(f"catalog {self.root}: can't be read ({exc.strerror})") from exc

    def remove_partials(self) -> None:
        """Delete what unfinished dumps of dead processes left."""
        for path in self.root.glob(f"{_PARTIAL}*"):
            shutil.rmtree(path, ignore_errors=True)
