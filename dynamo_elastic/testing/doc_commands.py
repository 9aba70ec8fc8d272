"""Blocks of code in the pages of the documentation, and what is said of who runs them.

A block of commands is run by tests/docs, in one scratch deployment, unless the line before it is a
comment: `<!-- needs: kubernetes -->` names what a test machine does not have (NEEDS), and
`<!-- run by: tests/... -->` the test that runs it instead.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import dynamo_elastic

ROOT = Path(dynamo_elastic.__file__).parents[1]
COMMANDS = "sh"
LANGUAGES = frozenset({COMMANDS, "json", "mermaid", "text", "yaml"})
NEEDS = {
    "docker": "a Docker daemon",
    "kubernetes": "a cluster with GPU nodes",
    "setup": "minutes, or a machine of its own",
    "systemd": "a running systemd",
    "vllm": "vLLM",
}

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\S*)(?P<more>.*)$")
_MARK = re.compile(r"^<!-- (?P<key>needs|run by): (?P<value>.+) -->$")


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block. `needs` and `run_by`: '' unless the page says so."""

    page: Path
    line: int
    language: str
    text: str
    needs: str = ""
    run_by: str = ""

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"

    def commands(self) -> list[str]:
        """Its lines, those that go on joined, without comments."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [said for line in lines if (said := line.partition("#")[0].strip())]


def pages() -> list[Path]:
    """README and the pages of docs/ that are written by hand."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path) -> Iterator[Block]:
    """Every block of `page`, in order."""
    lines = page.read_text().splitlines()
    at = 0
    while at < len(lines):
        fence = _FENCE.match(lines[at])
        at += 1
        if fence is None:
            continue
        first, end = at, f"{fence['indent']}```"
        while lines[at] != end:
            at += 1
        mark = _MARK.match(lines[first - 2].strip()) if first > 1 else None
        said = {mark["key"].replace(" ", "_"): mark["value"]} if mark else {}
        text = textwrap.dedent("\n".join(lines[first:at])) + "\n"
        yield Block(page, first, fence["language"] + fence["more"], text, **said)
        at += 1
