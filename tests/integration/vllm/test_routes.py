"""What a rank's API process answers, through vLLM's own router and middleware."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from dynamo_elastic.testing.vllm_ranks import PYTHON, ROOT


@pytest.mark.vllm_elastic
@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_rank_that_has_left_can_be_told_to_come_back() -> None:
    script = Path(__file__).parent / "routes_app.py"
    done = subprocess.run(
        [PYTHON, script], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["attach"] == [200, {"handshake": 0.1}]
    assert found["facts"] == [200, {"workers": [{"method": "elastic_facts"}]}]
    assert found["fail"] == [200, {}]
    assert found["said"] == ["at {'data_parallel_rank': 2}", "a joiner ended"]
    assert found["attach nowhere"][0] == 400
    assert "rank: unknown" in found["attach nowhere"][1]["detail"]
    assert found["fail without a reason"] == 400
    assert found["attach twice"] == 409
    assert found["attach fails"][0] == 500
    assert found["scale"] == 503  # vLLM's own answer of a rank that has left
    assert found["routes"] == 5  # two of vLLM's, and ours once
