"""What root can do, the agent can't, and its engines even less."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from dynamo_elastic.errors import ResourceMissing
from dynamo_elastic.snapshot import capabilities, namespace
from dynamo_elastic.snapshot.base import Command
from dynamo_elastic.snapshot.capabilities import NEEDED, USEFUL, Capability, check_capabilities

pytestmark = pytest.mark.root

PAGE = Path(__file__).parents[3] / "docs" / "security.md"
NOBODY = 65534

SHOW = """
import json, os, subprocess, sys
from dynamo_elastic.snapshot.capabilities import confine
if len(sys.argv) > 1:
    os.setgroups([])
    os.setgid(int(sys.argv[1]))
    os.setuid(int(sys.argv[1]))
confine()
def powers(text):
    return {k: v.strip() for k, _, v in (l.partition(":") for l in text.splitlines())
            if k.startswith(("Cap", "NoNewPrivs"))}
child = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True, check=True)
print(json.dumps([powers(open("/proc/self/status").read()), powers(child.stdout)]))
"""

IMAGE = """
import json, sys
from pathlib import Path
from dynamo_elastic.agent.open_images import open_images
from dynamo_elastic.snapshot.capabilities import confine
from dynamo_elastic.snapshot.namespace import create_namespace
from dynamo_elastic.testing.deployments import deployment, standin_argv
confine()
images = open_images(deployment(Path(sys.argv[1]), slots=1), standin_argv("--mb", "4"))
images.create(0)
namespace = create_namespace()
try:
    namespace.guard_pids(3000)
    process = images.restore(0, namespace, timeout_s=30).process
    print(json.dumps(Path(f"/proc/{process.pid}/status").read_text()))
finally:
    namespace.end(timeout_s=10)
"""


def run(code: str, *arguments: str, powers: frozenset[Capability] | None = None) -> Any:
    """What Python prints that has `powers` (None: those that we have)."""
    argv = [sys.executable, "-c", code, *arguments]
    if powers is not None:
        names = "".join(f",+{c.name.lower()}" for c in powers)
        argv = ["setpriv", f"--bounding-set=-all{names}", "--inh-caps=-all", "--", *argv]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def mask(*powers: Capability) -> int:
    return sum(1 << c for c in powers)


def check_kept(shown: Any) -> None:
    """Of a process and its child: what is listed and no more."""
    allowed = mask(*NEEDED, *USEFUL)
    for powers in shown:
        for kind in ("CapPrm", "CapEff", "CapBnd"):
            assert int(powers[kind], 16) & ~allowed == 0, kind
            assert int(powers[kind], 16) & mask(*NEEDED) == mask(*NEEDED), kind
        assert int(powers["CapInh"], 16) == int(powers["CapAmb"], 16) == 0
        assert powers["NoNewPrivs"] == "1"


def test_the_agent_keeps_what_is_listed_and_so_does_all_that_it_starts() -> None:
    check_kept(run(SHOW))


def test_who_is_not_confined_keeps_what_root_has() -> None:
    with pytest.raises(AssertionError):
        check_kept(run(SHOW.replace("\nconfine()\n", "\n")))


def test_without_root_there_is_nothing_to_give_up() -> None:
    for powers in run(SHOW, str(NOBODY)):
        assert (int(powers["CapEff"], 16), powers["NoNewPrivs"]) == (0, "1")


@pytest.mark.criu
def test_snapshots_need_no_more_than_is_listed_and_engines_nothing() -> None:
    with tempfile.TemporaryDirectory(prefix="de-") as directory:
        status = run(IMAGE, directory, powers=frozenset(NEEDED))
    powers = dict(line.split(":", 1) for line in status.splitlines())
    for kind in ("CapPrm", "CapEff", "CapBnd", "CapInh", "CapAmb"):
        assert int(powers[kind], 16) == 0, kind
    assert powers["NoNewPrivs"].strip() == "1"


def test_an_engine_is_started_without_powers(tmp_path: Path) -> None:
    host = namespace.HostNamespace()
    engine = host.spawn(Command(("sleep", "20"), {"PATH": os.environ["PATH"]}, tmp_path / "log"))
    try:
        deadline = time.monotonic() + 20
        while Path(f"/proc/{engine.pid}/comm").read_text() != "sleep\n":
            assert time.monotonic() < deadline, "it is still on its way through setsid and setpriv"
            time.sleep(0.005)
        status = dict(
            line.split(":", 1)
            for line in Path(f"/proc/{engine.pid}/status").read_text().splitlines()
        )
    finally:
        host.end(timeout_s=10)
    assert {int(status[kind], 16) for kind in ("CapPrm", "CapEff", "CapBnd")} == {0}
    assert status["NoNewPrivs"].strip() == "1"


@pytest.mark.parametrize("power", NEEDED)
def test_a_missing_power_is_named_with_its_reason(power: Capability) -> None:
    code = """
import json
from dynamo_elastic.errors import ResourceMissing
from dynamo_elastic.snapshot.capabilities import check_capabilities
try:
    check_capabilities()
    print(json.dumps("nothing is missing"))
except ResourceMissing as exc:
    print(json.dumps(str(exc)))
"""
    said = run(code, powers=frozenset(NEEDED) - {power})
    assert said.startswith(f"snapshots need CAP_{power.name} ({NEEDED[power]}): run as root")


def test_all_that_is_missing_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "held", frozenset)
    with pytest.raises(ResourceMissing) as caught:
        check_capabilities()
    assert all(f"CAP_{c.name}" in str(caught.value) for c in NEEDED)


def test_an_engine_sees_into_others_where_yama_would_keep_ranks_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    yama = tmp_path / "ptrace_scope"
    monkeypatch.setattr(namespace, "_YAMA", yama)
    for scope, bounds in (("", "-all"), ("0", "-all"), ("1", "-all,+sys_ptrace")):
        if scope:
            yama.write_text(f"{scope}\n")
        assert f"--bounding-set={bounds}" in namespace._powerless()


def test_the_page_and_the_manifest_list_what_is_kept() -> None:
    page = PAGE.read_text()
    manifest = (PAGE.parents[1] / "deploy" / "kubernetes" / "agent.yaml").read_text()
    for power in (*NEEDED, *USEFUL):
        assert f"`{power.name}`" in page
        assert f"- {power.name}\n" in manifest
