"""`serve --dry-run` prints what `serve` starts, and starts nothing."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from dynamo_elastic.cli.main import main
from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.serve import plan
from dynamo_elastic.serve.dry_run import dry_run
from dynamo_elastic.serve.processes import inherited_environment
from dynamo_elastic.testing.deployments import deployment


def commands(config: DeploymentConfig) -> list[list[str]]:
    return [shlex.split(line) for line, style in dry_run(config) if style == "command"]


def test_the_commands_are_those_of_the_plan_in_order(tmp_path: Path) -> None:
    config = deployment(tmp_path, slots=2, scale={"initial_ranks": 1, "max_ranks": 2})
    specs = plan.processes(plan.absolute(config), "N")
    assert [s.name for s in specs] == [
        "etcd",
        "agent",
        "frontend",
        "slot0",
        "slot1",
        "coordinator",
        "planner",
    ]
    assert commands(config) == [list(s.argv) for s in specs]


def test_parts_that_are_off_are_not_shown(tmp_path: Path) -> None:
    config = deployment(
        tmp_path,
        slots=1,
        etcd={"start": False, "endpoints": ["http://10.0.0.5:2379"]},
        frontend={"enabled": False},
        planner={"enabled": False},
    )
    names = [line for line, style in dry_run(config) if style == "name"]
    assert [n.split()[2] for n in names] == ["agent", "slot0", "coordinator"]
    exports = [line for line, style in dry_run(config) if style == "environment"]
    assert "export ETCD_ENDPOINTS=http://10.0.0.5:2379" in exports


def test_a_planner_that_runs_already_is_not_started(tmp_path: Path) -> None:
    config = deployment(tmp_path, planner={"start": False, "control_port": 8000})
    assert "planner" not in [s.name for s in plan.processes(config, "N")]


def test_the_output_is_a_shell_script(tmp_path: Path) -> None:
    script = "\n".join(line for line, _ in dry_run(deployment(tmp_path)))
    checked = subprocess.run(
        ["sh", "-n"], input=script, text=True, capture_output=True, check=False
    )
    assert (checked.returncode, checked.stderr) == (0, "")


def test_nothing_is_started_or_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "d.yaml"
    config = deployment(tmp_path)
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    before = sorted(tmp_path.rglob("*"))

    def none(*args: object, **more: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", none)
    with pytest.raises(SystemExit) as ended:
        main(["serve", "-f", str(file), "--dry-run", "--elastic-frontend-port=8123"])
    assert ended.value.code in (0, None)
    out = capsys.readouterr().out
    assert "--http-port=8123" in out
    assert "\x1b[" not in out, "no colour where nobody looks"
    assert sorted(tmp_path.rglob("*")) == before


def test_children_get_settings_in_a_file_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_ELASTIC_SCALE_MAX_RANKS", "3")
    monkeypatch.setenv("DYN_OTHER", "x")
    assert "DYN_ELASTIC_SCALE_MAX_RANKS" not in inherited_environment()
    assert inherited_environment()["DYN_OTHER"] == "x"
