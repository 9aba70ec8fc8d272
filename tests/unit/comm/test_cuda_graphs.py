from __future__ import annotations

import ctypes
from types import SimpleNamespace
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


def test_parameters_of_either_kind_of_launch_are_found() -> None:
    from dynamo_elastic.comm.cuda_graphs import _addresses

    first, second = ctypes.c_uint64(7), ctypes.c_uint32(9)
    pointers = (ctypes.c_void_p * 2)(ctypes.addressof(first), ctypes.addressof(second))
    places = ((0, 8), (8, 4))
    by_array = SimpleNamespace(kernelParams=ctypes.addressof(pointers), extra=0)
    found = _addresses(by_array, places)
    assert found == [ctypes.addressof(first), ctypes.addressof(second)]

    buffer, size = ctypes.create_string_buffer(12), ctypes.c_size_t(12)
    # Options come in any order: 2 is the buffer's size, 1 the buffer, 0 the end.
    options = (ctypes.c_void_p * 5)(2, ctypes.addressof(size), 1, ctypes.addressof(buffer), 0)
    by_buffer = SimpleNamespace(kernelParams=0, extra=ctypes.addressof(options))
    assert _addresses(by_buffer, places) == [
        ctypes.addressof(buffer),
        ctypes.addressof(buffer) + 8,
    ]
    assert _addresses(SimpleNamespace(kernelParams=0, extra=0), places) == [None, None]
    assert _addresses(SimpleNamespace(kernelParams=0, extra=0), ()) == []
