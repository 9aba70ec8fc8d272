"""Archives: what is exported is imported; whatever else is in a file is refused."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from dynamo_elastic.errors import (
    SnapshotDamaged,
    SnapshotError,
    SnapshotMismatch,
    SnapshotNotFound,
)
from dynamo_elastic.snapshot.archive import export_image, import_image
from dynamo_elastic.snapshot.catalog import Catalog
from dynamo_elastic.snapshot.manifest import MANIFEST_FILE, Manifest
from dynamo_elastic.snapshot.signing import Trust, host_key
from dynamo_elastic.testing.snapshots import publish_image

Member = tuple[tarfile.TarInfo, bytes]


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    catalog = Catalog(tmp_path / "images")
    publish_image(catalog)
    target = tmp_path / "image.tar"
    export_image(catalog, "slot0-a", target)
    return target


@pytest.fixture
def other(tmp_path: Path) -> Catalog:
    """Of another host, that trusts the first one's key."""
    return Catalog(tmp_path / "other", Trust(host_key(tmp_path / "images")))


def test_image_moves(archive: Path, other: Catalog, tmp_path: Path) -> None:
    manifest = import_image(other, archive)
    assert manifest == Catalog(tmp_path / "images").inspect("slot0-a")
    assert other.findings("slot0-a") == ()
    assert archive.stat().st_mode & 0o777 == 0o600
    with pytest.raises(SnapshotError, match="exists already"):
        import_image(other, archive)
    assert other.partials() == ()


def test_export_checks_first_and_overwrites_nothing(archive: Path, tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "images")
    with pytest.raises(SnapshotError, match="can't be made"):
        export_image(catalog, "slot0-a", archive)
    with pytest.raises(SnapshotNotFound):
        export_image(catalog, "slot0-b", tmp_path / "b.tar")
    (catalog.root / "slot0-a" / "pages-1.img").write_bytes(b"x")
    with pytest.raises(SnapshotDamaged):
        export_image(catalog, "slot0-a", tmp_path / "c.tar")
    assert not (tmp_path / "b.tar").exists()
    assert not (tmp_path / "c.tar").exists()


def test_image_that_does_not_fit_is_refused_before_it_is_unpacked(
    archive: Path, other: Catalog
) -> None:
    def check(manifest: Manifest) -> None:
        raise SnapshotMismatch(manifest.image_id, ["kernel: the image has 6.1.0, here is 6.2"])

    with pytest.raises(SnapshotMismatch, match=r"here is 6\.2"):
        import_image(other, archive, check)
    assert not other.root.exists()


def read(archive: Path) -> list[Member]:
    with tarfile.open(archive) as file:
        return [(m, file.extractfile(m).read()) for m in file]  # type: ignore[union-attr]


def write(archive: Path, members: list[Member]) -> None:
    with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as file:
        for member, data in members:
            member.size = len(data)
            file.addfile(member, io.BytesIO(data))


def named(name: str, kind: bytes = tarfile.REGTYPE, data: bytes = b"x", link: str = "") -> Member:
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.uid = kind, link, os.geteuid()
    return member, data


def _first(*more: Member) -> Callable[[list[Member]], list[Member]]:
    return lambda members: [*more, *members]


def _last(*more: Member) -> Callable[[list[Member]], list[Member]]:
    return lambda members: [*members, *more]


def _owner(members: list[Member]) -> list[Member]:
    members[-1][0].uid = 65534
    return members


def _altered(members: list[Member]) -> list[Member]:
    return [(m, d[:-1] + b"!" if m.name.endswith("pages-1.img") else d) for m, d in members]


def _schema(members: list[Member]) -> list[Member]:
    manifest, data = members[0]
    return [(manifest, data.replace(b'"schema_version": 5', b'"schema_version": 9')), *members[1:]]


BAD: dict[str, Callable[[list[Member]], list[Member]]] = {
    "foreign path '/etc/passwd'": _first(named("/etc/passwd")),
    "foreign path '../x/manifest.json'": _first(named("../x/manifest.json")),
    "foreign path '/manifest.json'": lambda _: [named("/manifest.json")],
    "foreign path 'slot0-a/../x'": _last(named("slot0-a/../x")),
    "foreign path 'slot0-a/sub/x'": _last(named("slot0-a/sub/x")),
    "foreign path 'slot0-a/.hidden'": _last(named("slot0-a/.hidden")),
    "foreign path 'slot0-b/x'": _last(named("slot0-b/x")),
    "pages-9.img is not a plain file": _last(
        named("slot0-a/pages-9.img", tarfile.SYMTYPE, b"", "/etc/shadow")
    ),
    "hard is not a plain file": _last(
        named("slot0-a/hard", tarfile.LNKTYPE, b"", "slot0-a/pages-1.img")
    ),
    "fifo is not a plain file": _last(named("slot0-a/fifo", tarfile.FIFOTYPE, b"")),
    "core-1.img is there twice": _last(named("slot0-a/core-1.img", data=b"")),
    "is not what the manifest says": _last(named("slot0-a/extra")),
    "is owned by uid 65534": _owner,
    "its content was altered": _altered,
    "can't be read": lambda members: members[:-1],
    "does not begin with the manifest": lambda members: members[::-1],
    "schema 9, this version reads 4 to 5: upgrade": _schema,
}


@pytest.mark.parametrize("reason", BAD)
def test_anything_else_is_refused(archive: Path, other: Catalog, reason: str) -> None:
    write(archive, BAD[reason](read(archive)))
    with pytest.raises(SnapshotDamaged) as caught:
        import_image(other, archive)
    assert reason in str(caught.value)
    assert other.entries() == {}
    assert other.partials() == ()


@pytest.mark.parametrize("part", [0.0, 0.3, 0.7])
def test_archive_that_is_cut_short(archive: Path, other: Catalog, part: float) -> None:
    data = archive.read_bytes()
    archive.write_bytes(data[: int(len(data) * part)])
    with pytest.raises(SnapshotDamaged):
        import_image(other, archive)
    assert other.entries() == {}


def test_archive_that_others_may_write(archive: Path, other: Catalog) -> None:
    archive.chmod(0o620)
    with pytest.raises(SnapshotDamaged, match="0620 lets others write"):
        import_image(other, archive)


def test_archive_behind_a_link(archive: Path, other: Catalog, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(archive)
    with pytest.raises(SnapshotError, match="can't be read"):
        import_image(other, tmp_path / "link")
    with pytest.raises(SnapshotDamaged, match="not a plain file"):
        import_image(other, tmp_path)


@pytest.mark.root
def test_archive_of_somebody_else(archive: Path, other: Catalog) -> None:
    os.chown(archive, 65534, -1)
    with pytest.raises(SnapshotDamaged, match="owned by uid 65534"):
        import_image(other, archive)


def test_manifest_comes_first(archive: Path) -> None:
    assert read(archive)[0][0].name == f"slot0-a/{MANIFEST_FILE}"
