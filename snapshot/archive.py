"""Moving an image: one tar file, the manifest first, every byte checked on arrival."""

from __future__ import annotations

import itertools
import os
import shutil
import stat
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from dynamo_elastic.errors import SnapshotDamaged, SnapshotError
from dynamo_elastic.failpoints import failpoint
from dynamo_elastic.snapshot.catalog import Catalog
from dynamo_elastic.snapshot.checks import file_findings
from dynamo_elastic.snapshot.manifest import MANIFEST_FILE, Manifest, decode
from dynamo_elastic.snapshot.signing import SIGNATURE_FILE

_WRITABLE_BY_OTHERS = 0o022
_MAX_MANIFEST_BYTES = 4 << 20


def export_image(catalog: Catalog, image_id: str, target: Path) -> Manifest:
    """The image, every byte checked, is in `target` (mode 0600), which did not exist. Raises
    SnapshotNotFound, SnapshotDamaged or SnapshotError; then `target` is not there."""
    manifest = catalog.inspect(image_id)
    with catalog.hold(image_id), _created(target) as file:
        directory = catalog.verify(manifest)
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
            signature = (SIGNATURE_FILE,) if catalog.signed_by(image_id) else ()
            for name in (MANIFEST_FILE, *signature, *(f.name for f in manifest.files)):
                failpoint("catalog.export.before_file")
                archive.add(directory / name, f"{image_id}/{name}", recursive=False)
    return manifest


@contextmanager
def _created(target: Path) -> Iterator[IO[bytes]]:
    """A new file that is durable, or gone again."""
    try:
        file = os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
    except OSError as exc:
        raise SnapshotError(f"{target}: can't be made ({exc.strerror})") from exc
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except BaseException as exc:
        target.unlink(missing_ok=True)
        if isinstance(exc, OSError):
            raise SnapshotError(f"{target}: can't be written ({exc.strerror})") from exc
        raise


def import_image(
    catalog: Catalog, source: Path, check: Callable[[Manifest], None] = lambda _: None
) -> Manifest:
    """The image in `source` is in the catalog, every byte checked, with the signature that it has:
    that must be of somebody whom the catalog trusts. `check` sees its manifest first and may refuse
    it by raising.

    Raises SnapshotDamaged if the file is not ours alone to write, or holds anything but one whole
    image of plain files; SnapshotUntrusted; SnapshotError if the image exists already or the disk
    does not take it. Then the catalog is as it was.
    """
    with _opened(source) as archive:
        members = _members(archive, source)
        image_id, first = next(members, ("", None))
        if first is None or first.name != f"{image_id}/{MANIFEST_FILE}":
            raise SnapshotDamaged(f"{source}: does not begin with the manifest of an image")
        data = _read(archive, first, source)
        manifest = decode(data, f"{source}: {first.name}")
        if manifest.image_id != image_id:
            raise SnapshotDamaged(f"{source}: holds the manifest of {manifest.image_id}")
        check(manifest)
        signature, members = _signature(archive, members, source)
        catalog.trust.check(data, signature, str(source))
        with catalog.draft(image_id) as draft:
            _extract(archive, members, manifest, draft.directory, source)
            if signature is not None:
                (draft.directory / SIGNATURE_FILE).write_bytes(signature)
            failpoint("catalog.import.extracted")
            catalog.seal(draft)
            found = tuple(file_findings(draft.directory, manifest))
            if found:
                raise SnapshotDamaged(f"{source}: {'; '.join(found)}")
            return catalog.publish(draft, manifest, signed=False)


@contextmanager
def _opened(source: Path) -> Iterator[tarfile.TarFile]:
    try:
        fd = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as exc:
        raise SnapshotError(f"{source}: can't be read ({exc.strerror})") from exc
    try:
        _check_source(os.fstat(fd), source)
        with (
            os.fdopen(fd, "rb", closefd=False) as file,
            tarfile.open(fileobj=file, mode="r:") as archive,
        ):
            yield archive
    except tarfile.TarError as exc:
        raise SnapshotDamaged(f"{source}: not a whole archive ({exc})") from exc
    finally:
        os.close(fd)


def _check_source(status: os.stat_result, source: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise SnapshotDamaged(f"{source}: is not a plain file")
    if status.st_uid != os.geteuid():
        raise SnapshotDamaged(f"{source}: is owned by uid {status.st_uid}, not by us")
    if status.st_mode & _WRITABLE_BY_OTHERS:
        mode = stat.S_IMODE(status.st_mode)
        raise SnapshotDamaged(f"{source}: mode {mode:04o} lets others write; chmod go-w it")


def _members(archive: tarfile.TarFile, source: Path) -> Iterator[tuple[str, tarfile.TarInfo]]:
    """(image id, member): plain files of ours in one folder, each once. Raises SnapshotDamaged."""
    only_id = ""
    seen: set[str] = set()
    for member in archive:
        image_id, _, name = member.name.partition("/")
        only_id = only_id or image_id
        if image_id != only_id or not (_is_plain_name(image_id) and _is_plain_name(name)):
            raise SnapshotDamaged(f"{source}: foreign path {member.name!r}")
        if not member.isreg():
            raise SnapshotDamaged(f"{source}: {member.name} is not a plain file")
        if member.uid != os.geteuid():
            raise SnapshotDamaged(f"{source}: {member.name} is owned by uid {member.uid}")
        if name in seen:
            raise SnapshotDamaged(f"{source}: {member.name} is there twice")
        seen.add(name)
        yield image_id, member


def _is_plain_name(name: str) -> bool:
    return name != "" and not name.startswith(".") and "/" not in name and "\0" not in name


def _read(archive: tarfile.TarFile, member: tarfile.TarInfo, source: Path) -> bytes:
    if member.size > _MAX_MANIFEST_BYTES:
        raise SnapshotDamaged(f"{source}: {member.name} is too large for a manifest")
    file = archive.extractfile(member)
    return file.read() if file is not None else b""


def _signature(
    archive: tarfile.TarFile, members: Iterator[tuple[str, tarfile.TarInfo]], source: Path
) -> tuple[bytes | None, Iterator[tuple[str, tarfile.TarInfo]]]:
    """What comes after the manifest, if that is its signature, and the members after it."""
    following = next(members, None)
    if following is None:
        return None, members
    image_id, member = following
    if member.name != f"{image_id}/{SIGNATURE_FILE}":
        return None, itertools.chain([following], members)
    return _read(archive, member, source), members


def _extract(
    archive: tarfile.TarFile,
    members: Iterator[tuple[str, tarfile.TarInfo]],
    manifest: Manifest,
    directory: Path,
    source: Path,
) -> None:
    """Write the members that the manifest names, and no more bytes than it says."""
    sizes = {file.name: file.size_bytes for file in manifest.files}
    for image_id, member in members:
        name = member.name.removeprefix(f"{image_id}/")
        if sizes.get(name) != member.size:
            raise SnapshotDamaged(f"{source}: {member.name} is not what the manifest says")
        content = archive.extractfile(member)
        if content is None:
            raise SnapshotDamaged(f"{source}: {member.name} is not a plain file")
        failpoint("catalog.import.before_file")
        path = directory / name
        try:
            with path.open("xb") as file:
                shutil.copyfileobj(content, file, 1 << 20)
        except OSError as exc:
            raise SnapshotError(f"{path}: can't be written ({exc.strerror})") from exc
