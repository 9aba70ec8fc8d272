"""Images are run only as somebody whom this host trusts has signed them."""

from __future__ import annotations

import json
import shutil
import stat
import tarfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from dynamo_elastic.errors import ConfigError, SnapshotDamaged, SnapshotUntrusted
from dynamo_elastic.snapshot.archive import export_image, import_image
from dynamo_elastic.snapshot.catalog import Catalog
from dynamo_elastic.snapshot.checks import digest_file
from dynamo_elastic.snapshot.manifest import MANIFEST_FILE, ImageFile, encode
from dynamo_elastic.snapshot.signing import SIGNATURE_FILE, Trust, make_key
from dynamo_elastic.testing.snapshots import publish_image

IMAGE = "slot0-a"


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    """With one image, signed by its host."""
    catalog = Catalog(tmp_path / "images")
    publish_image(catalog)
    return catalog


def key(directory: Path, name: str) -> tuple[Path, Path]:
    """A key of somebody else: private and public."""
    path = directory / name
    make_key(path)
    return path, path.with_name(f"{name}.pub")


def verify(catalog: Catalog, image_id: str = IMAGE) -> None:
    catalog.verify(catalog.inspect(image_id))


def test_what_a_host_makes_it_signs_and_runs(catalog: Catalog) -> None:
    verify(catalog)
    catalog.check_trust(IMAGE)
    private = catalog.root.with_name("images.key")
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert stat.S_IMODE((catalog.root / IMAGE / SIGNATURE_FILE).stat().st_mode) == 0o600
    body = json.loads((catalog.root / IMAGE / SIGNATURE_FILE).read_bytes())
    assert catalog.signed_by(IMAGE) == body["key"] != ""


def test_of_all_who_make_a_key_one_does(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "k"
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: make_key(path), range(32)))
    signature = Trust(path).sign(b"x")
    assert Trust(tmp_path / "none", trusted_keys=(path.with_name("k.pub"),)).check(
        b"x", signature, "it"
    )
    assert sorted(p.name for p in path.parent.iterdir()) == ["k", "k.pub"]


def _unsigned(directory: Path) -> None:
    (directory / SIGNATURE_FILE).unlink()


def _empty(directory: Path) -> None:
    (directory / SIGNATURE_FILE).write_bytes(b"")


def _other_bytes(directory: Path) -> None:
    body = json.loads((directory / SIGNATURE_FILE).read_bytes())
    body["signature"] = ("A" if body["signature"][0] != "A" else "B") + body["signature"][1:]
    (directory / SIGNATURE_FILE).write_text(json.dumps(body))


def _no_base64(directory: Path) -> None:
    body = json.loads((directory / SIGNATURE_FILE).read_bytes())
    (directory / SIGNATURE_FILE).write_text(json.dumps({**body, "signature": "***"}))


def _newer(directory: Path) -> None:
    body = json.loads((directory / SIGNATURE_FILE).read_bytes())
    (directory / SIGNATURE_FILE).write_text(json.dumps({**body, "schema_version": 2}))


def _strangers(directory: Path) -> None:
    stranger = directory.parents[1] / "stranger"
    make_key(stranger)
    signature = Trust(stranger).sign((directory / MANIFEST_FILE).read_bytes())
    (directory / SIGNATURE_FILE).write_bytes(signature)


def _stranger_named_as_ours(directory: Path) -> None:
    ours = json.loads((directory / SIGNATURE_FILE).read_bytes())["key"]
    _strangers(directory)
    body = json.loads((directory / SIGNATURE_FILE).read_bytes())
    (directory / SIGNATURE_FILE).write_text(json.dumps({**body, "key": ours}))


BAD: dict[str, Callable[[Path], None]] = {
    "is not signed": _unsigned,
    "can't be read": _empty,
    "did not sign this": _other_bytes,
    "its signature can't be read": _no_base64,
    "signature of version 2, this program reads 1": _newer,
    "not trusted here; name its maker's public key in snapshot.trusted_keys": _strangers,
    "did not sign this; name": _stranger_named_as_ours,
}


