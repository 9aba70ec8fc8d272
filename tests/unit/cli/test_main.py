"""`dynamo-elastic` with flags of settings, and `config show`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from dynamo_elastic.cli.main import main
from dynamo_elastic.config import load_config


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "d.yaml"
    path.write_text(
        "deployment: a\nmodel: {path: m, name: m}\nscale:\n  initial_ranks: 1\n  max_ranks: 2\n"
    )
    return str(path)


def run(*argv: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    return int(ended.value.code or 0)


def test_show_prints_yaml_that_is_read_again(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_ELASTIC_FRONTEND_PORT", "8123")
    assert run("config", "show", "-f", file, "--sources", "--elastic-scale-max-ranks=4") == 0
    out = capsys.readouterr().out
    again = tmp_path / "again.yaml"
    again.write_text(out)
    monkeypatch.delenv("DYN_ELASTIC_FRONTEND_PORT")
    config = load_config(again)
    assert (config.scale.max_ranks, config.frontend.port) == (4, 8123)
    sources = {
        line.split("#")[0].strip(): line.split("# ")[1] for line in out.splitlines() if "#" in line
    }
    assert sources["max_ranks: 4"] == "--elastic-scale-max-ranks"
    assert sources["port: 8123"] == "DYN_ELASTIC_FRONTEND_PORT"
    assert sources["deployment: a"] == "d.yaml:1"
    assert sources["initial_ranks: 1"] == "d.yaml:4"
    assert sources["multiple_of: 1"] == "default"


def test_show_as_json(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "show", "-f", file, "--json", "--sources") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["settings"]["scale"]["max_ranks"] == 2
    assert shown["sources"]["scale.max_ranks"] == "d.yaml:5"
    assert run("config", "show", "-f", file, "--json") == 0
    assert json.loads(capsys.readouterr().out)["deployment"] == "a"


def test_flags_are_the_commands_alone(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    run("config", "show", "-f", file, "--elastic-scale-max-ranks", "4")
    capsys.readouterr()
    run("config", "show", "-f", file)
    assert yaml.safe_load(capsys.readouterr().out)["scale"]["max_ranks"] == 2


def test_every_fault_is_one_line_and_the_exit_code_is_2(
    file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_ELASTIC_SNAPSHOT_ENABLED", "yes")
    assert run("config", "show", "-f", file, "--elastic-scale-maxranks", "4") == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: snapshot.enabled: must be true or false, got 'yes' (DYN_ELASTIC_SNAPSHOT_ENABLED)",
        "error: --elastic-scale-maxranks: unknown setting; did you mean --elastic-scale-max-ranks?",
    ]


@pytest.mark.parametrize("flag", ["--elastic-scale-max-ranks=4", "--elastic-nonsense=1"])
def test_no_flag_is_ignored(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("version", flag) == 2
    assert capsys.readouterr().err == (
        f"error: {flag.partition('=')[0]}: version has no settings\n"
    )
