"""A rank of vLLM 0.33 that boots without a group, on the CPU: API process (this one), engine core
and worker. It answers JSON lines: what it generates, what its processes hold, detached.

vLLM's CPU platform has no expert parallelism; what stands in for it is at the top. This module is
imported in all three processes, by the names of its executor and its worker.
"""

from __future__ import annotations

import asyncio
import collections
import json
import os
import re
import sys
import time
import types
from pathlib import Path
from typing import Any

import torch

# Kernels for a machine that any sandbox is: some say that they have AMX, and end whoever uses it.
torch.cpu._is_avx512_bf16_supported = torch.cpu._is_amx_tile_supported = lambda: False

import vllm.config.parallel as parallel  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vllm.distributed.elastic_ep import standby_state  # noqa: E402
from vllm.distributed.eplb import eplb_state  # noqa: E402
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import (  # noqa: E402
    CPUUnquantizedExperts,
)
from vllm.v1.worker import cpu_worker, dp_utils  # noqa: E402

from dynamo_elastic.engine.vllm.v0_33 import detached  # noqa: E402
from dynamo_elastic.engine.vllm.v0_33.executor import ElasticExecutor  # noqa: E402
from dynamo_elastic.engine.vllm.v0_33.worker import ElasticScaling  # noqa: E402