@pytest.mark.parametrize("says", BAD)
def test_any_other_signature_is_refused(catalog: Catalog, says: str) -> None:
    BAD[says](catalog.root / IMAGE)
    for act in (verify, lambda c: c.check_trust(IMAGE)):
        with pytest.raises(SnapshotUntrusted) as caught:
            act(catalog)
        assert says in str(caught.value)
    assert catalog.findings(IMAGE) == (), "it is whole, and may be signed"


def test_every_file_is_under_the_signature(catalog: Catalog) -> None:
    """Other bytes, with a manifest that has their digest: what CRIU would run is not what was
    signed."""
    directory, manifest = catalog.root / IMAGE, catalog.inspect(IMAGE)
    for file in manifest.files:
        (directory / file.name).write_bytes(b"evil")
        forged = replace(manifest, files=as_they_are(directory, manifest.files))
        (directory / MANIFEST_FILE).write_bytes(encode(forged))
        assert catalog.findings(IMAGE) == ()
        with pytest.raises(SnapshotUntrusted, match="did not sign this"):
            verify(catalog)
        with pytest.raises(SnapshotDamaged):
            catalog.verify(manifest)  # the signed one, over those files


def as_they_are(directory: Path, files: Sequence[ImageFile]) -> tuple[ImageFile, ...]:
    """`files` with size and digest of now."""
    return tuple(
        replace(
            f,
            size_bytes=(directory / f.name).stat().st_size,
            digest=digest_file(directory / f.name),
        )
        for f in files
    )


def test_a_signed_manifest_is_no_other_images(catalog: Catalog) -> None:
    """Neither under another name, nor over the files of another image."""
    shutil.copytree(catalog.root / IMAGE, catalog.root / "slot1-b")
    with pytest.raises(SnapshotDamaged, match="holds the manifest of slot0-a"):
        catalog.inspect("slot1-b")
    publish_image(catalog, "slot0-c", size_bytes=512)
    for name in (MANIFEST_FILE, SIGNATURE_FILE):
        shutil.copy(catalog.root / IMAGE / name, catalog.root / "slot0-c" / name)
    with pytest.raises(SnapshotDamaged, match="holds the manifest of slot0-a"):
        catalog.inspect("slot0-c")
    shutil.copy(catalog.root / "slot0-c" / "pages-1.img", catalog.root / IMAGE / "pages-1.img")
    with pytest.raises(SnapshotDamaged):
        verify(catalog)


def test_a_signature_is_of_one_manifest(catalog: Catalog) -> None:
    publish_image(catalog, "slot0-c")
    shutil.copy(catalog.root / "slot0-c" / SIGNATURE_FILE, catalog.root / IMAGE / SIGNATURE_FILE)
    with pytest.raises(SnapshotUntrusted, match="did not sign this"):
        verify(catalog)


def test_unsigned_images_run_where_that_is_asked_for(catalog: Catalog) -> None:
    signature = (catalog.root / IMAGE / SIGNATURE_FILE).read_bytes()
    _unsigned(catalog.root / IMAGE)
    lax = Catalog(catalog.root, replace(catalog.trust, allow_unsigned=True))
    verify(lax)
    (catalog.root / IMAGE / SIGNATURE_FILE).touch(mode=0o600)
    (catalog.root / IMAGE / SIGNATURE_FILE).write_bytes(signature)
    _strangers(catalog.root / IMAGE)
    with pytest.raises(SnapshotUntrusted, match="not trusted here"):
        verify(lax)


