"""vLLM's captured graphs and another expert buffer: how the layers use it, shown to comm's rebind.

The graphs of a rank launch NIXL EP's kernels with addresses of its buffer by value. What a rebind
needs to know is a probe: two layers' dispatch and combine, called the way vLLM's layers call them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


class Rebinding:
    """The graphs of this rank, and how they use the buffer that the layers have now: read while
    there is one, used when there is another. The rank must be out of any group, or idle."""

    def __init__(self, model: Any, hidden: int, top_k: int, graphs: list[Any]) -> None:
        """Reads all graphs, which takes seconds. Raises EngineError without a buffer, and
        RebindRefused if they could never be rebound."""
        began_s = time.monotonic()
        self._model, self._hidden, self._top_k = model, hidden, top_k
        self._driver = CudaGraphDriver()
        self._rebinder = GraphRebinder(self._driver, graphs, self._probe(_state().buffer))
        self.facts: dict[str, Any] = {
            "graphs": len(graphs),
            "nodes": self._rebinder.node_count,
            "read_s": round(time.monotonic() - began_s, 4),
        }

    def _probe(self, buffer: Any) -> Probe:
        end = next(layer_ends(self._model), None)
        if end is None:
            raise EngineError("this model has no layers of experts")
        with alone(buffer):
            run = _layers(buffer, end, self._hidden, self._top_k)
            return self._driver.probe(run, span_of(buffer), 0)

    def check(self) -> dict[str, Any]:
        """Whether the graphs could be rebound to a buffer made now; changes none of them."""
        end = next(layer_ends(self._model))
        fresh, began_s = new_buffer(_state(), end, self._hidden), time.monotonic()
        try:
            self._rebinder.check(self._probe(fresh))
            said = "they could be rebound"
        except RebindRefused as exc:
            said = f"refused: {exc}"
        finally:
            torch.accelerator.synchronize()
            fresh.destroy()
        return self.facts | {"said": said, "check_s": round(time.monotonic() - began_s, 4)}

    def rebind(self) -> dict[str, Any]:
        """The graphs use the buffer that the layers have now. Raises RebindRefused with the graphs
        as they were, or RebindFailed with graphs that must not be replayed."""
        began_s = time.monotonic()
        rebound = self._rebinder.rebind(self._probe(_state().buffer))
        written = {kind.value: count for kind, count in rebound.written.items()}
        seconds = round(time.monotonic() - began_s, 4)
        return {"written": written, "moved": rebound.moved, "rebind_s": seconds}


def _state() -> Any:
    state = NixlEPAll2AllManager._buffer
    if state is None:
        raise EngineError("this rank has no expert buffer")
    return state


@contextmanager
def alone(buffer: Any) -> Iterator[None]:
    """Peers that are in use are masked meanwhile: what is dispatched reaches nobody."""
    mask = torch.zeros(_state().max_num_ep_ranks, device="cuda", dtype=torch.int32)
    buffer.query_mask_buffer(mask)
    torch.accelerator.synchronize()
    used = [rank for rank, masked in enumerate(mask.tolist()) if not masked]
    peers = [rank for rank in used if rank != buffer.rank]
    _mask(buffer, peers, mask=True)
    try:
        yield
    finally:
        _mask(buffer, peers, mask=False)


def _mask(buffer: Any, ranks: list[int], *, mask: bool) -> None:
    for rank in ranks:
        buffer.update_mask_buffer(rank, mask=mask)
    torch.accelerator.synchronize()


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
