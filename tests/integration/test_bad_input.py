"""Bad input at the command line: one line with field and remedy, exit code, nothing changed."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dynamo_elastic.demo.run import demo_config, leftovers
from dynamo_elastic.testing.served import CLI, ServedDeployment, run_cli, served

pytestmark = [pytest.mark.etcd, pytest.mark.nixl, pytest.mark.dynamo, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def work_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bad-input")


@pytest.fixture(scope="module")
def settings(work_dir: Path) -> dict[str, Any]:
    """Good settings as plain data, to be spoilt one by one; never served."""
    config = demo_config(work_dir, "test-unserved")
    raw: dict[str, Any] = json.loads(config.model_dump_json())
    return raw


@pytest.fixture(scope="module")
def deployment(work_dir: Path) -> Iterator[ServedDeployment]:
    config = demo_config(
        work_dir, "test-bad-input", planner={"enabled": False}, frontend={"enabled": False}
    )
    with served(config, work_dir / "served") as running:
        yield running
    assert leftovers(config, set()) == []


def serve_fails(tmp_path: Path, settings: dict[str, Any], **more: Any) -> list[str]:
    """`serve` with these settings must fail fast; its error lines."""
    file = tmp_path / "deployment.yaml"
    file.write_text(json.dumps(settings))
    done = run_cli("serve", "-f", str(file), **more)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line]
    assert all(line.startswith("error: ") for line in lines), done.stderr
    assert not (Path(settings["run_dir"]) / settings["deployment"] / "config.json").exists()
    return lines


def spoilt(settings: dict[str, Any], section: str, **values: Any) -> dict[str, Any]:
    return {**settings, section: {**settings[section], **values}}


def test_unknown_key(tmp_path: Path, settings: dict[str, Any]) -> None:
    (line,) = serve_fails(tmp_path, {**settings, "modle": 1})
    assert line == "error: modle: unknown setting; did you mean model? (deployment.yaml:1)"


def test_wrong_type(tmp_path: Path, settings: dict[str, Any]) -> None:
    (line,) = serve_fails(tmp_path, spoilt(settings, "scale", max_ranks="many"))
    assert line.startswith("error: scale.max_ranks: ")
    assert "'many'" in line


def test_duplicate_port(tmp_path: Path, settings: dict[str, Any]) -> None:
    port = settings["frontend"]["port"]
    (line,) = serve_fails(tmp_path, spoilt(settings, "planner", control_port=port))
    assert line == (
        f"error: planner.control_port: port {port} is also frontend.port; choose another "
        "(deployment.yaml:1)"
    )


def test_model_directory_without_config(tmp_path: Path, settings: dict[str, Any]) -> None:
    (line,) = serve_fails(tmp_path, spoilt(settings, "model", path=str(tmp_path)))
    assert line.startswith("error: model.path: ")
    assert "config.json" in line


def test_etcd_unreachable(tmp_path: Path, settings: dict[str, Any]) -> None:
    etcd = {"start": False, "endpoints": ["http://127.0.0.1:9"]}
    (line,) = serve_fails(tmp_path, spoilt(settings, "etcd", **etcd))
    assert line.startswith("error: etcd.endpoints: no etcd answers at http://127.0.0.1:9")


def test_widths_that_cannot_hold_the_experts(tmp_path: Path, settings: dict[str, Any]) -> None:
    (line,) = serve_fails(tmp_path, spoilt(settings, "engine", slots_per_rank=2))
    assert line.startswith("error: scale.initial_ranks: ")
    assert "ask for at least 8" in line


@pytest.mark.root
def test_criu_missing(tmp_path: Path, settings: dict[str, Any]) -> None:
    environment = {**os.environ, "DYNAMO_ELASTIC_CRIU": str(tmp_path / "none")}
    (line,) = serve_fails(tmp_path, settings, env=environment)
    assert line.startswith("error: snapshot.enabled: ")
    assert "correct the path" in line


@pytest.mark.root
def test_criu_too_old(tmp_path: Path, settings: dict[str, Any]) -> None:
    old = tmp_path / "criu"
    old.write_text("#!/bin/sh\necho 'Version: 3.17.1'\n")
    old.chmod(0o755)
    environment = {**os.environ, "DYNAMO_ELASTIC_CRIU": str(old)}
    (line,) = serve_fails(tmp_path, settings, env=environment)
    assert line.startswith("error: snapshot.enabled: ")
    assert "3.17.1" in line
    assert "4.2" in line


@pytest.mark.root
def test_no_root(tmp_path: Path, settings: dict[str, Any]) -> None:
    file = tmp_path / "deployment.yaml"
    file.write_text(json.dumps({**settings, "run_dir": str(tmp_path / "run")}))
    done = subprocess.run(
        ["unshare", "--user", *CLI, "serve", "-f", str(file)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    (line,) = [x for x in done.stderr.splitlines() if x]
    assert line.startswith("error: snapshot.enabled: ")
    assert "root" in line
    assert "snapshot.enabled to false" in line


@pytest.mark.root
@pytest.mark.criu
@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("0", "at least 1 rank"),
        ("-3", "at least 1 rank"),
        ("1", "hold 8 of 16 experts; ask for at least 2"),
        ("5", "scale.max_ranks is 4; ask for at most that"),
        ("2", "is the width in force; nothing to do"),
    ],
)
def test_illegal_targets(deployment: ServedDeployment, target: str, says: str) -> None:
    before = deployment.status()
    done = deployment.cli("scale", "--", target)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith(f"error: target {target}: ")
    assert says in lines[0]
    after = deployment.wait_idle()
    assert after.topology == before.topology
    assert after.last == before.last


@pytest.mark.root
@pytest.mark.criu
def test_what_runs_is_what_a_dry_run_prints(deployment: ServedDeployment) -> None:
    done = deployment.cli("serve", "--dry-run")
    assert done.returncode == 0
    printed = [x.split()[2] for x in done.stdout.splitlines() if "(log: " in x]
    logs = deployment.config.state_dir / "logs"
    assert sorted(printed) == sorted(path.stem for path in logs.glob("*.log"))


@pytest.mark.root
@pytest.mark.criu
def test_a_second_serve_on_the_same_prefix(deployment: ServedDeployment, tmp_path: Path) -> None:
    """Same deployment, other machine or directory: the etcd prefix has an owner."""
    config = deployment.config
    raw = json.loads(config.model_dump_json())
    raw["run_dir"] = str(tmp_path / "run")
    raw["etcd"] = {"start": False, "endpoints": list(config.etcd.urls)}
    raw["frontend"]["enabled"] = raw["planner"]["enabled"] = False
    before = deployment.status()
    (line,) = serve_fails(tmp_path, raw)
    assert line.startswith(
        "error: deployment: etcd prefix /dynamo-elastic/test-bad-input/ is in use"
    )
    assert deployment.status().topology == before.topology


@pytest.mark.root
@pytest.mark.criu
def test_a_second_serve_on_the_same_host(deployment: ServedDeployment) -> None:
    done = deployment.cli("serve")
    assert done.returncode == 2
    assert "choose another" in done.stderr
    assert deployment.status().topology is not None
