"""vLLM 0.33's own schedulers when a step is thrown away, in .venv-vllm-elastic: prints as JSON of
how many tokens a request was computed in each step, and its own. `python thrown_step.py FOLDER`."""

from __future__ import annotations

import importlib
import json
import sys
import types
from collections import deque
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

importlib.import_module("cpu_kernels")  # before vLLM

from vllm import SamplingParams  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402
from vllm.v1.core.sched.interface import PauseState  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.outputs import ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request  # noqa: E402
from vllm.v1.structured_output import StructuredOutputManager  # noqa: E402

from dynamo_elastic.engine.vllm.make_model import write_model  # noqa: E402
from dynamo_elastic.engine.vllm.v0_33.faults import RestingCore  # noqa: E402

PROMPT, TOKENS, BLOCK, BLOCKS = list(range(3, 43)), 4, 16, 64
FIRST = 101
"""Token of the first step; each step that counts makes the next."""


class Run:
    """One scheduler with one request."""

    def __init__(self, made: type[Scheduler], config: Any) -> None:
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        cache = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
        self.scheduler = made(config, cache, StructuredOutputManager(config), BLOCK)
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
        self.scheduler.add_request(Request("r", PROMPT, params, None))
        self.counts: list[int] = []
        self.tokens: list[int] = []

    def schedule(self) -> Any:
        """A step; notes of how many tokens its request is computed."""
        planned = self.scheduler.schedule()
        self.counts.append(planned.num_scheduled_tokens.get("r", 0))
        return planned

    def count(self, planned: Any) -> None:
        """The step has ended well."""
        made = ModelRunnerOutput(["r"], {"r": 0}, [[FIRST + len(self.tokens)]])
        for outputs in self.scheduler.update_from_output(planned, made).values():
            for output in outputs.outputs:
                self.tokens += output.new_token_ids

    def throw_away(self, *planned: Any) -> None:
        """Steps have failed that were under way: what an engine core does then."""
        failed: deque[Any] = deque()
        for step in planned:
            future: Future[Any] = Future()
            future.set_exception(RuntimeError("Fault detected in EP all2all communication"))
            failed.appendleft((future, step, future))
        core = types.SimpleNamespace(scheduler=self.scheduler, batch_queue=failed)
        RestingCore._throw_step_away(core)  # type: ignore[arg-type]
        assert not failed
        assert not self.scheduler.has_unfinished_requests(), "nothing is scheduled at rest"
        self.scheduler.set_pause_state(PauseState.UNPAUSED)

    def finish(self) -> dict[str, Any]:
        while self.scheduler.has_unfinished_requests():
            self.count(self.schedule())
        return {"counts": self.counts, "tokens": self.tokens}


def main() -> None:
    folder = Path(sys.argv[1])
    write_model(folder)
    found = {}
    for name, made in (("one step", Scheduler), ("steps ahead", AsyncScheduler)):
        asynchronous = made is AsyncScheduler
        config = EngineArgs(
            model=str(folder), max_model_len=256, max_num_seqs=4, skip_tokenizer_init=True,
            enforce_eager=True, async_scheduling=asynchronous,
        ).create_engine_config()  # fmt: skip
        config.cache_config.num_gpu_blocks = BLOCKS
        run = Run(made, config)
        run.count(run.schedule())
        under_way = [run.schedule() for _ in range(1 + asynchronous)]
        run.throw_away(*under_way)
        found[name] = run.finish()
        first = Run(made, config)  # its first step fails
        first.throw_away(first.schedule())
        found[f"{name}, the first"] = first.finish()
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
