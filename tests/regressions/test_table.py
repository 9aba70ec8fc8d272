"""docs/reliability.md names a test for each public report, and every test of one is named there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
DOCUMENT = TESTS.parent / "docs/reliability.md"
ROW = re.compile(r"^\| ([\w-]+#\d+) \| .* \| `([\w/.]+)::(\w+)` \|$", re.MULTILINE)
REPORT = re.compile(r"[a-z][\w-]*#\d+")

WANTED = frozenset(
    [
        "vllm#53947",
        "vllm#50778",
        "dynamo#12991",
        "dynamo#14053",
        "dynamo#8216",
        "vllm#37357",
        "vllm#37131",
        "vllm#43202",
        "sglang#22788",
        "dynamo#3493",
        "dynamo#10665",
        "dynamo#12591",
        "dynamo#13500",
        "modelexpress#502",
        "cuda-checkpoint#18",
        "criu#2980",
        "dynamo#13559",
        "dynamo#12428",
        "dynamo#9774",
        "nixl#2217",
        "nixl#2044",
        "nixl#2051",
    ]
)


def rows() -> list[tuple[str, str, str]]:
    return ROW.findall(DOCUMENT.read_text())


def cases() -> Iterator[tuple[str, str, str]]:
    """(file, test, docstring) of the folders of reports."""
    for folder in ("regressions", "gpu/regressions"):
        for path in sorted((TESTS / folder).glob("test_*.py")):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    text = ast.get_docstring(node) or ""
                    if node.name.startswith("test_"):
                        yield str(path.relative_to(TESTS)), node.name, text


def test_every_report_has_a_row() -> None:
    assert {report for report, _, _ in rows()} == WANTED


def test_every_row_names_a_test_that_names_the_report() -> None:
    texts = {(file, name): text for file, name, text in cases()}
    wrong = [row for row in rows() if row[0] not in texts.get(row[1:], "")]
    assert wrong == []


def test_every_test_of_a_report_has_its_row() -> None:
    named = set(rows())
    missing = [
        (report, file, name)
        for file, name, text in cases()
        for report in REPORT.findall(text.partition(": ")[0])
        if report in WANTED and (report, file, name) not in named
    ]
    assert missing == []


def test_vllm_43202_has_its_two() -> None:
    assert [report for report, _, _ in rows()].count("vllm#43202") == 2