class _Capable:
    """vLLM's CPU platform, which says that it can balance experts."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def is_cuda_alike(self) -> bool:
        return True


parallel.current_platform = _Capable(parallel.current_platform)
_apply = CPUUnquantizedExperts.apply


def _apply_local(
    self: Any, output: Any, hidden_states: Any, w1: Any, w2: Any, topk_weights: Any, topk_ids: Any,
    activation: Any, global_num_experts: Any, expert_map: Any, *rest: Any, **more: Any,
) -> Any:  # fmt: skip
    """The kernel of the CPU knows no expert map."""
    if expert_map is not None:
        local = expert_map.to(topk_ids.device)[topk_ids.long()]
        topk_weights = topk_weights.masked_fill(local < 0, 0)
        topk_ids = local.clamp(min=0).to(topk_ids.dtype).contiguous()
    return _apply(
        self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation,
        global_num_experts, expert_map, *rest, **more,
    )  # fmt: skip


CPUUnquantizedExperts.apply = _apply_local


class Communicator(detached.LocalCommunicator):
    """What is dispatched stays here; on the CPU without a buffer."""

    def dispatch_router_logits(self, hidden: Any, logits: Any, *_: Any, **__: Any) -> Any:
        return hidden, logits

    def dispatch(self, hidden: Any, weights: Any, ids: Any, *_: Any, **__: Any) -> Any:
        return hidden, weights, ids

    def combine(self, hidden: Any, *_: Any, **__: Any) -> Any:
        return hidden

    def allocate_combine_input(self, *_: Any, **__: Any) -> None:
        return None

    def combine_into_output(self, hidden: Any, output: Any, *_: Any) -> Any:
        output.copy_(hidden)
        return output


def _init_environment(*args: Any, **kwargs: Any) -> None:
    detached.init_environment(*args, **kwargs)
    group = parallel_state._EP
    group.device_communicator = Communicator(group.device_communicator.all2all_manager)


detached.install(cpu_worker)
cpu_worker.init_worker_distributed_environment = _init_environment


class Executor(ElasticExecutor):
    """Named on the command line, so that this module is imported in the engine core."""


class Scaling(ElasticScaling):
    """On the CPU vLLM makes no state of experts, and captures nothing."""

    all2all = False

    def load_model(self) -> None:
        self.worker.load_model()
        event = types.SimpleNamespace(wait=lambda *_: None, record=lambda *_: None)
        eplb_state.CpuGpuEvent = lambda: event
        runner = self.worker.model_runner
        state = eplb_state.EplbState(self.worker.vllm_config.parallel_config, torch.device("cpu"))
        state.add_model(runner.get_model(), runner.model_config)
        runner.eplb_state, runner.eep_eplb_suppressed = state, True

    def capture(self) -> None:
        self.worker.compile_or_warm_up_model()

    def _destroy_retired_groups(self, groups: Any) -> None:
        for group in groups:
            if group is not None:
                group.destroy()

    # It joins a group of elastic_ranks.py, whose ranks have two tensors and a map, and no model.

    def _replicated(self, _: Any) -> dict[str, torch.Tensor]:
        self.received = {"dense": torch.zeros(7, 300), "scales": torch.zeros(5, dtype=torch.int64)}
        return self.received

    def _renew_buffer(self) -> None:
        """There is none."""

    def _prepare_eplb_communicator(self, eplb_group: Any) -> None:
        """There is none."""

    def switch_and_prepare(self) -> tuple[Any, ...]:
        standby = standby_state.pop_standby_groups()
        retired: tuple[Any, ...] = parallel_state._replace_active_groups(**standby)
        return retired

    def commit_scale_up(self, is_existing_worker: bool) -> None:
        self.mapping = self.receive_expert_mapping().tolist()
        # The others agree on no batch; and vLLM's dispatch of the CPU needs a communicator.
        dp_utils._skip_dp_coordination.set(True)
        parallel_state._EP.device_communicator = Communicator(None)

    def joined(self) -> dict[str, Any]:
        sums = {name: float(tensor.sum()) for name, tensor in self.received.items()}
        return {"mapping": self.mapping, "size": parallel_state._DP.world_size, **sums}

    def let_go(self) -> dict[str, Any]:
        communicators = [s.communicator for s in self._eplb().model_states.values()]
        return {"communicators": [type(c).__name__ for c in communicators]}


class Worker(cpu_worker.CPUWorker):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.elastic_ep_executor = Scaling(self)


def held(pid: int) -> dict[str, int]:
    """Descriptors of a process, by kind; sockets by family."""
    sockets = {}
    for family in ("tcp", "tcp6", "udp", "udp6", "unix", "netlink", "packet", "raw"):
        for line in Path(f"/proc/{pid}/net/{family}").read_text().splitlines()[1:]:
            inode = line.split()[{"unix": 6, "netlink": 9, "packet": 8}.get(family, 9)]
            sockets[inode] = family
    found: collections.Counter[str] = collections.Counter()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except OSError:
            continue
        match = re.match(r"socket:\[(\d+)\]", target)
        if match:
            found[f"socket {sockets.get(match[1], 'of another kind')}"] += 1
        else:
            found[target if target.startswith("anon_inode") else target.split(":")[0]] += 1
    return dict(found)


def tree() -> list[int]:
    children = collections.defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            children[parent].append(int(entry.name))
    found, left = [], [os.getpid()]
    while left:
        found.append(left.pop())
        left += children[found[-1]]
    return found


def say(**words: Any) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


async def main(model: str, rpc_port: int) -> None:
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    began_s = time.monotonic()
    arguments = AsyncEngineArgs(
        model=model, enforce_eager=True, max_model_len=256, max_num_seqs=8,
        kv_cache_memory_bytes=64 << 20, data_parallel_size=3, data_parallel_rank=2,
        data_parallel_address="127.0.0.1", data_parallel_rpc_port=rpc_port,
        data_parallel_external_lb=True, enable_expert_parallel=True, enable_elastic_ep=True,
        enable_eplb=True, elastic_ep_max_dp_size=3,
        eplb_config={"num_redundant_experts": 1, "use_async": False},
        distributed_executor_backend="detached_engine.Executor",
        worker_cls="detached_engine.Worker", enable_log_requests=False,
    )  # fmt: skip
    engine = AsyncLLM.from_engine_args(arguments)
    utility = engine.engine_core.call_utility_async

    async def generate(name: str) -> list[int]:
        asked = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        prompt = {"prompt_token_ids": [5, 6, 7]}
        made = [output async for output in engine.generate(prompt, asked, name)]
        return list(made[-1].outputs[0].token_ids)

    say(tokens=await generate("alone"), boot_s=round(time.monotonic() - began_s, 1))
    say(detached=await utility("detach_elastic_ep"))
    say(held={pid: held(pid) for pid in tree()})
    if sys.stdin.readline().strip() == "attach":
        say(attached=await engine.engine_core.external_eep_coordinator.attach())
        say(tokens_in_group=await asyncio.wait_for(generate("in the group"), 60))
        (said,) = await engine.collective_rpc("elastic_ep_execute", args=("joined",))
        say(joined=said)
        sys.stdin.readline()  # until the group is over
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
