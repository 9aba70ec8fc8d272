"""CRIU's command lines, version and failures, without running it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dynamo_elastic.errors import ImagerError, PidClash, ResourceMissing
from dynamo_elastic.snapshot import criu
from dynamo_elastic.snapshot.criu import Criu, dump_argv, failure, find_criu, parse_version
from dynamo_elastic.snapshot.criu import restore_argv as make_restore_argv


def _program(path: Path, output: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{output}'\n")
    path.chmod(0o755)
    return path


def test_argv_names_every_path() -> None:
    dump = dump_argv(Path("/c/criu"), 1000, Path("/images/x"))
    assert dump[:4] == ["/c/criu", "dump", "--tree", "1000"]
    assert dump[dump.index("--images-dir") + 1] == "/images/x"
    restore = make_restore_argv(Path("/c/criu"), Path("/images/x"), Path("/criu-work"))
    assert restore[:2] == ["/c/criu", "restore"]
    assert "--restore-detached" in restore
    # The image directory is read only; whatever CRIU writes goes elsewhere.
    assert restore[restore.index("--work-dir") + 1] == "/criu-work"
    assert restore[restore.index("--pidfile") + 1].startswith("/criu-work/")


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("Version: 4.2.1\n", (4, 2, 1)),
        ("Warn: x\nVersion: 4.10\nGitID: v4.10", (4, 10)),
        ("Version: garbage", ()),
        ("", ()),
    ],
)
def test_version(text: str, version: tuple[int, ...]) -> None:
    assert parse_version(text) == version


@pytest.mark.parametrize(
    "line",
    [
        "Error (criu/cr-restore.c:1203): Can't fork for 1000: File exists",
        "1000: Error (criu/pie/restorer.c:1): Unable to create a thread 1000: File exists",
    ],
)
def test_taken_pid_is_a_clash(line: str) -> None:
    error = failure(["criu", "restore"], 1, f"noise\n{line}\n")
    assert isinstance(error, PidClash)
    assert error.pid == 1000


def test_other_failures_show_the_errors_of_the_log() -> None:
    harmless = "Error (criu/util.c:1): rlimit: Can't setup RLIMIT_NOFILE for self"
    log = f"{harmless}\nall well\nError (criu/x.c:9): no such thing\n"
    error = failure(["criu", "dump"], 1, log)
    assert type(error) is ImagerError
    assert error.log_tail == "Error (criu/x.c:9): no such thing"
    assert failure(["criu"], 1, "").log_tail == "no log"


def test_search_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(criu, "PREFIX", tmp_path / "prefix")
    on_path = _program(tmp_path / "bin" / "criu", "x")
    environment = {"PATH": str(tmp_path / "bin")}
    assert find_criu(environment) == on_path
    private = _program(tmp_path / "prefix" / "bin" / "criu", "x")
    assert find_criu(environment) == private
    named = _program(tmp_path / "mine", "x")
    assert find_criu({**environment, criu.OVERRIDE: str(named)}) == named
    with pytest.raises(ResourceMissing, match=r"correct the path"):
        find_criu({**environment, criu.OVERRIDE: str(tmp_path / "absent")})


def test_missing_criu_names_the_installer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(criu, "PREFIX", tmp_path)
    with pytest.raises(ResourceMissing, match=r"deploy/criu/install\.sh"):
        find_criu({"PATH": str(tmp_path)})


@pytest.mark.root
@pytest.mark.parametrize("output", ["Version: 4.1.1", "Version: 3.17", "nonsense"])
def test_old_criu_names_the_installer(tmp_path: Path, output: str) -> None:
    program = _program(tmp_path / "criu", output)
    with pytest.raises(ResourceMissing, match=r"too old.*deploy/criu/install\.sh"):
        Criu.find({criu.OVERRIDE: str(program)})


@pytest.mark.root
def test_new_criu_is_taken(tmp_path: Path) -> None:
    program = _program(tmp_path / "criu", "Version: 4.2")
    assert Criu.find({criu.OVERRIDE: str(program)}).version() == "4.2"


@pytest.mark.root
@pytest.mark.parametrize("able", [True, False])
def test_page_server_is_used_where_criu_finds_userfaultfd(tmp_path: Path, able: bool) -> None:
    program = _program(tmp_path / "criu", "Version: 4.2")
    with program.open("a") as file:
        file.write(f'[ "$1" != check ] || exit {0 if able else 1}\n')
    assert Criu.find({criu.OVERRIDE: str(program)}).page_server is able


def test_processes_that_are_filled_from_outside_stay_stopped() -> None:
    plain = make_restore_argv(Path("/c/criu"), Path("/i"), Path("/w"))
    filled = make_restore_argv(Path("/c/criu"), Path("/i"), Path("/w"), page_server=True)
    assert set(filled) - set(plain) == {"--lazy-pages", "--leave-stopped"}


def test_without_root_there_is_no_criu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ResourceMissing, match="needs root"):
        Criu.find()
