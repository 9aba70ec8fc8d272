"""vLLM's captured graphs and another expert buffer: how the layers use it, shown to comm's rebind.

The graphs of a rank launch NIXL EP's kernels with addresses of its buffer by value. What a rebind
needs to know is a probe: two layers' dispatch and combine, called the way vLLM's layers call them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from vllm.distributed.device_communicators.all2all import NixlEPAll2AllManager

from dynamo_elastic.comm.base import Span
from dynamo_elastic.comm.cuda_graphs import CudaGraphDriver
from dynamo_elastic.comm.graph_rebind import GraphRebinder
from dynamo_elastic.comm.graph_values import Probe
from dynamo_elastic.engine.vllm.v0_33.buffer import layer_ends, new_buffer
from dynamo_elastic.errors import EngineError, RebindRefused

_LAYERS = 2
_ROWS = 4


def span_of(buffer: Any) -> Span:
    memory = buffer.get_local_buffer_tensor(torch.uint8, use_rdma_buffer=True)
    return Span(memory.data_ptr(), memory.numel(), torch.cuda.current_device())


def probe(driver: CudaGraphDriver, buffer: Any, end: Any, hidden: int, top_k: int) -> Probe:
    """Of `buffer`, whose peers are all masked. Raises RebindRefused."""
    return driver.probe(_layers(buffer, end, hidden, top_k), span_of(buffer), 0)


def _layers(buffer: Any, end: Any, hidden: int, top_k: int) -> Callable[[], None]:
    device = torch.cuda.current_device()
    x = torch.zeros(_ROWS, hidden, dtype=torch.bfloat16, device=device)
    chosen = torch.arange(top_k, device=device, dtype=end.topk_indices_dtype())
    chosen = chosen.expand(_ROWS, -1).contiguous()
    weights = torch.ones(_ROWS, top_k, dtype=torch.float32, device=device)
    out = torch.empty_like(x)

    def run() -> None:
        for _ in range(_LAYERS):
            tokens, _, handle, _, received = buffer.dispatch(
                x, chosen, end.max_tokens_per_rank, end.expert_capacity, use_fp8=False,
                round_scale=False, use_ue8m0=False, async_finish=False, return_recv_hook=True,
            )  # fmt: skip
            received()
            _, _, finished = buffer.combine(
                tokens, chosen, weights, handle, async_finish=False, zero_copy=False,
                return_recv_hook=True, out=out,
            )  # fmt: skip
            finished()

    return run


def check(model: Any, hidden: int, top_k: int, manager: Any, graphs: list[Any]) -> dict[str, Any]:
    """Whether `graphs` could be rebound to a buffer made now; changes none of them. The group must
    be idle: the probes run with every peer masked."""
    end = next(layer_ends(model), None)
    state = NixlEPAll2AllManager._buffer
    if end is None or state is None:
        raise EngineError("this rank has no expert buffer")
    driver, began_s = CudaGraphDriver(), time.monotonic()
    with manager.mask_remote_ranks():
        old = probe(driver, state.buffer, end, hidden, top_k)
    rebinder = GraphRebinder(driver, graphs, old)
    read_s = time.monotonic() - began_s
    fresh = new_buffer(state, end, hidden)
    try:
        began_s = time.monotonic()
        rebinder.check(probe(driver, fresh, end, hidden, top_k))
        said = "they could be rebound"
    except RebindRefused as exc:
        said = f"refused: {exc}"
    finally:
        torch.accelerator.synchronize()
        fresh.destroy()
    return {
        "said": said,
        "graphs": len(graphs),
        "nodes": rebinder.node_count,
        "read_s": round(read_s, 4),
        "check_s": round(time.monotonic() - began_s, 4),
    }
