"""The systemd units: systemd takes them, our programs take their flags, and they are as closed as
what they do allows."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo_elastic.config import OTHER_VARIABLES, SETTINGS
from dynamo_elastic.config_launch import launch_parser
from dynamo_elastic.config_sources import from_environment
from dynamo_elastic.snapshot.capabilities import NEEDED, USEFUL

UNITS = Path(__file__).parents[2] / "deploy" / "systemd"
EXPOSURE = {"agent": 8.7, "coordinator": 1.5, "worker@": 2.5}
"""At most, as `systemd-analyze security` counts: 0 is closed, 10 open."""

analyze = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="needs systemd-analyze (package systemd)"
)


def unit(name: str) -> str:
    return (UNITS / f"dynamo-elastic-{name}.service").read_text()


def settings(text: str, key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", text, re.MULTILINE)


def test_these_are_the_units() -> None:
    found = {p.stem.removeprefix("dynamo-elastic-") for p in UNITS.glob("*.service")}
    assert found == set(EXPOSURE)


@analyze
def test_systemd_finds_nothing_wrong(tmp_path: Path) -> None:
    """With a Python that is here, and the TLS settings beside the coordinator."""
    for name in EXPOSURE:
        text = unit(name).replace("/opt/dynamo-elastic/venv/bin/python", sys.executable)
        (tmp_path / f"dynamo-elastic-{name}.service").write_text(text)
    more = tmp_path / "dynamo-elastic-coordinator.service.d"
    more.mkdir()
    shutil.copy(UNITS / "coordinator-tls.conf", more / "tls.conf")
    names = [f"dynamo-elastic-{n.replace('@', '@0')}.service" for n in EXPOSURE]
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *(str(tmp_path / n) for n in names)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    ours = [line for line in done.stderr.splitlines() if "dynamo-elastic" in line]
    assert (done.returncode, ours) == (0, []), done.stderr


@analyze
@pytest.mark.parametrize("name", EXPOSURE)
def test_it_is_no_more_open_than_noted(name: str) -> None:
    file = UNITS / f"dynamo-elastic-{name}.service"
    threshold = f"--threshold={EXPOSURE[name] * 10:.0f}"
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", threshold, str(file)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-300:] + done.stderr


def test_the_agents_capabilities_are_those_that_it_looks_for() -> None:
    given = {c for line in settings(unit("agent"), "CapabilityBoundingSet") for c in line.split()}
    assert given == {f"CAP_{c.name}" for c in (*NEEDED, *USEFUL)}
    for name in ("coordinator", "worker@"):
        assert settings(unit(name), "CapabilityBoundingSet") == [""]


@pytest.mark.parametrize("name", EXPOSURE)
def test_our_programs_take_their_flags_and_variables(name: str) -> None:
    text = unit(name)
    example = dict(
        line.split("=", 1)
        for line in (UNITS / "environment.example").read_text().splitlines()
        if not line.startswith("#")
    )
    (command,) = settings(text, "ExecStart")
    for variable, value in example.items():
        command = re.sub(rf"\$(\{{{variable}\}}|{variable}\b)", value, command)
    python, flag, module, *arguments = command.replace("%i", "0").split()
    assert (flag, Path(python).name) == ("-m", "python")
    assert module == f"dynamo_elastic.{name.removesuffix('@')}"
    given = dict(line.split("=", 1) for line in settings(text, "Environment"))
    if name == "coordinator":
        tls = (UNITS / "coordinator-tls.conf").read_text()
        given |= dict(line.split("=", 1) for line in settings(tls, "Environment"))
    process = module.removeprefix("dynamo_elastic.")
    _, unknown = launch_parser(process).parse_known_args(["--elastic-config", "x", *arguments])
    assert unknown == []
    from_environment(given | example, SETTINGS, OTHER_VARIABLES)  # raises for unknown names
