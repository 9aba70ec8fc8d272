"""The graphs of a GPU engine: one a tile size, kept from life to life and buffer to buffer."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from dynamo_elastic.comm.base import ExpertBuffer
from dynamo_elastic.comm.cuda_graphs import CudaGraphDriver, keep_graphs_patchable
from dynamo_elastic.comm.graph_rebind import GraphRebinder, verify
from dynamo_elastic.engine.reference.gpu_experts import BufferExperts, ExpertStacks
from dynamo_elastic.engine.reference.gpu_kernels import (
    DOWN,
    GATE_UP,
    Choices,
    agreed,
    check,
    fastest,
    product,
    seconds_on_gpu,
)
from dynamo_elastic.engine.reference.kv import BLOCK_TOKENS, KvCache
from dynamo_elastic.engine.reference.model import Model, Routing, Row, pack, tile_columns
from dynamo_elastic.errors import RebindFailed, RebindRefused
from dynamo_elastic.failpoints import failpoint

_TOLERANCE = 0.02
"""Relative error of a replay against the same step without a graph: bf16 rounding."""

_log = logging.getLogger(__name__)


class StepGraphs:
    """Tiles (see gpu_steps) as CUDA graphs, captured with the first buffer that use() is given and
    rebound to every later one. Weights and keys must have memory whenever something runs."""

    def __init__(
        self,
        model: Model,
        cache: KvCache,
        stacks: ExpertStacks,
        table: Tensor,
        sizes: Sequence[int],
    ) -> None:
        keep_graphs_patchable()
        self.sizes = tuple(sizes)
        self._model = model
        self._cache = cache
        self._stacks = stacks
        self._table = table
        self._driver = CudaGraphDriver()
        columns = tile_columns(model.tile)
        self._inputs = {
            size: torch.zeros(size, columns, dtype=torch.int64, device=table.device)
            for size in self.sizes
        }
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._outputs: dict[int, Tensor] = {}
        self._rebinder: GraphRebinder | None = None
        self._buffer: ExpertBuffer | None = None
        self.kernels: Choices = {}
        """As timed when the first buffer came, or adopted since."""

    def adopt(self, kernels: Choices) -> None:
        """Compute by `kernels` from now on: the graphs are captured again. Raises EngineError if
        this release does not have them."""
        check(kernels)
        self.kernels = dict(kernels)
        if self._buffer is not None:
            self._rebinder = None
            self.use(self._buffer)

    def use(self, buffer: ExpertBuffer) -> None:
        """The graphs run over `buffer`, which has no peers yet; proven by a replay. If they can't
        be rebound they are captured again. Raises RebindFailed if not even that is right."""
        began_s = time.monotonic()
        self._buffer = buffer
        self.kernels = self.kernels or self._tune(buffer)
        experts = {
            size: BufferExperts(buffer, self._stacks, self._table, tile, self.kernels)
            for size, tile in self._inputs.items()
        }
        try:
            how = self._rebind(buffer, experts)
            failpoint("graphs.before_check")
            self._check(experts)
        except (RebindRefused, RebindFailed) as exc:
            _log.warning("graphs are captured again: %s", exc)
            failpoint("graphs.before_capture")
            how = self._capture(buffer, experts)
            self._check(experts)
        _log.info("%s in %.0f ms", how, (time.monotonic() - began_s) * 1e3)

    def _tune(self, buffer: ExpertBuffer) -> Choices:
        """What is quickest for the shape of every step, or was for such an engine before: a buffer
        gives each expert as many rows as there can be."""
        gate_up, down = self._stacks.gate_up[0], self._stacks.down[0]
        count = buffer.shape.capacity * buffer.shape.max_tokens
        operands = {
            GATE_UP: (gate_up.new_zeros(len(gate_up), count, gate_up.shape[2]), gate_up),
            DOWN: (down.new_zeros(len(down), count, down.shape[2]), down),
        }
        chosen = agreed(
            lambda: fastest(lambda name, o: seconds_on_gpu(lambda: product(o, *operands[name])))
        )
        _log.info("kernels: %s", chosen)
        return chosen

    def _rebind(self, buffer: ExpertBuffer, experts: dict[int, BufferExperts]) -> str:
        if self._rebinder is None:
            return self._capture(buffer, experts)
        rebound = self._rebinder.rebind(
            self._driver.probe(lambda: self._layer(experts), buffer.memory, buffer.parity)
        )
        return f"{sum(rebound.written.values())} of {self._rebinder.node_count} nodes rebound"

    def _capture(self, buffer: ExpertBuffer, experts: dict[int, BufferExperts]) -> str:
        self._graphs.clear()
        self._outputs.clear()
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self.sizes):
            self._eager(size, experts[size])  # Libraries load their kernels outside of a capture.
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            # Another thread may use the GPU meanwhile.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                self._outputs[size] = self._eager(size, experts[size])
            self._graphs[size] = graph
        probe = self._driver.probe(lambda: self._layer(experts), buffer.memory, buffer.parity)
        self._rebinder = GraphRebinder(self._driver, list(self._graphs.values()), probe)
        return f"{len(self._graphs)} graphs of {self._rebinder.node_count} nodes captured"

    def _eager(self, size: int, experts: BufferExperts) -> Tensor:
        return self._model.compute(self._inputs[size], size, self._cache, experts)

    def _layer(self, experts: dict[int, BufferExperts]) -> None:
        """Every kernel that the graphs launch on the buffer, once for each tile size."""
        shape = self._model.shape
        for size, run in experts.items():
            hidden = torch.zeros(size, shape.hidden_size, device=self._table.device)
            chosen = torch.arange(shape.num_experts_per_tok, device=self._table.device)
            chosen = chosen.expand(size, -1).contiguous()
            with torch.inference_mode():
                run(Routing(0, size, hidden.to(torch.bfloat16), chosen, chosen.float()))

    def _check(self, experts: dict[int, BufferExperts]) -> None:
        """One step of one sequence, with and without its graph."""
        size = min(self.sizes[0], BLOCK_TOKENS)
        words = self._model.shape.vocab_size
        # Each row has its own place in the cache: two that write to one would differ from time to
        # time.
        rows = [Row(position % words, position, [1]) for position in range(size)]
        self._inputs[self.sizes[0]].copy_(pack(rows, self._model.tile, self.sizes[0]))
        error = verify(
            lambda: self._replay(self.sizes[0])[:size],
            lambda: self._eager(self.sizes[0], experts[self.sizes[0]])[:size],
            tolerance=_TOLERANCE,
        )
        _log.info("a replay differs from eager by %.5f", error)

    def _replay(self, size: int) -> Tensor:
        self._graphs[size].replay()
        return self._outputs[size]

    def run(self, tile: Tensor) -> Tensor:
        size = len(tile)
        self._inputs[size].copy_(tile)
        return self._replay(size)
