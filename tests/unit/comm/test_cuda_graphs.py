from __future__ import annotations

from typing import Self

import pytest

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")


def test_every_graph_keeps_its_template_whatever_the_caller_asks() -> None:
    from dynamo_elastic.comm.cuda_graphs import keep_graphs_patchable

    class Graph:
        """As torch's: Python reads the flag in __new__, C++ in __init__."""

        def __new__(cls, keep_graph: bool = False) -> Self:
            made = super().__new__(cls)
            made.seen_in_new = keep_graph
            return made

        def __init__(self, keep_graph: bool = False) -> None:
            self.seen_in_init = keep_graph

        seen_in_new: bool

    keep_graphs_patchable(Graph)
    keep_graphs_patchable(Graph)
    for graph in (Graph(), Graph(False), Graph(keep_graph=False), Graph(keep_graph=True)):
        assert graph.seen_in_new
        assert graph.seen_in_init
