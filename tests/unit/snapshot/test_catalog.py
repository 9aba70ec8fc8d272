"""Catalog: images are whole or absent, private, and every planted damage is found and named."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3

from dynamo_elastic.errors import SnapshotDamaged, SnapshotError, SnapshotInUse, SnapshotNotFound
from dynamo_elastic.snapshot.catalog import Catalog
from dynamo_elastic.snapshot.checks import digest_file
from dynamo_elastic.snapshot.locks import locked_file
from dynamo_elastic.snapshot.manifest import MANIFEST_FILE, Manifest, encode
from dynamo_elastic.snapshot.signing import SIGNATURE_FILE
from dynamo_elastic.testing.snapshots import FINGERPRINT
from dynamo_elastic.testing.snapshots import publish_image as make


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    return Catalog(tmp_path / "images")


def test_published_image_is_read_back(catalog: Catalog) -> None:
    manifest = make(catalog)
    assert catalog.inspect("slot0-a") == manifest
    assert manifest.pages_bytes == manifest.size_bytes == 256 * 64
    directory = catalog.verify(manifest)
    modes = {p.name: p.stat().st_mode & 0o777 for p in directory.iterdir()}
    names = ("pages-1.img", "core-1.img", MANIFEST_FILE, SIGNATURE_FILE)
    assert modes == dict.fromkeys(names, 0o600)
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


def _second_name(directory: Path) -> None:
    os.link(directory / "pages-1.img", directory.parent.parent / "second")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "has 2 names": _second_name,
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
    stealing = replace(manifest, files=(*manifest.files, stolen))
    directory = catalog.root / "slot0-a"
    (directory / SIGNATURE_FILE).write_bytes(catalog.trust.sign(encode(stealing)))
    with pytest.raises(SnapshotDamaged, match="names"):
        catalog.verify(stealing)


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
    assert digest_file(tmp_path / "empty") == blake3(b"").hexdigest()


def test_digest_tells_every_byte_and_their_order(tmp_path: Path) -> None:
    path = tmp_path / "pages-1.img"

    def digest(data: bytes) -> str:
        path.write_bytes(data)
        return digest_file(path)

    good = b"aaaaaaaabbbbbbbbccc"
    others = [
        b"bbbbbbbbaaaaaaaaccc",
        b"aaaaaaaabbbbbbbb",
        b"aaaaaaaabbbbbbbbcc",
        good + b"c",
        *(good[:i] + b"x" + good[i + 1 :] for i in range(len(good))),
    ]
    assert len({digest(data) for data in (good, *others)}) == 1 + len(others)
    assert digest(good) == digest(bytes(good))


def test_every_byte_of_the_manifest_counts(catalog: Catalog) -> None:
    make(catalog)
    path = catalog.root / "slot0-a" / MANIFEST_FILE
    good = path.read_bytes()
    for bad in (
        good.replace(b'"created_at": "1"', b'"created_at": "2"'),
        good.replace(b"\n}", b"\n }"),
        good.replace(b'"root_pid": 1000', b'"root_pid": 1001'),
    ):
        assert bad != good
        path.write_bytes(bad)
        with pytest.raises(SnapshotDamaged, match="content was altered"):
            catalog.inspect("slot0-a")


def test_other_schema_is_named(catalog: Catalog) -> None:
    make(catalog)
    path = catalog.root / "slot0-a" / MANIFEST_FILE
    path.write_bytes(path.read_bytes().replace(b'"schema_version": 5', b'"schema_version": 1'))
    with pytest.raises(SnapshotDamaged, match="schema 1, this version reads 4 to 5"):
        catalog.inspect("slot0-a")


def test_all_findings_come_at_once(catalog: Catalog) -> None:
    make(catalog)
    directory = catalog.root / "slot0-a"
    _flip(directory)
    (directory / "extra").touch()
    assert len(catalog.findings("slot0-a")) == 2
    with pytest.raises(SnapshotNotFound):
        catalog.findings("slot0-b")


def test_image_in_use_is_not_removed(catalog: Catalog) -> None:
    make(catalog)
    with catalog.hold("slot0-a"), catalog.hold("slot0-a"):
        with pytest.raises(SnapshotInUse, match="slot0-a is in use"):
            catalog.remove("slot0-a")
        assert "slot0-a" in catalog.entries()
    catalog.remove("slot0-a")
    with pytest.raises(SnapshotNotFound):
        catalog.hold("slot0-a")


def test_draft_of_a_living_writer_is_left_alone(catalog: Catalog) -> None:
    with catalog.draft("slot0-z") as draft:
        catalog.remove_partials()
        assert catalog.partials() == ()
        assert draft.directory.exists()


def test_reader_never_meets_a_writer_on_a_published_image(catalog: Catalog) -> None:
    with catalog.draft("slot0-a") as draft:
        manifest = Manifest("slot0-a", 0, "1", 1000, FINGERPRINT, catalog.seal(draft))
        catalog.publish(draft, manifest)
        with catalog.hold("slot0-a"):
            pass


def test_image_of_that_name_is_not_overwritten(catalog: Catalog) -> None:
    make(catalog, at="1")
    with pytest.raises(SnapshotError, match="exists already"):
        make(catalog, at="2")
    assert catalog.inspect("slot0-a").created_at == "1"
    assert catalog.partials() == ()


def test_catalog_that_is_changed_for_ever_by_another(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(catalog)
    monkeypatch.setattr("dynamo_elastic.snapshot.catalog._LOCK_TIMEOUT_S", 0.05)
    with locked_file(catalog.root / ".lock", timeout_s=0):
        with pytest.raises(SnapshotInUse, match="in use by another process"):
            catalog.remove("slot0-a")
        assert len(catalog.entries()) == 1
    catalog.remove("slot0-a")


def test_many_at_once_leave_whole_images(catalog: Catalog) -> None:
    """Writers, a pruner of leftovers and readers, all without knowledge of each other."""

    def write(number: int) -> None:
        for turn in range(6):
            own = Catalog(catalog.root)
            make(own, f"slot{number}-{turn}", slot=number)
            if turn % 2:
                own.remove(f"slot{number}-{turn}")

    def look(_: int) -> None:
        for _turn in range(10):
            own = Catalog(catalog.root)
            own.remove_partials()
            for image_id, entry in own.entries().items():
                assert isinstance(entry, Manifest), entry
                with suppress(SnapshotNotFound), own.hold(image_id):
                    assert own.findings(image_id) == ()

    with ThreadPoolExecutor(6) as pool:
        jobs = [pool.submit(write, n) for n in range(3)] + [pool.submit(look, n) for n in range(3)]
        for job in jobs:
            job.result(timeout=60)
    assert set(catalog.entries()) == {f"slot{n}-{t}" for n in range(3) for t in (0, 2, 4)}
    assert catalog.partials() == ()