def test_keys_rotate(catalog: Catalog, tmp_path: Path) -> None:
    """The new key is trusted, then used, then the old one is not trusted any more."""
    old, old_public = tmp_path / "images.key", tmp_path / "images.key.pub"
    new, new_public = key(tmp_path, "new")
    publish_image(catalog, "slot0-old")
    both = Catalog(catalog.root, Trust(new, trusted_keys=(old_public, new_public)))
    publish_image(both, "slot0-new")
    for image in ("slot0-old", "slot0-new"):
        verify(both, image)
    late = Catalog(catalog.root, Trust(new))
    verify(late, "slot0-new")
    with pytest.raises(SnapshotUntrusted):
        verify(late, "slot0-old")
    both.sign("slot0-old")
    verify(late, "slot0-old")
    assert both.signed_by("slot0-old") == both.signed_by("slot0-new")
    assert old.exists()


def test_a_damaged_image_is_not_signed(catalog: Catalog) -> None:
    _unsigned(catalog.root / IMAGE)
    (catalog.root / IMAGE / "pages-1.img").write_bytes(b"x")
    with pytest.raises(SnapshotDamaged):
        catalog.sign(IMAGE)
    assert catalog.signed_by(IMAGE) == ""


def test_a_foreign_image_comes_in_with_its_signature_or_not_at_all(
    catalog: Catalog, tmp_path: Path
) -> None:
    archive = tmp_path / "image.tar"
    export_image(catalog, IMAGE, archive)
    stranger = Catalog(tmp_path / "elsewhere")
    with pytest.raises(SnapshotUntrusted, match="not trusted here"):
        import_image(stranger, archive)
    assert stranger.entries() == {}
    public = catalog.root.with_name("images.key.pub")
    friend = Catalog(tmp_path / "friend", Trust(tmp_path / "none", trusted_keys=(public,)))
    import_image(friend, archive)
    verify(friend)
    assert friend.signed_by(IMAGE) == catalog.signed_by(IMAGE)


def test_an_unsigned_image_is_not_signed_by_being_imported(
    catalog: Catalog, tmp_path: Path
) -> None:
    archive, unsigned = tmp_path / "image.tar", tmp_path / "unsigned.tar"
    export_image(catalog, IMAGE, archive)
    with tarfile.open(archive) as source, tarfile.open(unsigned, "w") as target:
        for member in source:
            if not member.name.endswith(SIGNATURE_FILE):
                target.addfile(member, source.extractfile(member))
    strict = Catalog(tmp_path / "strict")
    with pytest.raises(SnapshotUntrusted, match="is not signed"):
        import_image(strict, unsigned)
    lax = Catalog(tmp_path / "lax", Trust(tmp_path / "k", make=True, allow_unsigned=True))
    import_image(lax, unsigned)
    assert lax.signed_by(IMAGE) == ""
    with pytest.raises(SnapshotUntrusted):
        verify(Catalog(lax.root, replace(lax.trust, allow_unsigned=False)))


def test_keys_that_can_not_be_used_are_named_at_the_start(tmp_path: Path) -> None:
    private, public = key(tmp_path, "k")
    Trust(private, trusted_keys=(public,)).check_keys()
    pem = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
    )
    other, text = tmp_path / "ec.key", tmp_path / "text"
    for path, data in ((other, pem), (text, b"no key")):
        path.touch(mode=0o600)
        path.write_bytes(data)
    for bad, says in (
        (Trust(other), r"snapshot\.signing_key: .* is no Ed25519 key; make one"),
        (Trust(text), r"snapshot\.signing_key: .* is no unencrypted private key"),
        (Trust(tmp_path / "none"), r"snapshot\.signing_key: .* can't be read"),
        (Trust(private, trusted_keys=(text,)), r"snapshot\.trusted_keys: .* no public key"),
        (Trust(private, trusted_keys=(tmp_path / "n",)), r"snapshot\.trusted_keys: .*be read"),
    ):
        with pytest.raises(ConfigError, match=says):
            bad.check_keys()
    private.chmod(0o640)
    with pytest.raises(ConfigError, match=r"snapshot\.signing_key: others may read"):
        Trust(private).check_keys()
