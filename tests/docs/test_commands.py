"""Each command of the documentation is run: the pages' blocks in one deployment, started as the
tutorial says; those that need more than a test machine has are read."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo_elastic.testing.doc_commands import (
    COMMANDS,
    LANGUAGES,
    NEEDS,
    ROOT,
    Block,
    blocks,
    pages,
)
from dynamo_elastic.testing.etcd_process import free_port
from dynamo_elastic.testing.served import CLI

real = [
    pytest.mark.root,
    pytest.mark.criu,
    pytest.mark.etcd,
    pytest.mark.nixl,
    pytest.mark.dynamo,
    pytest.mark.timeout(600),
]

ALL = [block for page in pages() for block in blocks(page)]
RUN_HERE = [b for b in ALL if b.language == COMMANDS and not b.needs and not b.run_by]
TUTORIAL = "tutorial.md"
PAGES = sorted({b.page.name for b in RUN_HERE}, key=lambda name: (name != TUTORIAL, name))
SERVE = "dynamo-elastic serve"
TIMEOUT_S = 240.0


@pytest.mark.parametrize("block", ALL, ids=str)
def test_a_block_says_what_it_is(block: Block) -> None:
    """So that no command hides in a block that nobody runs."""
    assert block.language in LANGUAGES, f"{block}: one of {sorted(LANGUAGES)} after the fence"
    if block.language != COMMANDS:
        assert not block.needs
        assert not block.run_by
        starts = ("dynamo-elastic ", "python ", "make ", "curl ", "kubectl ", "$ ")
        assert not block.text.startswith(starts), f"{block}: commands are blocks of {COMMANDS}"


@pytest.mark.parametrize("block", [b for b in ALL if b.needs], ids=str)
def test_what_can_not_be_run_here_is_at_least_right(block: Block) -> None:
    """Flags of our own commands are read by tests/unit/cli/test_reference.py."""
    assert block.needs in NEEDS
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in block.commands():
        for target in re.findall(r"^make ([\w-]+)", command):
            assert target in targets, f"{block}: no target {target}"
        for path in re.findall(r"(?<![\w/.])(?:deploy|examples|benchmarks)/[\w./-]+\w", command):
            assert (ROOT / path).exists() or list(ROOT.glob(f"{path}*")), f"{block}: no {path}"


@pytest.mark.parametrize("block", [b for b in ALL if b.run_by], ids=str)
def test_whoever_else_runs_it_names_the_page(block: Block) -> None:
    assert block.page.name in (ROOT / block.run_by).read_text()


class Machine:
    """A user's machine: a folder with the examples, ports of its own, `serve` in another shell."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "examples").symlink_to(ROOT / "examples")
        for name in ("d.yaml", "deployment.yaml"):
            (directory / name).symlink_to(ROOT / "examples" / "local.yaml")
        self.run_dir = directory / "run"
        self.ports = {name: free_port() for name in ("frontend", "api", "etcd", "peer", "control")}
        programs = Path(sys.executable).parent
        self.environment = os.environ | {
            "DYN_ELASTIC_COORDINATOR_API_PORT": str(self.ports["api"]),
            "DYN_ELASTIC_ETCD_PEER_PORT": str(self.ports["peer"]),
            "DYN_ELASTIC_ETCD_PORT": str(self.ports["etcd"]),
            "DYN_ELASTIC_FRONTEND_PORT": str(self.ports["frontend"]),
            "DYN_ELASTIC_PLANNER_CONTROL_PORT": str(self.ports["control"]),
            "DYN_ELASTIC_RUN_DIR": str(self.run_dir),
            "DYN_ELASTIC_SNAPSHOT_CATALOG": str(directory / "var" / "images"),
            "PATH": f"{programs}:{os.environ['PATH']}",
        }
        self.server: subprocess.Popen[bytes] | None = None
        self.log = directory / "serve.log"

    def run(self, block: Block) -> None:
        """Its commands, as a shell runs them. Fails with what the first wrong one said."""
        text = self.here(block.text)
        if SERVE in text and "--dry-run" not in text:
            self.serve(text)
            return
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=self.directory,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"{block}\n{text}\n{done.stdout}\n{done.stderr}"

    def here(self, text: str) -> str:
        """`text` with this machine's ports, paths, images and operations."""
        replaced = {
            "127.0.0.1:8000": f"127.0.0.1:{self.ports['frontend']}",
            "127.0.0.1:9087": f"127.0.0.1:{self.ports['api']}",
            "/run/dynamo-elastic/moe": str(self.run_dir / "local"),
            "/etc/dynamo-elastic/": f"{self.directory}/",
        }
        for written, found in replaced.items():
            text = text.replace(written, found)
        if re.search(r"\bIMAGE\b", text):
            text = re.sub(r"\bIMAGE\b", self.image(), text)
        if "up-7" in text:
            text = text.replace("up-7", self.operation())
        return text

    def image(self) -> str:
        """The newest of slot 0: made by these pages, so no engine was restored from it."""
        listed = json.loads(self.output("snapshot", "list", "-f", "d.yaml", "--json"))
        found = [i for i in listed if i["slot"] == 0]
        return str(max(found, key=lambda i: i["created_at"])["image_id"])

    def operation(self) -> str:
        found = re.findall(r"\bup-\d+", self.output("timeline", "--list", "-f", "d.yaml"))
        return str(found[0])

    def output(self, *arguments: str) -> str:
        done = subprocess.run(
            [*CLI, *arguments],
            cwd=self.directory,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
        )
        return done.stdout

    def serve(self, text: str) -> None:
        """What the reader leaves running in a shell of its own."""
        if self.server is not None:
            return
        with self.log.open("wb") as log:
            self.server = subprocess.Popen(
                ["bash", "-c", f"exec {text.strip()}"],
                cwd=self.directory,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline_s = time.monotonic() + TIMEOUT_S
        while "scale it:" not in (said := self.log.read_text(errors="replace")):
            assert self.server.poll() is None, said
            assert time.monotonic() < deadline_s, said
            time.sleep(0.1)

    def stop(self) -> int:
        """Ctrl-C; the exit code of `serve`."""
        if self.server is None:
            return 0
        self.server.send_signal(signal.SIGINT)
        return self.server.wait(60)


def of_page(name: str) -> list[Block]:
    return [b for b in RUN_HERE if b.page.name == name]


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """As it is when the tutorial's reader has started `serve`."""
    machine = Machine(tmp_path_factory.mktemp("docs"))
    try:
        for block in of_page(TUTORIAL):
            machine.run(block)
            if machine.server is not None:
                break
        yield machine
    finally:
        code = machine.stop()
    assert code == 0, machine.log.read_text()


def marks(page: str) -> list[pytest.MarkDecorator]:
    """The tutorial is for every run; the other pages' sixty seconds are for `make test-all`."""
    return real if page == TUTORIAL else [*real, pytest.mark.slow]


@pytest.mark.parametrize("page", [pytest.param(p, marks=marks(p)) for p in PAGES])
def test_the_commands_of_a_page_run(page: str, machine: Machine) -> None:
    found = of_page(page)
    if page == TUTORIAL:  # up to `serve` the fixture has run it
        texts = [SERVE in b.text and "--dry-run" not in b.text for b in found]
        found = found[texts.index(True) + 1 :]
    for block in found:
        machine.run(block)
