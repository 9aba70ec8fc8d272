"""A request whose step is thrown away gets each of its tokens once, and is computed anew."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dynamo_elastic.testing.vllm_ranks import PYTHON, ROOT

pytestmark = [pytest.mark.vllm_elastic, pytest.mark.slow, pytest.mark.timeout(300)]

PROMPT = 40


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    script = Path(__file__).parent / "thrown_step.py"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [PYTHON, script, tmp_path_factory.mktemp("thrown") / "model"],
        env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize("name", ["one step", "steps ahead"])
def test_every_token_comes_once(found: dict[str, Any], name: str) -> None:
    for run in (found[name], found[f"{name}, the first"]):
        assert run["tokens"] == [101, 102, 103, 104]


@pytest.mark.parametrize(("name", "thrown"), [("one step", 1), ("steps ahead", 2)])
def test_nothing_that_the_failed_step_wrote_is_used(
    found: dict[str, Any], name: str, thrown: int
) -> None:
    assert found[name]["counts"] == [PROMPT, *[1] * thrown, PROMPT + 1, 1, 1]
    assert found[f"{name}, the first"]["counts"] == [PROMPT, PROMPT, 1, 1, 1]
