"""Reference engines on GPUs, one each, without an agent: what a Fleet of them needs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from dynamo_elastic.engine.shape import read_shape
from dynamo_elastic.testing.engine_process import EngineProcess, engine_config
from dynamo_elastic.testing.fleet import Fleet
from dynamo_elastic.topology import EngineShape

BOOT_TIMEOUT_S = 45.0


def gpu_environment(gpu: int) -> dict[str, str]:
    """As the agent gives it: the engine sees one GPU, and can map the memory of the others all the
    same."""
    return {"CUDA_VISIBLE_DEVICES": str(gpu), "UCX_CUDA_IPC_CACHE": "n"}


@asynccontextmanager
async def gpu_fleet(
    model: Path,
    run_dir: Path,
    gpus: Sequence[int],
    *,
    deadline_s: float,
    environment: Mapping[str, str] | None = None,
    **engine: Any,
) -> AsyncIterator[Fleet[EngineProcess]]:
    """Attached engines of slots 0, 1, ..., each on the GPU that `gpus` has for it; `engine`:
    settings of the section of that name. What takes longer than `deadline_s` in all is cut off, so
    that their logs are seen; they also go to the folder that OUT names."""
    config = engine_config(model, run_dir, device="cuda", **engine)
    shape = EngineShape(read_shape(model).num_experts, int(engine["slots_per_rank"]))
    engines = [EngineProcess(config, slot, gpu_environment(gpu)) for slot, gpu in enumerate(gpus)]
    try:
        async with asyncio.timeout(deadline_s):
            async with asyncio.timeout(BOOT_TIMEOUT_S):
                await asyncio.gather(*(e.attach(environment) for e in engines))
            yield Fleet(engines, shape)
    except BaseException as exc:
        for failed in engines:
            exc.add_note(f"{failed.worker_id}: {failed.log()[-4000:]}")
        raise
    finally:
        for running in engines:
            await running.stop()
        _keep_logs(engines)


def _keep_logs(engines: Sequence[EngineProcess]) -> None:
    folder = os.environ.get("OUT")
    for engine in engines if folder else ():
        Path(f"{folder}/{os.getpid()}-{engine.worker_id}.log").write_text(engine.log())
