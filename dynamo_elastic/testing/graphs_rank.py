"""A rank that captures many CUDA graphs, and takes them from buffer to buffer.

python -m dynamo_elastic.testing.graphs_rank DESCRIPTOR
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from dynamo_elastic.comm.cuda_graphs import CudaGraphDriver, keep_graphs_patchable
from dynamo_elastic.comm.graph_rebind import GraphRebinder, verify
from dynamo_elastic.testing.expert_buffer_rank import ExpertRank, serve

_TOLERANCE = 0.02


class GraphsRank(ExpertRank):
    """An ExpertRank with operations on graphs. `layer` is what they hold; subclasses add to it."""

    def __init__(self, make: Any, device: str = "cuda") -> None:
        super().__init__(make, device)
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._rebinder: GraphRebinder | None = None
        self._decoys: list[torch.Tensor] = []
        self._probe_layers = 2
        self._kept = False

    def keep(self) -> None:
        """Graphs stay patchable from now on."""
        keep_graphs_patchable()
        self._kept = True

    def capture_all(self, graphs: int, layers: int) -> dict[str, float]:
        """So many graphs of so many layers, as an engine captures them; and what they cost."""
        self.layers(1)
        free_before = torch.cuda.mem_get_info()[0]
        self._sync()
        begin = time.perf_counter()
        pool = None
        for _ in range(graphs):
            graph = torch.cuda.CUDAGraph()  # as engines write it
            with torch.cuda.graph(graph, pool=pool):
                for _ in range(layers):
                    self.layer()
            if self._kept:  # else torch has done it
                graph.instantiate()
            pool = graph.pool()
            self._graphs.append(graph)
        self._sync()
        elapsed_s = time.perf_counter() - begin
        return {
            "capture_s": elapsed_s,
            "gpu_bytes": float(free_before - torch.cuda.mem_get_info()[0]),
        }

    def layers(self, count: int) -> None:
        """Eager layers."""
        for _ in range(count):
            self.layer()

    def record(self) -> dict[str, float]:
        """Read all nodes; what is done before a snapshot. The buffer serves alone."""
        driver = CudaGraphDriver()
        begin = time.perf_counter()
        self._rebinder = GraphRebinder(driver, self._graphs, self._probe(driver))
        return {"record_s": time.perf_counter() - begin, "nodes": self._rebinder.node_count}

    def _probe(self, driver: CudaGraphDriver) -> Any:
        buffer = self.buffer
        step = lambda: self.layers(self._probe_layers)  # noqa: E731
        return driver.probe(step, buffer.memory, buffer.parity)

    def check_other(self) -> None:
        """Whether the graphs could use the buffer that is open now, of another rank."""
        self._recorded.check(self._probe(CudaGraphDriver()))

    def rebind(self) -> dict[str, Any]:
        """The graphs use the buffer that is open now."""
        driver = CudaGraphDriver()
        self.layers(2)  # its kernels are loaded, which is no part of a rebind
        self._sync()
        begin = time.perf_counter()
        probe = self._probe(driver)
        probe_s = time.perf_counter() - begin
        rebound = self._recorded.rebind(probe)
        return {
            "rebind_s": time.perf_counter() - begin,
            "probe_s": probe_s,
            "written": {kind.value: count for kind, count in rebound.written.items()},
            "values": rebound.values,
            "moved": rebound.moved,
        }

    @property
    def _recorded(self) -> GraphRebinder:
        if self._rebinder is None:
            raise RuntimeError("nothing is recorded")
        return self._rebinder

    def verify_all(self, layers: int) -> float:
        """The worst relative error of a graph's replay against eager layers."""
        return max(self._verify(graph, layers) for graph in self._graphs)

    def _verify(self, graph: torch.cuda.CUDAGraph, layers: int) -> float:
        def replay() -> torch.Tensor:
            self._out.zero_()
            graph.replay()
            return self._out

        def eager() -> torch.Tensor:
            self._out.zero_()
            self.layers(layers)
            return self._out

        return verify(replay, eager, tolerance=_TOLERANCE)

    def replay_graph(self, index: int, count: int = 1) -> float:
        """Seconds for one replay of graph `index`, over `count` of them."""
        self._out.zero_()
        self._sync()
        begin = time.perf_counter()
        for _ in range(count):
            self._graphs[index].replay()
        self._sync()
        return (time.perf_counter() - begin) / count

    def forget(self) -> None:
        """Drop all graphs, to measure a capture from nothing."""
        self._graphs, self._rebinder = [], None
        self._sync()

    def occupy(self, sizes: Sequence[int]) -> int:
        """Take addresses, so that the next buffer gets others."""
        self._decoys += [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
        return self._decoys[-1].data_ptr()


def main() -> None:
    from dynamo_elastic.comm.nixl_ep import NixlExpertBuffer

    torch.cuda.init()  # type: ignore[no-untyped-call]
    serve(GraphsRank(NixlExpertBuffer), socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
