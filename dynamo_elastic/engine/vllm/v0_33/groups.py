"""vLLM's groups of ranks without NCCL: a subclass in the place of its own.

Rank 0's store of the operation carries everything; each group is one client of it and one gloo
group. Device tensors that a group still carries go by way of the host: the loads of experts when
they are rebalanced (49 KB), and the expert map.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore
from vllm.distributed import stateless_coordinator
from vllm.distributed.device_communicators.all2all import NixlEPAll2AllManager
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.parallel_state import _get_unique_name, _register_group
from vllm.distributed.utils import StatelessProcessGroup, get_cpu_distributed_timeout_or_none
from vllm.platforms import current_platform
from vllm.v1.worker import gpu_worker

from dynamo_elastic.engine.vllm.elastic.groups import (
    close_gloo,
    connect_gloo,
    expect_steps,
    open_store,
)
from dynamo_elastic.engine.vllm.elastic.meeting import Meeting, Words
from dynamo_elastic.engine.vllm.elastic.settings import ElasticSettings
from dynamo_elastic.errors import EngineError

_Upstream = stateless_coordinator.StatelessGroupCoordinator
_operation = threading.local()
"""Of the thread that makes groups: the event that says its operation is over."""


@contextmanager
def operation(over: threading.Event) -> Iterator[None]:
    """Groups that this thread makes here are given up when `over` is set."""
    _operation.over = over
    try:
        yield
    finally:
        _operation.over = None


def meeting_at(host: str, port: int, settings: ElasticSettings, over: threading.Event) -> Meeting:
    """Of one operation, on a client of its own. Raises RuntimeError if the store is gone."""
    store = open_store(host, port, settings.group_timeout_s)
    return Meeting(store, timeout_s=settings.prepare_timeout_s, poll_s=settings.poll_s, over=over)


class SlimGroup(_Upstream):  # type: ignore[misc, valid-type]
    """A StatelessGroupCoordinator whose ranks exchange host tensors alone. Its constructor returns
    when all ranks are in it; raises GivenUp if the operation is over first."""

    cpu_group: Any
    device_group: Any

    def __init__(
        self,
        group_ranks: Sequence[Sequence[int]],
        local_rank: int,
        torch_distributed_backend: Any,
        use_device_communicator: bool,
        coord_store: Any,
        use_message_queue_broadcaster: bool = False,
        group_name: str | None = None,
        host: str = "127.0.0.1",
        global_rank: int = 0,
        global_world_size: int = 1,
        use_all2all: bool = False,
    ) -> None:
        self.unique_name = _get_unique_name(group_name or "anonymous")
        _register_group(self)
        self.rank, self.local_rank = global_rank, local_rank
        self.device_index = self._device_index(local_rank)
        self.backend = str(torch_distributed_backend)
        index, ranks = next((i, list(r)) for i, r in enumerate(group_ranks) if global_rank in r)
        self.ranks, self.world_size = ranks, len(ranks)
        self.rank_in_group = ranks.index(global_rank)
        self.cpu_timeout = get_cpu_distributed_timeout_or_none()
        self._connect(coord_store, f"{group_name}-{index}")
        self.device = self._device()
        self.use_device_communicator = use_device_communicator
        self.device_communicator = (
            self._communicator(global_world_size)
            if use_device_communicator and use_all2all
            else None
        )
        self.mq_broadcaster = None
        self.use_custom_op_call = current_platform.is_cuda_alike() or current_platform.is_tpu()
        self.use_cpu_custom_send_recv = False

    def _device_index(self, local_rank: int) -> int:
        from vllm.distributed.parallel_state import _WORLD

        return local_rank if _WORLD is None else int(_WORLD.device_index)

    def _device(self) -> torch.device:
        if not current_platform.is_cuda_alike():
            return torch.device("cpu")
        visible = current_platform.logical_device_id_to_visible_device_id(self.device_index)
        return torch.device(f"cuda:{visible}")

    def _connect(self, coord_store: Any, name: str) -> None:
        settings = ElasticSettings.from_environment()
        over = getattr(_operation, "over", None) or threading.Event()
        meeting = meeting_at(coord_store.host, coord_store.port, settings, over)
        meeting.meet(f"group {name}", self.rank, self.ranks)
        store: Any = meeting.store
        group = connect_gloo(
            store, name, self.rank_in_group, self.world_size, settings.group_timeout_s
        )
        self.cpu_group = self.device_group = group
        self.tcp_store_group = StatelessProcessGroup(
            rank=self.rank_in_group,
            world_size=self.world_size,
            store=Words(PrefixStore(f"dynamo_elastic/words/{name}", store), meeting),
        )

    def _communicator(self, global_world_size: int) -> SlimCommunicator:
        return SlimCommunicator(
            cpu_group=self.cpu_group,
            device=self.device,
            device_group=self.device_group,
            unique_name=self.unique_name,
            global_ranks=self.ranks,
            global_world_size=global_world_size,
            use_all2all=True,
            words=self.tcp_store_group,
        )

    def expect_steps(self, timeout: timedelta) -> None:
        """As elastic.groups.expect_steps(), whichever of vLLM's two ways an exchange goes."""
        self.cpu_timeout = timeout
        expect_steps(self.cpu_group, timeout)

    def broadcast(self, input_: torch.Tensor, src: int = 0) -> torch.Tensor:
        """By way of the host; what comes is on the device of `input_`."""
        if self.world_size == 1:
            return input_
        host = input_.cpu() if self.rank_in_group == src else input_
        received: torch.Tensor = self.tcp_store_group.broadcast(host, src)
        return input_ if self.rank_in_group == src else received.to(input_.device)

    def destroy(self) -> None:
        """This rank is out of the group; needs no peer. Idempotent."""
        if self.device_communicator is not None:
            self.device_communicator.destroy()
            self.device_communicator = None
        close_gloo(self.cpu_group)
        self.cpu_group = self.device_group = None


class Seat(SlimGroup):
    """A rank's place among ranks that it has not met yet, while it makes its groups with them."""

    def __init__(self, rank: int, size: int, local_rank: int, backend: str) -> None:
        self.rank = self.rank_in_group = rank
        self.world_size, self.ranks = size, list(range(size))
        self.local_rank = self.device_index = local_rank
        self.backend, self.device_communicator = backend, None
        self.cpu_group = self.device_group = None


class SlimCommunicator(DeviceCommunicatorBase):  # type: ignore[misc]
    """An EP group's communicator that is its all-to-all manager and nothing else."""

    def __init__(self, *, words: Any, **group: Any) -> None:
        super().__init__(**group)
        if self.all2all_backend != "nixl_ep":
            raise EngineError(
                f"--all2all-backend is {self.all2all_backend}: groups without NCCL need nixl_ep"
            )
        self.all2all_manager = NixlEPAll2AllManager(self.cpu_group, words)

    def destroy(self) -> None:
        self.all2all_manager.destroy()


def install() -> None:
    """vLLM makes SlimGroups from now on."""
    stateless_coordinator.StatelessGroupCoordinator = SlimGroup


def install_environment() -> None:
    """vLLM's GPU workers that have no neighbour of their own rank start without NCCL: its threads
    are in the way of a process that is to be parked."""
    upstream = gpu_worker.init_worker_distributed_environment

    def init(
        vllm_config: Any,
        rank: int,
        distributed_init_method: str | None = None,
        local_rank: int = -1,
        backend: str = "nccl",
    ) -> None:
        if vllm_config.parallel_config.world_size == 1:
            backend = "gloo"
        upstream(vllm_config, rank, distributed_init_method, local_rank, backend)

    gpu_worker.init_worker_distributed_environment = init
