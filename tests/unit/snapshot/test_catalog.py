"""Catalog: images are whole or absent, private, and every planted damage is found and named."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dynamo_elastic.errors import SnapshotDamaged, SnapshotError, SnapshotNotFound
from dynamo_elastic.snapshot.catalog import Catalog
from dynamo_elastic.snapshot.checks import digest_file
from dynamo_elastic.snapshot.manifest import MANIFEST_FILE, Manifest
from dynamo_elastic.testing.snapshots import FINGERPRINT


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    return Catalog(tmp_path / "images")


def make(catalog: Catalog, image_id: str = "slot0-a", *, slot: int = 0, at: str = "1") -> Manifest:
    with catalog.draft(image_id) as draft:
        (draft.directory / "pages-1.img").write_bytes(bytes(range(256)) * 64)
        (draft.directory / "core-1.img").write_bytes(b"")
        manifest = Manifest(
            image_id=image_id,
            slot=slot,
            created_at=at,
            root_pid=1000,
            fingerprint=replace(FINGERPRINT, slot=slot),
            files=catalog.seal(draft),
        )
        return catalog.publish(draft, manifest)


def test_published_image_is_read_back(catalog: Catalog) -> None:
    manifest = make(catalog)
    assert catalog.inspect("slot0-a") == manifest
    assert manifest.pages_bytes == manifest.size_bytes == 256 * 64
    directory = catalog.verify(manifest)
    modes = {p.name: p.stat().st_mode & 0o777 for p in directory.iterdir()}
    assert modes == {"pages-1.img": 0o600, "core-1.img": 0o600, MANIFEST_FILE: 0o600}
    assert directory.stat().st_mode & 0o777 == 0o700


def test_newest_usable_image_of_a_slot(catalog: Catalog) -> None:
    make(catalog, "slot0-b", at="2")
    make(catalog, "slot0-a", at="3")
    make(catalog, "slot1-a", slot=1, at="4")
    assert [m.image_id for m in catalog.entries().values() if isinstance(m, Manifest)] == [
        "slot1-a",
        "slot0-a",
        "slot0-b",
    ]
    newest = catalog.newest(0, lambda _: True)
    assert newest is not None
    assert newest.image_id == "slot0-a"
    older = catalog.newest(0, lambda m: m.image_id != "slot0-a")
    assert older is not None
    assert older.image_id == "slot0-b"
    assert catalog.newest(2, lambda _: True) is None


def test_missing_catalog_is_empty_and_not_made_by_looking(tmp_path: Path) -> None:
    assert Catalog(tmp_path / "none").entries() == {}
    assert not (tmp_path / "none").exists()


def test_unfinished_image_is_never_listed(catalog: Catalog) -> None:
    make(catalog)
    with catalog.draft("slot0-z") as draft:
        (draft.directory / "pages-1.img").write_bytes(b"half")
        assert list(catalog.entries()) == ["slot0-a"]
        with pytest.raises(SnapshotNotFound):
            catalog.inspect(draft.directory.name)
    assert not draft.directory.exists()


def test_what_a_killed_dump_left_is_removed(catalog: Catalog) -> None:
    make(catalog)
    (catalog.root / ".partial-slot0-z").mkdir(mode=0o700)
    catalog.remove_partials()
    assert {p.name for p in catalog.root.iterdir()} == {"slot0-a", ".lock"}


def _flip(directory: Path) -> None:
    path = directory / "pages-1.img"
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)


def _link_file(directory: Path) -> None:
    path = directory / "core-1.img"
    path.rename(directory.parent / "elsewhere")
    path.symlink_to(directory.parent / "elsewhere")


def _link_directory(directory: Path) -> None:
    moved = directory.parent.parent / "moved"
    directory.rename(moved)
    directory.symlink_to(moved)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "content was altered": _flip,
    "can't be read": lambda d: (d / "core-1.img").unlink(),
    "bytes, not": lambda d: (d / "core-1.img").write_bytes(b"x"),
    "unknown files extra": lambda d: (d / "extra").write_bytes(b""),
    "mode 0640": lambda d: (d / "pages-1.img").chmod(0o640),
    "mode 0755": lambda d: d.chmod(0o755),
    "not a plain file": _link_file,
    "not a plain directory": _link_directory,
}


@pytest.mark.parametrize("reason", DAMAGES)
def test_damage_is_found_and_named(catalog: Catalog, reason: str) -> None:
    manifest = make(catalog)
    DAMAGES[reason](catalog.root / "slot0-a")
    with pytest.raises(SnapshotDamaged, match=reason):
        catalog.verify(manifest)


@pytest.mark.root
@pytest.mark.parametrize("name", ["", "pages-1.img", MANIFEST_FILE])
def test_foreign_owner_is_found(catalog: Catalog, name: str) -> None:
    make(catalog)
    os.chown(catalog.root / "slot0-a" / name, 65534, -1)
    with pytest.raises(SnapshotDamaged, match="owned by uid 65534"):
        catalog.verify(catalog.inspect("slot0-a"))


def test_catalog_that_others_may_enter_is_refused(catalog: Catalog) -> None:
    make(catalog)
    catalog.root.chmod(0o755)
    with pytest.raises(SnapshotDamaged, match="0755"):
        Catalog(catalog.root)


def test_linked_catalog_is_refused(catalog: Catalog, tmp_path: Path) -> None:
    make(catalog)
    (tmp_path / "link").symlink_to(catalog.root)
    with pytest.raises(SnapshotDamaged, match="not a plain directory"):
        Catalog(tmp_path / "link")


@pytest.mark.parametrize("text", ["", "{}", '{"image_id": 3}', "\x00"])
def test_manifest_that_is_none_is_damage(catalog: Catalog, text: str) -> None:
    make(catalog)
    make(catalog, "slot0-good", at="0")
    (catalog.root / "slot0-a" / MANIFEST_FILE).write_text(text)
    with pytest.raises(SnapshotDamaged, match="not a manifest"):
        catalog.inspect("slot0-a")
    assert isinstance(catalog.entries()["slot0-a"], SnapshotDamaged)
    newest = catalog.newest(0, lambda _: True)
    assert newest is not None
    assert newest.image_id == "slot0-good"


def test_manifest_of_another_image_is_damage(catalog: Catalog) -> None:
    make(catalog)
    make(catalog, "slot0-b")
    other = (catalog.root / "slot0-b" / MANIFEST_FILE).read_bytes()
    (catalog.root / "slot0-a" / MANIFEST_FILE).write_bytes(other)
    with pytest.raises(SnapshotDamaged, match="manifest of slot0-b"):
        catalog.inspect("slot0-a")


def test_manifest_that_points_outside_is_damage(catalog: Catalog) -> None:
    manifest = make(catalog)
    outside = catalog.root.parent / "secret"
    outside.write_bytes(b"x")
    stolen = replace(manifest.files[0], name="../../secret")
    with pytest.raises(SnapshotDamaged, match="names"):
        catalog.verify(replace(manifest, files=(*manifest.files, stolen)))


@pytest.mark.parametrize("image_id", ["", ".", "..", "../images/slot0-a", "none", ".partial-x"])
def test_ids_that_name_no_image(catalog: Catalog, image_id: str) -> None:
    make(catalog)
    with pytest.raises(SnapshotNotFound):
        catalog.inspect(image_id)
    with pytest.raises(SnapshotNotFound):
        catalog.remove(image_id)


def test_remove_deletes_damaged_images_and_only_links(catalog: Catalog) -> None:
    make(catalog)
    (catalog.root / "slot0-a" / MANIFEST_FILE).write_text("")
    make(catalog, "slot0-b")
    _link_directory(catalog.root / "slot0-b")
    catalog.remove("slot0-a")
    catalog.remove("slot0-b")
    assert [p.name for p in catalog.root.iterdir()] == [".lock"]
    assert (catalog.root.parent / "moved" / MANIFEST_FILE).exists()


def test_catalog_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SnapshotError, match="can't be made"):
        make(Catalog(tmp_path / "file" / "images"))


def test_digest_of_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    assert digest_file(tmp_path / "empty") == "99aa06d3014798d86001c324468d497f"
