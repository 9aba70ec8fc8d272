"""A disk that is full, read-only or without execution: one line, and nothing is left."""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from dynamo_elastic.agent.images import Images
from dynamo_elastic.agent.rehearse import rehearse
from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.errors import ElasticError, SnapshotError
from dynamo_elastic.snapshot.archive import export_image, import_image
from dynamo_elastic.snapshot.catalog import Catalog
from dynamo_elastic.snapshot.criu import Criu
from dynamo_elastic.testing.deployments import deployment, standin_argv
from dynamo_elastic.testing.snapshots import publish_image

pytestmark = [pytest.mark.root, pytest.mark.criu]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB, mounted with options of the test's choice; see remount()."""
    path = tmp_path / "mount"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m,mode=0700", "de", path], check=True)
    yield path
    subprocess.run(["umount", "--lazy", path], check=True)


def remount(path: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", path], check=True)


@pytest.fixture
def config(mount: Path) -> Iterator[DeploymentConfig]:
    with tempfile.TemporaryDirectory(prefix="de-") as directory:
        yield deployment(Path(directory), snapshot={"catalog": str(mount / "images")})


def images_of(config: DeploymentConfig, *flags: str) -> Images:
    return Images(config, Criu.find(), Catalog(config.snapshot.catalog), standin_argv(*flags))


def test_full_disk_ends_a_dump(config: DeploymentConfig) -> None:
    images = images_of(config, "--mb", "8")
    with pytest.raises(ElasticError) as caught:
        images.create(0)
    assert "\n" not in str(caught.value)
    assert "No space left" in str(caught.value)
    assert images.catalog.entries() == {}
    assert images.catalog.partials() == ()


def test_disk_that_is_full_for_the_manifest(mount: Path) -> None:
    catalog = Catalog(mount / "images")
    publish_image(catalog, "slot0-old")
    kept = catalog.inspect("slot0-old")
    with catalog.draft("slot0-new") as draft:
        _fill(draft.directory / "pages-1.img")
        with pytest.raises(SnapshotError, match="No space left"):
            catalog.publish(draft, kept)
    assert list(catalog.entries()) == ["slot0-old"]
    assert catalog.partials() == ()
    assert catalog.findings("slot0-old") == ()


def _fill(path: Path) -> None:
    for size_bytes in (1 << 16, 1 << 12):
        with path.open("ab", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(size_bytes))


def test_full_disk_ends_an_export_and_an_import(mount: Path, tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "images")
    publish_image(catalog, size_bytes=6 << 20)
    with pytest.raises(SnapshotError, match="No space left"):
        export_image(catalog, "slot0-a", mount / "a.tar")
    assert list(mount.iterdir()) == []
    export_image(catalog, "slot0-a", tmp_path / "a.tar")
    small = Catalog(mount / "images", catalog.trust)
    with pytest.raises(SnapshotError, match="No space left"):
        import_image(small, tmp_path / "a.tar")
    assert small.entries() == {}
    assert small.partials() == ()


def test_image_runs_from_a_disk_without_writing_or_execution(
    config: DeploymentConfig, mount: Path
) -> None:
    remount(mount, "size=256m")
    images = images_of(config, "--mb", "1")
    manifest = images.create(0)
    remount(mount, "ro,noexec")
    assert images.catalog.findings(manifest.image_id) == ()
    asyncio.run(rehearse(images, manifest, timeout_s=30))
    with pytest.raises(SnapshotError, match="Read-only file system"):
        images.create(0)
    with pytest.raises(SnapshotError, match="Read-only file system"):
        images.catalog.remove(manifest.image_id)
    with pytest.raises(SnapshotError, match="Read-only file system"):
        images.prune()
    assert list(images.catalog.entries()) == [manifest.image_id]
    remount(mount, "rw")


def test_image_above_its_bound_is_not_kept(config: DeploymentConfig, mount: Path) -> None:
    remount(mount, "size=256m")
    bounded = deployment(
        config.run_dir.parent,
        snapshot={"catalog": str(config.snapshot.catalog), "max_bytes": 1 << 20},
    )
    images = images_of(bounded, "--mb", "1")
    with pytest.raises(SnapshotError, match=r"above snapshot\.max_bytes 1048576"):
        images.create(0)
    assert images.catalog.entries() == {}
