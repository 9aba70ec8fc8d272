"""Reference engines on GPUs, one each, without an agent: what a Fleet of them needs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from dynamo_elastic.engine.shape import read_shape
from dynamo_elastic.testing.engine_process import EngineProcess, engine_config
from dynamo_elastic.testing.fleet import Fleet
from dynamo_elastic.topology import EngineShape


def gpu_environment(slot: int, gpus: int) -> dict[str, str]:
    """As the agent gives it: the engine sees one GPU, and can map the memory of the others all the
    same."""
    return {"CUDA_VISIBLE_DEVICES": str(slot % gpus), "UCX_CUDA_IPC_CACHE": "n"}


@asynccontextmanager
async def gpu_fleet(
    model: Path, run_dir: Path, count: int, *, gpus: int, **engine: Any
) -> AsyncIterator[Fleet[EngineProcess]]:
    """`count` detached engines on `gpus` GPUs; `engine`: settings of the section of that name."""
    config = engine_config(model, run_dir, device="cuda", **engine)
    shape = EngineShape(read_shape(model).num_experts, int(engine["slots_per_rank"]))
    engines = [EngineProcess(config, slot, gpu_environment(slot, gpus)) for slot in range(count)]
    try:
        for booting in engines:
            await booting.detached()
        yield Fleet(engines, shape)
    except BaseException as exc:
        for failed in engines:
            exc.add_note(f"{failed.worker_id}: {failed.log()[-4000:]}")
        raise
    finally:
        for running in engines:
            await running.stop()
