"""Acceptance: `snapshot verify` finds each planted damage of a real image, and names it."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from dynamo_elastic.cli.exit_codes import DAMAGED, DOES_NOT_FIT
from dynamo_elastic.cli.main import main
from dynamo_elastic.engine.reference.make_model import write_model
from dynamo_elastic.snapshot.manifest import MANIFEST_FILE, decode, encode
from dynamo_elastic.snapshot.signing import SIGNATURE_FILE, Trust, host_key
from dynamo_elastic.testing.engine_process import SMALL_SHAPE

pytestmark = [pytest.mark.root, pytest.mark.criu, pytest.mark.nixl]


@dataclass(frozen=True)
class Cli:
    """Commands on one deployment, whose catalog has one image."""

    directory: Path

    @property
    def file(self) -> Path:
        return self.directory / "deployment.yaml"

    @property
    def catalog(self) -> Path:
        return self.directory / "images"

    @property
    def image(self) -> Path:
        (path,) = (p for p in self.catalog.iterdir() if not p.name.startswith("."))
        return path

    def run(self, *argv: str) -> int:
        """The exit code."""
        with pytest.raises(SystemExit) as ended:
            main(["snapshot", *argv, "-f", str(self.file)])
        return ended.value.code if isinstance(ended.value.code, int) else 0


@pytest.fixture(scope="module")
def made() -> Iterator[Cli]:
    """Made once; `pristine` beside the catalog is a copy of it."""
    with tempfile.TemporaryDirectory(prefix="de-") as directory:
        cli = Cli(Path(directory))
        write_model(cli.directory / "model", SMALL_SHAPE)
        settings = {
            "deployment": "test",
            "model": {"path": str(cli.directory / "model"), "name": "m"},
            "scale": {"initial_ranks": 1, "max_ranks": 1},
            "snapshot": {"catalog": str(cli.catalog)},
            "run_dir": str(cli.directory / "run"),
        }
        cli.file.write_text(yaml.safe_dump(settings))
        assert cli.run("create", "--json") == 0
        subprocess.run(["cp", "-a", cli.catalog, cli.directory / "pristine"], check=True)
        yield cli


@pytest.fixture
def cli(made: Cli, capsys: pytest.CaptureFixture[str]) -> Iterator[Cli]:
    capsys.readouterr()
    yield made
    for path in (made.catalog, made.directory / "moved", made.directory / "second"):
        subprocess.run(["rm", "-rf", path], check=True)
    subprocess.run(["cp", "-a", made.directory / "pristine", made.catalog], check=True)


def pages(directory: Path) -> Path:
    return next(directory.glob("pages-*.img"))


def flip(path: Path, where: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(where * (len(data) - 1))] ^= 1
    path.write_bytes(data)


def to_link(path: Path, moved: Path) -> None:
    path.rename(moved)
    path.symlink_to(moved)


def rewrite(directory: Path, **changes: Any) -> None:
    """A manifest that is whole in itself, and lies; signed by this host, as a wrong signature would
    be found first."""
    path = directory / MANIFEST_FILE
    manifest = encode(replace(decode(path.read_bytes(), ""), **changes))
    path.write_bytes(manifest)
    (directory / SIGNATURE_FILE).write_bytes(Trust(host_key(directory.parent)).sign(manifest))


def lie_about_digest(directory: Path) -> None:
    manifest = decode((directory / MANIFEST_FILE).read_bytes(), "")
    first, *rest = manifest.files
    rewrite(directory, files=(replace(first, digest="0" * 32), *rest))


def point_outside(directory: Path) -> None:
    manifest = decode((directory / MANIFEST_FILE).read_bytes(), "")
    stolen = replace(manifest.files[0], name="../../../etc/passwd")
    rewrite(directory, files=(*manifest.files, stolen))


def to_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def text(directory: Path, old: bytes, new: bytes) -> None:
    path = directory / MANIFEST_FILE
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "first byte of the pages": (lambda d: flip(pages(d), 0), "content was altered"),
    "last byte of the pages": (lambda d: flip(pages(d), 1), "content was altered"),
    "a byte of a core": (lambda d: flip(d / "core-1000.img", 0.5), "core-1000.img"),
    "a file cut short": (lambda d: os.truncate(pages(d), 4096), "4096 bytes, not"),
    "a file that grew": (lambda d: grow(pages(d)), "bytes, not"),
    "a file missing": (lambda d: (d / "core-1000.img").unlink(), "can't be read"),
    "a file too many": (lambda d: (d / "extra.img").touch(), "unknown files extra.img"),
    "a file others may read": (lambda d: pages(d).chmod(0o644), "mode 0644"),
    "a directory others may enter": (lambda d: d.chmod(0o755), "mode 0755"),
    "a file of somebody else": (lambda d: os.chown(pages(d), 65534, -1), "uid 65534"),
    "a directory of somebody else": (lambda d: os.chown(d, 65534, -1), "uid 65534"),
    "a file behind a link": (
        lambda d: to_link(pages(d), d.parent.parent / "moved"),
        "not a plain file",
    ),
    "an image behind a link": (
        lambda d: to_link(d, d.parent.parent / "moved"),
        "not a plain directory",
    ),
    "a file with a second name": (
        lambda d: os.link(pages(d), d.parent.parent / "second"),
        "has 2 names",
    ),
    "a directory in place of a file": (
        lambda d: to_directory(d / "core-1000.img"),
        "not a plain file",
    ),
    "no manifest": (lambda d: (d / MANIFEST_FILE).unlink(), "manifest.json: can't be read"),
    "half a manifest": (lambda d: os.truncate(d / MANIFEST_FILE, 100), "not a manifest"),
    "a manifest edited": (lambda d: text(d, b'"slot": 0', b'"slot": 1'), "altered"),
    "a manifest of another schema": (
        lambda d: text(d, b'"schema_version": 5', b'"schema_version": 6'),
        "schema 6, this version reads 4 to 5",
    ),
    "a manifest with another digest": (lie_about_digest, "content was altered"),
    "a manifest that points outside": (point_outside, "the manifest names"),
    "a manifest of another image": (
        lambda d: rewrite(d, image_id="slot0-other"),
        "the manifest of slot0-other",
    ),
}


def test_whole_image_is_found_whole(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run("verify") == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "every byte is right, and it fits here" in out


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found(cli: Cli, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    plant, reason = DAMAGES[damage]
    image_id = cli.image.name
    plant(cli.image)
    assert cli.run("verify", image_id, "--json") == DAMAGED
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    assert reason in line
    (found,) = json.loads(out)
    assert found["image_id"] == image_id
    assert any(reason in finding for finding in found["findings"])
    # Nothing of it is run, either.
    assert cli.run("restore", image_id) == DAMAGED


@pytest.mark.parametrize("field", ["kernel", "cpu", "libc", "criu", "torch", "model", "package"])
def test_image_of_another_world_is_named(
    cli: Cli, capsys: pytest.CaptureFixture[str], field: str
) -> None:
    manifest = decode((cli.image / MANIFEST_FILE).read_bytes(), "")
    other: dict[str, Any] = {field: "other"}
    rewrite(cli.image, fingerprint=replace(manifest.fingerprint, **other))
    assert cli.run("verify", cli.image.name) == DOES_NOT_FIT
    assert f"{field}: the image has other, here is" in capsys.readouterr().err
    assert cli.run("restore", cli.image.name) == DOES_NOT_FIT
