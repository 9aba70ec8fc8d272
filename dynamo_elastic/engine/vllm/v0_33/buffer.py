"""NIXL EP's buffer under vLLM: peers that never came to serve are let go of again, and the buffer
itself when its rank has left.

Its waits for a peer's metadata, 300 s in NIXL EP, are those of the group's words: see SlimGroup.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from vllm.distributed.device_communicators.all2all import NixlEPAll2AllManager
from vllm.utils import is_moe_layer


def layer_ends(model: Any) -> Iterator[Any]:
    """The part of each MoE layer that holds the buffer: vLLM's NixlEPPrepareAndFinalize."""
    for module in model.modules():
        if is_moe_layer(module):
            kernel = module._quant_method.moe_kernel
            if kernel is not None:
                yield kernel.prepare_finalize


def use(model: Any, buffer: Any) -> int:
    """All layers dispatch over `buffer` when they run without a graph; the number of layers."""
    ends = list(layer_ends(model))
    for end in ends:
        end.buffer = buffer
    return len(ends)


def let_go_of_staged_peers() -> None:
    """Peers that are connected and not in use are disconnected: those of an operation that was
    given up. No step may be under way."""
    with NixlEPAll2AllManager._lock:
        state = NixlEPAll2AllManager._buffer
        if state is None or state.connected_ep_size <= state.active_ep_size:
            return
        torch.accelerator.synchronize()
        peers = range(state.active_ep_size, state.connected_ep_size)
        state.buffer.disconnect_ranks(list(peers))
        state.connected_ep_size = state.active_ep_size


def install() -> None:
    """Buffers that vLLM makes from now on can be destroyed at our word; those of vLLM end with the
    last of their many holders, at a moment that nobody knows. And peers can open their memory after
    this process was parked or restored, whatever it shared before: see comm.fresh_blocks."""
    from dynamo_elastic.comm.fresh_blocks import (  # needs the driver's bindings
        DriverHeap,
        fresh_blocks,
    )

    module: Any = importlib.import_module("nixl_ep")

    def fresh() -> AbstractContextManager[None]:
        return fresh_blocks(DriverHeap(torch.cuda.current_device()))

    class ElasticBuffer(module.Buffer):  # type: ignore[misc]
        # vLLM calls the two one after the other, and both allocate what peers open.
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            with fresh():
                super().__init__(*args, **{**kwargs, "explicitly_destroy": True})

        def update_memory_buffers(self, *args: Any, **kwargs: Any) -> None:
            with fresh():
                super().update_memory_buffers(*args, **kwargs)

    if module.Buffer.__name__ != ElasticBuffer.__name__:
        module.Buffer = ElasticBuffer


def new_buffer(like: Any, end: Any, hidden: int) -> Any:
    """A buffer of the shape of `like` that is connected to nobody; `end` is a layer's part that
    holds the buffer. Its owner destroys it."""
    made: Any = importlib.import_module("nixl_ep").Buffer(rank=like.buffer.rank)
    ranks, experts = like.max_num_ep_ranks, end.expert_capacity
    made.update_memory_buffers(
        num_ranks=ranks,
        num_experts_per_rank=experts // ranks,
        num_rdma_bytes=made.get_rdma_size_hint(end.max_tokens_per_rank, hidden, ranks, experts),
    )
    return made


def destroy() -> None:
    """This rank has no expert buffer any more. Every peer must have disconnected from it."""
    with NixlEPAll2AllManager._lock:
        state, NixlEPAll2AllManager._buffer = NixlEPAll2AllManager._buffer, None
        NixlEPAll2AllManager._mask = NixlEPAll2AllManager._last_mask = None
        if state is not None:
            torch.accelerator.synchronize()
            state.buffer.destroy()
            torch.accelerator.synchronize()
