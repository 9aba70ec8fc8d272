"""What stands in for GPUs in a whole deployment of ranks of vLLM 0.33, beside detached_cpu.py.

Every rank has all experts, so what is dispatched stays where it is. Groups, operations, handshakes
and weights on their way are real. Imported in all processes of a rank.
"""

from __future__ import annotations

import importlib
import types
from typing import Any

detached_cpu: Any = importlib.import_module("detached_cpu")  # before vLLM, whose kernels it chooses

import torch  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vllm.distributed.elastic_ep import standby_state  # noqa: E402
from vllm.distributed.eplb import eplb_state  # noqa: E402
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import (  # noqa: E402
    CPUUnquantizedExperts,
)

from dynamo_elastic.engine.vllm.v0_33 import groups  # noqa: E402
from dynamo_elastic.engine.vllm.v0_33.detached import NoMoves  # noqa: E402
from dynamo_elastic.engine.vllm.v0_33.scaling import ElasticScaling  # noqa: E402


def _apply_all(
    self: Any, output: Any, hidden_states: Any, w1: Any, w2: Any, topk_weights: Any, topk_ids: Any,
    activation: Any, global_num_experts: Any, expert_map: Any, *rest: Any, **more: Any,
) -> Any:  # fmt: skip
    """Any rank's copy of an expert is as good as this rank's."""
    here = (topk_ids % w1.shape[0]).to(topk_ids.dtype).contiguous()
    return detached_cpu._apply(
        self, output, hidden_states, w1, w2, topk_weights, here, activation,
        global_num_experts, None, *rest, **more,
    )  # fmt: skip


def _communicator(group: Any, *_: Any) -> Any:
    """With a manager that has its numbers alone, and no faults to look for."""
    rank, size = group.rank_in_group, group.world_size
    manager = types.SimpleNamespace(
        support_fault_tolerance=False, rank=rank, world_size=size, dp_rank=rank, dp_world_size=size
    )
    return detached_cpu.Communicator(manager)


CPUUnquantizedExperts.apply = _apply_all
groups.SlimGroup._communicator = _communicator  # type: ignore[method-assign, assignment]
eplb_state.create_eplb_communicator = lambda *_, **__: NoMoves()


class Executor(detached_cpu.Executor):  # type: ignore[misc]
    """Named on the command line, so that this module is imported in the engine core."""


class Scaling(detached_cpu.Scaling):  # type: ignore[misc]
    """Real weights go from founders to joiners."""

    def prepare_reconfiguration(self, request: Any, use_all2all: bool) -> None:
        """As on a GPU, without the buffer."""
        self._wait_for_group_cleanup()
        self.reconfig_request = request
        old, new = parallel_state.get_dp_group().world_size, request.new_data_parallel_size
        with groups.operation(self._over):
            standby_state.create_standby_groups(
                new_dp_size=new,
                new_world_size_across_dp=new,
                master_ip=request.new_data_parallel_master_ip,
                coord_store_port=request.coord_store_port,
                use_all2all=False,
            )
            if new > old:
                self.transfer_weights(old, new)

    def _replicated(self, experts: Any) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = ElasticScaling._replicated(self, experts)
        return found

    def digest(self) -> str:
        found: str = ElasticScaling.digest(self)
        return found

    def commit_scale_up(self, is_existing_worker: bool) -> None:
        if is_existing_worker:
            self.broadcast_expert_mapping()
            self._start_group_cleanup(self.switch_and_prepare())
        else:
            self.receive_expert_mapping()
        parallel_state._EP.device_communicator = _communicator(parallel_state._EP)

    def warm_and_capture(self) -> None:
        """Nothing is captured, and kernels of the CPU have no workspace."""

    def placement(self) -> dict[str, Any]:
        """Everybody has all experts, and none ever moves."""
        return {"complete": 1, "placement": "all"}

    def perform_scale_down_eplb_reshuffle(self, new_dp_size: int) -> None:
        """Everybody has all experts."""

    def let_go(self) -> dict[str, Any]:
        """As if its memory had been unmapped."""
        for tensor in self._replicated(self._model().expert_weights).values():
            tensor.zero_()
        return {}


class Worker(detached_cpu.Worker):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.elastic_ep_executor = Scaling(self)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if self.model_runner.eplb_state is None:
            self.elastic_ep_executor.balance()
