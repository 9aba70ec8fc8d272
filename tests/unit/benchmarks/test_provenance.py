"""The command of a result can be repeated anywhere: it names no place of the machine it ran on."""

from __future__ import annotations

from pathlib import Path

import pytest
from provenance import _program

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (str(ROOT / "benchmarks/cpu_scale.py"), ["benchmarks/cpu_scale.py"]),
        (
            str(ROOT / "dynamo_elastic/testing/chaos/__main__.py"),
            ["-m", "dynamo_elastic.testing.chaos"],
        ),
        ("/elsewhere/program.py", ["/elsewhere/program.py"]),
    ],
)
def test_a_program_is_named_from_the_root(path: str, said: list[str]) -> None:
    assert _program(path) == said
