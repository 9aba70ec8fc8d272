"""`dynamo-elastic snapshot ...` as a user runs it, with the reference engine."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from dynamo_elastic.cli.exit_codes import (
    BAD_INPUT,
    DAMAGED,
    DOES_NOT_FIT,
    FAILED,
    IN_USE,
    NOT_FOUND,
)
from dynamo_elastic.cli.main import main
from dynamo_elastic.engine.reference.make_model import write_model
from dynamo_elastic.snapshot import criu
from dynamo_elastic.snapshot.catalog import Catalog
from dynamo_elastic.testing.engine_process import SMALL_SHAPE


@dataclass
class Cli:
    """Runs commands on one deployment file."""

    directory: Path
    capture: pytest.CaptureFixture[str]

    @property
    def file(self) -> Path:
        return self.directory / "deployment.yaml"

    @property
    def catalog(self) -> Path:
        return self.directory / "images"

    def configure(self, **changes: Any) -> None:
        settings = {
            "deployment": "cli",
            "model": {"path": str(self.directory / "model"), "name": "m"},
            "scale": {"initial_ranks": 1, "max_ranks": 2},
            "snapshot": {"catalog": str(self.catalog)},
            "run_dir": str(self.directory / "run"),
        }
        self.file.write_text(yaml.safe_dump(settings | changes))

    def run(self, *argv: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["snapshot", *argv])
        captured = self.capture.readouterr()
        code = ended.value.code
        return code if isinstance(code, int) else 0, captured.out, captured.err

    def fails(self, *argv: str) -> str:
        """The one line that a failing command prints."""
        code, _, err = self.run(*argv)
        assert code != 0
        lines = [line for line in err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, err
        assert "Traceback" not in err
        return lines[0]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Iterator[Cli]:
    with tempfile.TemporaryDirectory(prefix="de-") as directory:
        cli = Cli(Path(directory), capsys)
        write_model(Path(directory) / "model", SMALL_SHAPE)
        cli.configure()
        yield cli


@pytest.mark.root
@pytest.mark.criu
@pytest.mark.nixl
def test_life_of_an_image(cli: Cli) -> None:
    file = ("-f", str(cli.file))
    code, out, _ = cli.run("create", *file, "--slot", "1", "--json")
    assert code == 0
    (made,) = json.loads(out)
    image = made["image_id"]
    assert made["slot"] == 1
    assert made["pages_bytes"] > 0

    assert image in cli.run("list", *file)[1]
    assert json.loads(cli.run("list", *file, "--json")[1]) == [made]
    assert "it fits here" in cli.run("inspect", image, *file)[1]
    assert json.loads(cli.run("inspect", image, *file, "--json")[1])["image_id"] == image
    code, out, err = cli.run("restore", image, *file, "--json")
    assert code == 0, err
    assert json.loads(out)["timings_s"]["ready"] < made["timings_s"]["boot"]
    inspected = cli.run("inspect", image, *file)[1]
    assert all(f"\n  {kind} " in inspected for kind in ("private", "shared", "cuda", "other"))
    assert sum(made["sizes"].values()) == made["pages_bytes"] + made["other_bytes"]
    assert "a copy of it ran, and its probe was right" in cli.run("verify", "--restore", *file)[1]
    code, out, _ = cli.run("verify", image, "--restore", *file, "--json")
    assert json.loads(out)[0]["timings_s"]["ready"] > 0
    assert cli.fails("verify", "--restore").startswith("error: --restore: needs the deployment")

    # Another model in the same place: nothing of the image is run.
    config = cli.directory / "model" / "config.json"
    config.write_text(config.read_text().replace(" ", "  "))
    assert "does not fit: model" in cli.run("inspect", image, *file)[1]
    assert "does not fit: model" in cli.fails("verify", image, *file)
    assert "does not fit: model" in cli.fails("restore", image, *file)

    pages = next((cli.catalog / image).glob("pages-*.img"))
    pages.write_bytes(pages.read_bytes()[:-1])
    assert pages.name in cli.fails("verify", image, "-f", str(cli.file))
    (cli.catalog / image / "manifest.json").write_text("{")
    assert "damaged" in cli.run("list", *file)[1]
    assert cli.run("rm", image, *file)[0] == 0
    assert f"no snapshot {image}" in cli.fails("rm", image, *file)
    assert json.loads(cli.run("list", *file, "--json")[1]) == []


def code(cli: Cli, *argv: str) -> int:
    return cli.run(*argv, "-f", str(cli.file))[0]


@pytest.mark.root
@pytest.mark.criu
@pytest.mark.nixl
def test_image_moves_and_is_pruned(cli: Cli) -> None:
    file = ("-f", str(cli.file))
    _, out, err = cli.run("create", *file, "--slot", "0", "--json")
    image = json.loads(out)[0]["image_id"]
    # Not on a terminal: a line for each phase.
    assert [line for line in err.splitlines() if line.startswith("slot 0: ")] == [
        f"slot 0: {phase}" for phase in ("boot", "inspect", "freeze", "dump", "store", "done")
    ]
    archive = cli.directory / "image.tar"
    _, out, _ = cli.run("export", image, str(archive), *file, "--json")
    assert json.loads(out)["archive_bytes"] == archive.stat().st_size
    assert code(cli, "export", image, str(archive)) == FAILED
    assert code(cli, "import", str(archive)) == FAILED

    assert json.loads(cli.run("rm", image, *file, "--json")[1]) == {"removed": image}
    assert code(cli, "rm", image) == NOT_FOUND
    assert json.loads(cli.run("import", str(archive), *file, "--json")[1])["image_id"] == image
    assert code(cli, "verify", image) == 0
    assert code(cli, "restore", image) == 0

    with Catalog(cli.catalog).hold(image):
        assert code(cli, "rm", image) == IN_USE
    good = archive.read_bytes()
    middle = len(good) // 2
    cli.run("rm", image, *file)
    archive.write_bytes(good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :])
    assert code(cli, "import", str(archive)) == DAMAGED
    archive.write_bytes(good)
    assert code(cli, "import", str(archive)) == 0

    # Of another model than the deployment's by now: not taken in, and what is there goes.
    config = cli.directory / "model" / "config.json"
    config.write_text(config.read_text().replace(" ", "  "))
    (cli.catalog / ".partial-slot1-dead").mkdir(mode=0o700)
    dry = json.loads(cli.run("prune", *file, "--dry-run", "--json")[1])
    assert [e["image_id"] for e in dry["removed"]] == [image]
    assert dry["removed"][0]["reason"].startswith("stale: model: ")
    assert dry["partials"] == [".partial-slot1-dead"]
    assert image in cli.run("list", *file)[1]
    assert f"removed {image}: stale: model" in cli.run("prune", *file)[1]
    assert json.loads(cli.run("list", *file, "--json")[1]) == []
    assert "model: the image has" in cli.fails("import", str(archive), *file)
    assert code(cli, "import", str(archive)) == DOES_NOT_FIT
    assert Catalog(cli.catalog).entries() == {}


def test_bad_input_has_its_code(cli: Cli) -> None:
    assert cli.run("create")[0] == BAD_INPUT
    assert cli.run("restore", "x")[0] == BAD_INPUT
    none = str(cli.directory / "none.yaml")
    for command in ("verify", "inspect", "rm", "restore"):
        assert cli.run(command, "x", "-f", none)[0] == BAD_INPUT


@pytest.mark.root
@pytest.mark.criu
@pytest.mark.parametrize("command", ["verify", "inspect", "rm", "restore"])
def test_image_that_is_not_there(cli: Cli, command: str) -> None:
    assert code(cli, command, "none") == NOT_FOUND


def test_file_is_named_in_its_faults(cli: Cli) -> None:
    assert "can't be read" in cli.fails("create", "-f", str(cli.directory / "none.yaml"))
    cli.configure(snapshots={})
    assert "snapshots: unknown setting" in cli.fails("create", "-f", str(cli.file))


@pytest.mark.root
def test_unknown_slot_is_named(cli: Cli) -> None:
    assert "--slot 2: this deployment has slots 0-1" in cli.fails(
        "create", "-f", str(cli.file), "--slot", "2"
    )
    assert not cli.catalog.exists()


@pytest.mark.root
@pytest.mark.criu
def test_model_without_config_is_named(cli: Cli) -> None:
    (cli.directory / "model" / "config.json").unlink()
    assert "model.path:" in cli.fails("create", "-f", str(cli.file))


@pytest.mark.root
def test_criu_that_is_missing_or_old(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(criu, "PREFIX", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "run deploy/criu/install.sh" in cli.fails("create", "-f", str(cli.file))
    old = tmp_path / "criu"
    old.write_text("#!/bin/sh\necho Version: 3.17.1\n")
    old.chmod(0o755)
    assert "3.17.1" in cli.fails("create", "-f", str(cli.file))


def test_without_root(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "needs root" in cli.fails("create", "-f", str(cli.file))


def test_catalog_that_can_not_be_used(cli: Cli) -> None:
    cli.catalog.mkdir(mode=0o755)
    cli.catalog.chmod(0o755)
    assert "0755" in cli.fails("list", "-f", str(cli.file))
    cli.catalog.rmdir()
    cli.catalog.write_text("")
    assert "not a plain directory" in cli.fails("list", "-f", str(cli.file))
