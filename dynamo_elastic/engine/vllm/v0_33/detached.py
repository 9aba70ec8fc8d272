"""A worker that boots without a group: ranks and sizes, and nobody behind them.

What it has is what a rank has that has left: a model, a KV cache, graphs, and no socket, store or
communicator. So it comes to a group the same way, by ElasticScaling.attach(). It boots as a rank of
the largest group, so that what is compiled and captured is good for every size.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch.testing._internal.distributed.fake_pg import FakeStore
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators import all2all
from vllm.distributed.eplb import eplb_state as eplb
from vllm.v1.worker import dp_utils, gpu_worker

from dynamo_elastic.engine.vllm.elastic.groups import Numbers
from dynamo_elastic.engine.vllm.v0_33.groups import Seat

_ALONE = ("_TP", "_PP", "_PCP", "_DCP")
"""Groups of one rank here, each by the name that vLLM's module has for it."""


class LocalGroup(Seat):
    """A group whose other ranks are not there. What a step asks of it, it answers for itself; what
    would need a peer raises RuntimeError."""

    def __init__(self, name: str, rank: int, size: int, local_rank: int) -> None:
        super().__init__(rank, size, local_rank, "local")
        self.unique_name = f"{name}:local"
        parallel_state._register_group(self)
        self.device = self._device()
        self.cpu_timeout = None
        self.cpu_group = self.device_group = Numbers(rank, size)
        self.tcp_store_group = None
        self.use_device_communicator = False
        self.mq_broadcaster = None
        self.use_custom_op_call = self.use_cpu_custom_send_recv = False

    def destroy(self) -> None:
        """Nobody knows of it."""

    def barrier(self) -> None:
        """Nobody else is there."""

    def expect_steps(self, timeout: timedelta) -> None:
        """Nobody else is there."""

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        return input_

    def broadcast(self, input_: torch.Tensor, src: int = 0) -> torch.Tensor:
        return input_

    def broadcast_object(self, obj: Any = None, src: int = 0) -> Any:
        return obj

    def cpu_all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        """As if every other rank did what this one does."""
        if tensor.dim() == 2:
            tensor[:] = tensor[:, self.rank_in_group, None].clone()
        return tensor

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(f"a rank without a group was asked for a peer ({self.unique_name})")

    all_gather = all_gatherv = reduce_scatter = reduce_scatterv = gather = _refuse
    broadcast_tensor_dict = send_tensor_dict = recv_tensor_dict = send = recv = _refuse


class LocalCommunicator:
    """An EP group's communicator without peers: its all-to-all manager, and nothing else."""

    def __init__(self, manager: Any) -> None:
        self.all2all_manager = manager

    def destroy(self) -> None:
        """Its buffer is destroyed when the rank lets go of it."""


class LocalManager(all2all.NixlEPAll2AllManager):  # type: ignore[misc]
    """Owner of an expert buffer that is connected to nobody: what is dispatched stays here."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = self.dp_rank = rank
        self.world_size = self.dp_world_size = size
        self.tcp_store_group, self.internode = None, False
        # The model runner asks once: it has to look at faults when there are peers.
        self.support_fault_tolerance = True

    def _init_buffer(
        self, max_num_tokens_per_dp_rank: int, token_hidden_size: int, num_experts_per_rank: int
    ) -> None:
        made: Any = importlib.import_module("nixl_ep").Buffer(rank=self.rank)
        made.update_memory_buffers(
            num_ranks=self.world_size,
            num_experts_per_rank=num_experts_per_rank,
            num_rdma_bytes=made.get_rdma_size_hint(
                num_max_dispatch_tokens_per_rank=max_num_tokens_per_dp_rank,
                hidden=token_hidden_size,
                num_ranks=self.world_size,
                num_experts=self.world_size * num_experts_per_rank,
            ),
        )
        all2all.NixlEPAll2AllManager._buffer = all2all._NixlEPBufferState(
            buffer=made,
            max_num_ep_ranks=self.world_size,
            connected_ep_size=0,
            active_ep_size=0,
        )

    @contextmanager
    def mask_remote_ranks(self) -> Iterator[None]:
        """There are none: a fresh buffer has all others masked."""
        yield

    def query_fault(self) -> torch.Tensor:
        return torch.zeros((), dtype=torch.bool, device="cuda")


class NoMoves:
    """In the place of vLLM's EplbCommunicator: a rank that is alone moves no experts."""

    needs_profile_buffer_reservation = False

    def set_stream(self, stream: Any) -> None:
        """Nothing will run on it."""

    def execute(self) -> NoReturn:
        raise RuntimeError("a rank without a group was asked to move experts")


def init_environment(
    vllm_config: Any,
    rank: int,
    distributed_init_method: str | None = None,
    local_rank: int = -1,
    backend: str = "",
) -> None:
    """In the place of vLLM's init_worker_distributed_environment: no store, no process group."""
    config = vllm_config.parallel_config
    parallel_state.set_custom_all_reduce(False)
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    seat, size = config.data_parallel_rank * config.world_size + rank, config.world_size_across_dp
    local = max(local_rank, 0)
    parallel_state._WORLD = LocalGroup("world", seat, size, local)
    parallel_state._NODE_COUNT = 1
    for name in _ALONE:
        setattr(parallel_state, name, LocalGroup(name.strip("_").lower(), 0, 1, local))
    parallel_state._ETP = parallel_state._TP
    for name in ("_DP", "_EP", "_EPLB"):
        setattr(parallel_state, name, LocalGroup(name.strip("_").lower(), seat, size, local))
    parallel_state._EP.device_communicator = LocalCommunicator(LocalManager(seat, size))
    # Of the worker's main thread, until it is attached: there is nobody to agree with on a batch.
    dp_utils._skip_dp_coordination.set(True)


def install(*workers: Any) -> None:
    """Workers of these modules of vLLM boot without a group; its GPU worker's, if none is named."""
    for module in workers or (gpu_worker,):
        module.init_worker_distributed_environment = init_environment
    create = eplb.create_eplb_communicator

    def create_communicator(
        group_coordinator: Any, backend: str, expert_weights: Any, expert_buffer: Any
    ) -> Any:
        if isinstance(group_coordinator, LocalGroup):
            return NoMoves()
        return create(group_coordinator, backend, expert_weights, expert_buffer)

    eplb.create_eplb_communicator = create_communicator
