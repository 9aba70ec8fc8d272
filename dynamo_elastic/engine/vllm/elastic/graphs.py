"""CUDA graphs that vLLM captures, kept so that they can be rebound to another expert buffer.

vLLM makes them with `torch.cuda.CUDAGraph()`, and torch lets go of the template at the end of a
capture. Here the name stands for a subclass that keeps it, instantiates at once (a graph that waits
for its first replay would make that step slow), and is counted.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch


class CapturedGraphs:
    """All graphs of this process that are alive, from install() on."""

    def __init__(self) -> None:
        self._alive: weakref.WeakSet[Any] = weakref.WeakSet()

    def install(self, owner: Any = torch.cuda) -> None:
        """`owner.CUDAGraph` makes graphs that are kept here. Idempotent."""
        if not hasattr(owner.CUDAGraph, "kept_in"):
            owner.CUDAGraph = patchable(owner.CUDAGraph, self._alive)
        self._alive = owner.CUDAGraph.kept_in

    @property
    def alive(self) -> list[Any]:
        """Those whose capture has ended."""
        return [graph for graph in self._alive if graph.captured]


def patchable(graph_class: type, kept_in: weakref.WeakSet[Any]) -> type:
    """A subclass of torch's CUDAGraph that keeps its template, whatever it is asked for."""

    class PatchableGraph(graph_class):  # type: ignore[misc]
        def __new__(cls, keep_graph: bool = True) -> Any:
            return super().__new__(cls, keep_graph=True)

        def __init__(self, keep_graph: bool = True) -> None:
            super().__init__(keep_graph=True)
            self.captured = False
            kept_in.add(self)

        def capture_end(self) -> None:
            super().capture_end()
            self.instantiate()
            self.captured = True

    # Not annotated in the class: each subclass has its own.
    PatchableGraph.kept_in = kept_in
    PatchableGraph.__name__ = graph_class.__name__
    return PatchableGraph
