"""What stands in for a GPU in a rank of vLLM 0.33 that boots without a group: vLLM's CPU platform
has no expert parallelism. Imported in all three processes of the rank, by detached_serve.py and by
the names of its executor and its worker.
"""

from __future__ import annotations

import importlib
import types
from typing import Any

import torch

importlib.import_module("cpu_kernels")  # before vLLM

import vllm.config.parallel as parallel  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vllm.distributed.elastic_ep import standby_state  # noqa: E402
from vllm.distributed.eplb import eplb_state  # noqa: E402
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import (  # noqa: E402
    CPUUnquantizedExperts,
)
from vllm.v1.worker import cpu_worker  # noqa: E402

import dynamo_elastic.engine.vllm.v0_33.worker  # noqa: E402, F401 - it puts our groups in place
from dynamo_elastic.engine.vllm.elastic.settings import ElasticSettings  # noqa: E402
from dynamo_elastic.engine.vllm.v0_33 import detached  # noqa: E402
from dynamo_elastic.engine.vllm.v0_33.executor import ElasticExecutor  # noqa: E402
from dynamo_elastic.engine.vllm.v0_33.scaling import ElasticScaling  # noqa: E402
from dynamo_elastic.engine.vllm.worker import ElasticWorkerExtension  # noqa: E402


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


if ElasticSettings.from_environment().detached:
    detached.install(cpu_worker)
    cpu_worker.init_worker_distributed_environment = _init_environment


class Executor(ElasticExecutor):
    """Named on the command line, so that this module is imported in the engine core."""


class Scaling(ElasticScaling):
    """On the CPU vLLM makes no state of experts, and captures nothing."""

    all2all = False

    def load_model(self) -> None:
        self.worker.load_model()
        self.balance()

    def balance(self) -> None:
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

    def digest(self) -> str:
        """It has no weights of its group's."""
        return ""

    def _renew_buffer(self) -> None:
        """There is none."""

    def _prepare_eplb_communicator(self, eplb_group: Any) -> None:
        """There is none."""

    def switch_and_prepare(self) -> tuple[Any, ...]:
        standby = standby_state.pop_standby_groups()
        retired: tuple[Any, ...] = parallel_state._replace_active_groups(**standby)
        size = self.reconfig_request.new_data_parallel_size
        self.worker.vllm_config.parallel_config.data_parallel_size = size
        self.expect_steps()
        return retired

    def commit_scale_up(self, is_existing_worker: bool) -> None:
        self.mapping = self.receive_expert_mapping().tolist()
        # vLLM's dispatch of the CPU needs one.
        parallel_state._EP.device_communicator = Communicator(None)

    def joined(self) -> dict[str, Any]:
        sums = {name: float(tensor.sum()) for name, tensor in self.received.items()}
        seat = {"rank": parallel_state._DP.rank_in_group, "size": parallel_state._DP.world_size}
        return {"mapping": self.mapping, **seat, **sums}

    def let_go(self) -> dict[str, Any]:
        communicators = [s.communicator for s in self._eplb().model_states.values()]
        return {"communicators": [type(c).__name__ for c in communicators]}


class Worker(ElasticWorkerExtension, cpu_worker.CPUWorker):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.elastic_ep_executor = Scaling(self)

    def elastic_facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = self.elastic_ep_executor.joined()
        return facts
