"""Moves of experts in vLLM's own loop stop at once, begin again, and go through our exchange."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dynamo_elastic.testing.vllm_ranks import PYTHON, ROOT

pytestmark = [pytest.mark.vllm_elastic, pytest.mark.slow, pytest.mark.timeout(200)]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    answer: dict[str, Any] = said_by("moves_loop.py")
    return answer


def said_by(name: str) -> Any:
    script = Path(__file__).parent / name
    environment = os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [PYTHON, script], env=environment, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("taken", [0, 2])
def test_a_scale_down_does_not_wait_for_all_moves(found: dict[str, Any], taken: int) -> None:
    """Two GPUs stood still for 81 s: vLLM waits for every layer of every move."""
    stopped = found[f"stopped_after_{taken}"]
    assert stopped["taken"] == taken
    assert stopped["s"] < 0.5  # of the 2 s that all layers would take
    assert stopped["rests"]
    assert not stopped["rebalanced"]


def test_moves_can_begin_again(found: dict[str, Any]) -> None:
    assert found["same_class"]
    assert found["then_all"] == 40


def test_a_thread_of_moves_that_met_an_error_is_neither_waited_for_nor_the_last(
    found: dict[str, Any],
) -> None:
    stopped = found["stopped_after_an_error"]
    assert not stopped["alive"]
    assert stopped["s"] < 0.5
    assert found["then_all_again"] == 40


def test_experts_go_through_our_exchange() -> None:
    ranks = said_by("expert_moves_ranks.py")
    assert [said["made"] for said in ranks] == ["StagedMoves"] * 3
    assert [said["right"] for said in ranks] == [[True] * 6] * 3
    assert all(said["threads"] < 0 for said in ranks)  # closed: its agent is gone


def test_who_has_all_experts_keeps_them(found: dict[str, Any]) -> None:
    assert found["kept"] == [[0, 1, 2, 3]] * 2
    assert all(count >= 3 for count in found["copies"])  # of the expert with most of the load
    assert found["all_needed"] == [[0, 1, 2, 3]] * 2
