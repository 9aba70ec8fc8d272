"""Joiners and ranks that are lost at every bad moment, on real processes without a GPU.

tests/gpu/engine/test_faults.py plays the same on GPUs.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from dynamo_elastic.engine.reference.make_model import write_model
from dynamo_elastic.failpoints import KILL_ONCE_DIR
from dynamo_elastic.testing.engine_faults import Losses
from dynamo_elastic.testing.engine_process import SMALL_SHAPE, EngineProcess, engine_config
from dynamo_elastic.testing.fleet import Fleet
from dynamo_elastic.topology import EngineShape

pytestmark = [pytest.mark.nixl, pytest.mark.slow]

PEER_TIMEOUT_S = 1.0
LOW, HIGH = 2, 3
CASES: dict[str, Callable[[Losses], Awaitable[None]]] = {
    "killed in CONNECT": lambda to: to.before_commit("group.before_connect"),
    "stopped in CONNECT": lambda to: to.before_commit("group.before_connect", "stop 60"),
    "killed in STREAM": lambda to: to.before_commit(when="stream"),
    "killed after CHECK": lambda to: to.before_commit(when="check"),
    "killed right after COMMIT": lambda to: to.after_commit(),
    "a rank killed": lambda to: to.while_serving(signal.SIGKILL),
    "a rank stopped": lambda to: to.while_serving(signal.SIGSTOP),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.timeout(120)
def test_those_that_live_serve_on_and_grow_again(case: str, tmp_path: Path) -> None:
    model, failpoints = tmp_path / "model", tmp_path / "failpoints"
    write_model(model, SMALL_SHAPE, seed=5)
    failpoints.mkdir()
    slots = SMALL_SHAPE.num_experts
    config = engine_config(
        model,
        tmp_path / "run",
        slots_per_rank=slots,
        batch_tokens=4,
        max_context=64,
        kv_blocks=16,
        peer_timeout_s=PEER_TIMEOUT_S,
    )

    async def scenario() -> float:
        engines = [EngineProcess(config, slot) for slot in range(HIGH + 1)]
        try:
            for engine in engines:
                await engine.attach({KILL_ONCE_DIR: str(failpoints)})
            losses = Losses(Fleet(engines, EngineShape(slots, slots)), LOW, HIGH, failpoints)
            return await losses.run(lambda: CASES[case](losses))
        finally:
            for engine in engines:
                await engine.stop()

    assert asyncio.run(scenario()) < 2 * PEER_TIMEOUT_S + 1.0, case
