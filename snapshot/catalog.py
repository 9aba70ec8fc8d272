"""Images on disk: private, whole or absent, and checked before anything of them runs.

CATALOG/                 0700, ours
  .lock                         held for as long as names change
  slot2-20260801T101500-3f9a/   0700; one image: CRIU's files, manifest.json and manifest.sig. Its
                                readers hold a shared lock on it. Its time is that of its last use.
  .partial-.../                 an image being written or removed; never listed. Locked by its
                                writer: without a lock it is what a dead one left.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from dynamo_elastic.errors import (
    SnapshotDamaged,
    SnapshotError,
    SnapshotInUse,
    SnapshotNotFound,
)
from dynamo_elastic.failpoints import failpoint
from dynamo_elastic.snapshot.checks import (
    digest_file,
    file_findings,
    private_directory,
    read_manifest,
    read_signature,
)
from dynamo_elastic.snapshot.locks import Hold, locked_file
from dynamo_elastic.snapshot.manifest import MANIFEST_FILE, ImageFile, Manifest, encode, sealed
from dynamo_elastic.snapshot.signing import SIGNATURE_FILE, Trust, host_key, signed_by

_PARTIAL = ".partial-"
_LOCK_FILE = ".lock"
_LOCK_TIMEOUT_S = 10.0
_HOLD_TIMEOUT_S = 2.0
_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Draft:
    """A directory to write an image into. Owned by Catalog.draft()."""

    directory: Path
    hold: Hold


@contextmanager
def _storing(path: Path, act: str) -> Iterator[None]:
    """Failures of the file system (full, read-only, no rights) in one line that names the place."""
    try:
        yield
    except OSError as exc:
        raise SnapshotError(f"{path}: can't be {act} ({exc.strerror})") from exc


class Catalog:
    """The images of one host. A catalog that does not exist yet is empty; the first image makes it.
    Raises SnapshotDamaged if the directory is not private to us.

    `trust`: who may have signed what runs here; by default this host, with the key beside it."""

    def __init__(self, root: Path, trust: Trust | None = None) -> None:
        self.root = root.absolute()
        self.trust = trust or Trust(host_key(self.root), make=True)
        if self._exists():
            private_directory(self.root)

    def entries(self) -> dict[str, Manifest | SnapshotDamaged]:
        """Every image by id, newest first, then the damaged ones and what is wrong with them."""
        whole: list[Manifest] = []
        damaged: dict[str, SnapshotDamaged] = {}
        for name in sorted(p.name for p in self.root.iterdir()) if self._exists() else ():
            if name.startswith("."):
                continue
            try:
                whole.append(self.inspect(name))
            except SnapshotNotFound:
                continue
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
        with self._unless_gone(image_id):
            manifest = read_manifest(directory)
        if manifest.image_id != image_id:
            raise SnapshotDamaged(f"{directory}: holds the manifest of {manifest.image_id}")
        return manifest

    def directory(self, image_id: str) -> Path:
        """Where its files are. Raises SnapshotNotFound, or SnapshotDamaged if not private."""
        directory = self._path(image_id)
        with self._unless_gone(image_id):
            private_directory(directory)
        return directory

    def signed_by(self, image_id: str) -> str:
        """The key that its signature names, '' without one. Raises like inspect()."""
        directory = self.directory(image_id)
        with self._unless_gone(image_id):
            return signed_by(read_signature(directory), str(directory))

    def check_trust(self, image_id: str) -> None:
        """Return if somebody whom we trust has signed it. Raises SnapshotUntrusted, and what
        inspect() raises."""
        directory = self.directory(image_id)
        with self._unless_gone(image_id):
            signature = read_signature(directory)
        self.trust.check(encode(self.inspect(image_id)), signature, str(directory))

    def sign(self, image_id: str) -> None:
        """Sign an image, every byte checked, with our key. Raises what verify() raises but for the
        signature that it had."""
        manifest = self.inspect(image_id)
        with self.hold(image_id):
            directory = self._sound(manifest)
            signature = self.trust.sign(encode(manifest))
            partial = self.root / f"{_PARTIAL}{image_id}.sig"
            with _storing(partial, "written"):
                _write_private(partial, signature)
                partial.rename(directory / SIGNATURE_FILE)
                _sync(directory)

    def findings(self, image_id: str) -> tuple[str, ...]:
        """All that is wrong with an image, every byte read; () if nothing is. Raises
        SnapshotNotFound."""
        try:
            manifest = self.inspect(image_id)
            return tuple(file_findings(self.directory(image_id), manifest))
        except SnapshotDamaged as exc:
            return (str(exc),)

    def verify(self, manifest: Manifest) -> Path:
        """Somebody whom we trust has signed `manifest`, every byte is what it says, and nothing
        else is there; returns the directory. Raises SnapshotUntrusted, or SnapshotDamaged naming
        all that is wrong."""
        directory = self.directory(manifest.image_id)
        self.trust.check(encode(manifest), read_signature(directory), str(directory))
        return self._sound(manifest)

    def _sound(self, manifest: Manifest) -> Path:
        directory = self.directory(manifest.image_id)
        found = tuple(file_findings(directory, manifest))
        if found:
            raise SnapshotDamaged("; ".join(found))
        return directory

    def newest(self, slot: int, usable: Callable[[Manifest], bool]) -> Manifest | None:
        """The newest image of `slot` that is `usable`; None if there is none."""
        return next((m for m in self.manifests() if m.slot == slot and usable(m)), None)

    def hold(self, image_id: str) -> Hold:
        """A reference: the image stays until it is closed, or its holder dies. Raises
        SnapshotNotFound or SnapshotDamaged, or SnapshotInUse if it is being removed."""
        path = self.directory(image_id)
        deadline = time.monotonic() + _HOLD_TIMEOUT_S
        while True:
            try:
                hold = Hold.take(path, exclusive=False)
            except FileNotFoundError as exc:
                raise SnapshotNotFound(f"no snapshot {image_id} in {self.root}") from exc
            if hold is not None:
                return hold
            # Whoever removes it, or asks whether it is in use, is done in a moment.
            if time.monotonic() > deadline:
                raise SnapshotInUse(f"snapshot {image_id} is being removed")
            time.sleep(_POLL_S)

    def touch(self, image_id: str) -> None:
        """It was used now. A read-only catalog forgets that."""
        with suppress(OSError):
            os.utime(self.root / image_id)

    def last_used(self, image_id: str) -> float:
        """Seconds since the epoch: of its last use, or of its making."""
        return (self.root / image_id).lstat().st_mtime

    @contextmanager
    def draft(self, image_id: str) -> Iterator[Draft]:
        """A place to write an image into; gone on leaving unless it was published. Raises
        SnapshotError if the file system does not let us."""
        directory = self.root / f"{_PARTIAL}{image_id}"
        with _storing(self.root, "made"):
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._changing(), _storing(directory, "made"):
            self._clear_abandoned(directory)
            directory.mkdir(mode=0o700)
            hold = Hold.take(directory, exclusive=True)
        if hold is None:
            raise SnapshotInUse(f"{directory} is held by another process")
        with hold:
            try:
                yield Draft(directory, hold)
            finally:
                shutil.rmtree(directory, ignore_errors=True)

    def seal(self, draft: Draft) -> tuple[ImageFile, ...]:
        """Make a draft's files private and durable; returns them with their digests. Raises
        SnapshotError."""
        files = []
        with _storing(draft.directory, "written"):
            for path in sorted(draft.directory.iterdir()):
                path.chmod(0o600)
                _sync(path)
                files.append(ImageFile(path.name, path.stat().st_size, digest_file(path)))
        return tuple(files)

    def publish(self, draft: Draft, manifest: Manifest, *, signed: bool = True) -> Manifest:
        """The image exists: manifest last, then one rename; returns the manifest as it is stored.
        It is signed with our key, unless not `signed`: then it keeps the signature in the draft.
        Raises SnapshotError, and the image does not exist; or, if its name alone could not be made
        durable, is there and whole."""
        path = draft.directory / MANIFEST_FILE
        data = encode(manifest)
        failpoint("catalog.publish.begin")
        with _storing(path, "written"):
            if signed:
                _write_private(draft.directory / SIGNATURE_FILE, self.trust.sign(data))
            _write_private(path, data)
            failpoint("catalog.publish.manifest_written")
            _sync(draft.directory)
        final = self.root / manifest.image_id
        with self._changing(), _storing(final, "made"):
            if os.path.lexists(final):
                raise SnapshotError(f"{final} exists already")
            failpoint("catalog.publish.before_rename")
            # A reader may come as soon as it has its name.
            draft.hold.share()
            draft.directory.rename(final)
            failpoint("catalog.publish.renamed")
            _sync(self.root)
        return sealed(manifest)

    def remove(self, image_id: str) -> None:
        """Delete an image, damaged or not. Raises SnapshotNotFound; SnapshotInUse if somebody
        holds it, or SnapshotError, and it is still there."""
        directory = self._path(image_id)
        with self._changing():
            self._path(image_id)
            with _storing(directory, "removed"):
                if directory.is_symlink() or not directory.is_dir():
                    directory.unlink()
                    return
                hold = Hold.take(directory, exclusive=True)
            if hold is None:
                raise _in_use(image_id)
            with hold, _storing(directory, "removed"):
                # Under this name it is no image any more, should the deletion be cut short.
                doomed = self.root / f"{_PARTIAL}{image_id}"
                self._clear_abandoned(doomed)
                failpoint("catalog.remove.before_rename")
                directory.rename(doomed)
                failpoint("catalog.remove.renamed")
                shutil.rmtree(doomed)
                failpoint("catalog.remove.deleted")

    def check_unused(self, image_id: str) -> None:
        """Raises SnapshotInUse if remove() would, now."""
        with suppress(OSError):
            hold = Hold.take(self._path(image_id), exclusive=True)
            if hold is None:
                raise _in_use(image_id)
            hold.close()

    def partials(self) -> tuple[str, ...]:
        """Names of what dead writers left."""
        if not self._exists():
            return ()
        names = []
        with self._changing():
            for name, hold in self._abandoned():
                hold.close()
                names.append(name)
        return tuple(names)

    def remove_partials(self) -> None:
        """Delete what dumps and removals of dead processes left. Raises SnapshotError."""
        if not self._exists():
            return
        with self._changing():
            for name, hold in self._abandoned():
                with hold, _storing(self.root / name, "removed"):
                    failpoint("catalog.partials.before_removal")
                    shutil.rmtree(self.root / name)

    @staticmethod
    def _clear_abandoned(partial: Path) -> None:
        """A dead process may have left one of that name."""
        with suppress(FileNotFoundError):
            hold = Hold.take(partial, exclusive=True)
            if hold is not None:
                with hold:
                    shutil.rmtree(partial)

    def _abandoned(self) -> Iterator[tuple[str, Hold]]:
        for path in sorted(self.root.glob(f"{_PARTIAL}*")):
            try:
                hold = Hold.take(path, exclusive=True)
            except OSError:
                continue  # gone meanwhile, or nothing of our making
            if hold is not None:
                yield path.name, hold

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Alone among all processes that make or remove names."""
        try:
            with locked_file(self.root / _LOCK_FILE, timeout_s=_LOCK_TIMEOUT_S):
                yield
        except TimeoutError as exc:
            raise SnapshotInUse(f"catalog {self.root} is in use by another process") from exc
        except OSError as exc:
            raise SnapshotError(f"{self.root}: can't be changed ({exc.strerror})") from exc

    @contextmanager
    def _unless_gone(self, image_id: str) -> Iterator[None]:
        """An image that is removed while we look at it is not damaged."""
        try:
            yield
        except (SnapshotDamaged, FileNotFoundError):
            self._path(image_id)
            raise

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


def _in_use(image_id: str) -> SnapshotInUse:
    return SnapshotInUse(f"snapshot {image_id} is in use by an engine or a restore")


def _write_private(path: Path, data: bytes) -> None:
    """A file of ours alone, durable."""
    path.touch(mode=0o600)
    path.write_bytes(data)
    path.chmod(0o600)
    _sync(path)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
