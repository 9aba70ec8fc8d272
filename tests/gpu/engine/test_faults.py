"""Joiners and ranks that are lost at every bad moment, on real GPUs: two, and four where there are.

A spare engine takes the place of the lost one on its GPU.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dynamo_elastic.engine.reference.make_model import write_model
from dynamo_elastic.failpoints import KILL_ONCE_DIR
from dynamo_elastic.testing.engine_faults import Losses
from dynamo_elastic.testing.engine_process import SMALL_SHAPE
from dynamo_elastic.testing.gpu_fleet import gpu_fleet

SHAPE = replace(SMALL_SHAPE, hidden_size=2048, num_hidden_layers=4, num_experts=16)
PEER_TIMEOUT_S = 0.4
ENGINE = {
    "slots_per_rank": 16,
    "batch_tokens": 8,
    "max_context": 64,
    "kv_blocks": 64,
    "peer_timeout_s": PEER_TIMEOUT_S,
}
WIDTHS = [
    pytest.param((1, 2), marks=pytest.mark.gpu(2), id="1-2"),
    pytest.param((2, 4), marks=pytest.mark.gpu(4), id="2-4"),
]
CASES: dict[str, Callable[[Losses], Awaitable[None]]] = {
    "killed before it meets the others": lambda to: to.before_commit("group.before_connect"),
    "stopped before it meets the others": lambda to: to.before_commit(
        "group.before_connect", "stop 60"
    ),
    "killed in CONNECT": lambda to: to.before_commit("buffer.before_connect"),
    "stopped in CONNECT": lambda to: to.before_commit("buffer.before_connect", "stop 60"),
    "killed in STREAM": lambda to: to.before_commit(when="stream"),
    "killed after CHECK": lambda to: to.before_commit(when="check"),
    "killed right after COMMIT": lambda to: to.after_commit(),
    "a rank killed": lambda to: to.while_serving(signal.SIGKILL),
    "a rank stopped": lambda to: to.while_serving(signal.SIGSTOP),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.timeout(115)
def test_those_that_live_serve_on_and_grow_again(
    case: str, widths: tuple[int, int], tmp_path: Path
) -> None:
    low, high = widths
    model, failpoints = tmp_path / "model", tmp_path / "failpoints"
    write_model(model, SHAPE, seed=5, in_file=False)
    failpoints.mkdir()
    lost_gpu = 1 if case.startswith("a rank") else high - 1

    async def scenario() -> float:
        gpus = [*range(high), lost_gpu]
        environment = {KILL_ONCE_DIR: str(failpoints)}
        async with gpu_fleet(
            model, tmp_path / "run", gpus, deadline_s=80.0, environment=environment, **ENGINE
        ) as ranks:
            losses = Losses(ranks, low, high, failpoints)
            return await losses.run(lambda: CASES[case](losses))

    longest_gap_s = asyncio.run(scenario())
    if folder := os.environ.get("OUT"):
        with Path(folder, "faults.jsonl").open("a") as file:
            row = {"case": case, "ranks": [low, high], "longest_gap_s": round(longest_gap_s, 4)}
            file.write(json.dumps(row) + "\n")
    assert longest_gap_s < 1.0, case
