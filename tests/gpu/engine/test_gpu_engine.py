"""The reference engine on GPUs: one rank, two, one, two again, with streams that go on."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynamo_elastic.engine.reference.make_model import write_model
from dynamo_elastic.testing.engine_process import SMALL_SHAPE
from dynamo_elastic.testing.fleet import FleetLoad
from dynamo_elastic.testing.gpu_fleet import gpu_fleet
from dynamo_elastic.types import WorkerId

SHAPE = replace(SMALL_SHAPE, hidden_size=2048, num_hidden_layers=4, num_experts=16)
FIRST, SECOND = WorkerId("slot0"), WorkerId("slot1")
ENGINE: dict[str, Any] = {
    "slots_per_rank": 16,
    "batch_tokens": 8,
    "max_context": 64,
    "kv_blocks": 64,
    "peer_timeout_s": 1.0,
}


@pytest.mark.gpu(2)
@pytest.mark.timeout(150)
def test_tokens_are_the_same_at_every_width(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_model(model, SHAPE, seed=5, in_file=False)

    async def scenario() -> None:
        async with gpu_fleet(model, tmp_path / "run", [0, 1], deadline_s=110.0, **ENGINE) as ranks:
            await ranks.boot(1)
            load = FleetLoad(ranks, [FIRST])
            async with load.running():
                await asyncio.sleep(1.0)
                for _ in range(2):
                    await ranks.scale_up(2)
                    await asyncio.sleep(0.5)
                    await ranks.scale_down(1)
                    await asyncio.sleep(0.5)
            told = dict(load.told)
            assert len(told) > 20
            again = {r: (await ranks.all[FIRST].generate(r)).tokens for r in list(told)[:40]}
            assert again == {r: told[r] for r in again}

    asyncio.run(scenario())
