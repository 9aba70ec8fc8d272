"""One NIXL EP rank as a process: what ep_steps does, and its CUDA graphs."""

from __future__ import annotations

import ctypes
import resource
import sys
import time
from pathlib import Path
from typing import Any

import graph_patch
import rank_process
import torch
from cuda.bindings import driver
from ep_steps import EXPERTS_PER_RANK, TAIL_BYTES, EpSteps

P2P_TABLE_OFFSET, MAX_RANKS_OFFSET = 72, 80  # of NIXL EP's device context
RECV_COUNT_PARAMETER = 9  # of the dispatch kernel


class EpRank(EpSteps):
    """Operations the driver may ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[list[graph_patch.Node]] = []
        self.probe: list[graph_patch.Node] = []
        self.base_address = 0
        self.kept = False

    def keep_templates(self) -> None:
        """Install the hook that an engine's capture code needs."""
        graph_patch.keep_templates()
        self.kept = True

    def _capture(self, layers: int, extras: bool) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()  # as engines write it: no keep_graph
        with torch.cuda.graph(graph, pool=self.graphs[0].pool() if self.graphs else None):
            for _ in range(layers):
                self._forward(extras)
        if self.kept:
            graph.instantiate()
        return graph

    def capture_only(
        self, graphs: int = 1, layers: int = 2, extras: bool = False
    ) -> dict[str, float]:
        """Capture the graphs; the remote peers are masked or agree."""
        for _ in range(2):
            self._forward(extras)
        torch.cuda.synchronize()
        before = self._usage()
        begin = time.perf_counter()
        for _ in range(graphs):
            self.graphs.append(self._capture(layers, extras))
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        after = self._usage()
        return {"capture_s": seconds, **{name: after[name] - before[name] for name in after}}

    def record(self, extras: bool = False) -> dict[str, float]:
        """Before the snapshot: read all nodes and find those that a new Buffer will concern."""
        begin = time.perf_counter()
        self.base_address = self._memory().data_ptr()
        memory = (self.base_address, self.buffer_bytes)
        every = [graph_patch.read_nodes(graph) for graph in self.graphs]
        self.nodes = [graph_patch.to_patch(nodes, memory) for nodes in every]
        seconds = time.perf_counter() - begin
        self.probe = self._probe(extras)
        self.owned = graph_patch.allocator_ranges()
        flat = [node for nodes in every for node in nodes]
        kinds = {name: sum(node.name == name for node in flat) for name in ("memcpy", "memset")}
        return {
            "record_s": seconds,
            "nodes": len(flat),
            "nodes_to_patch": sum(len(nodes) for nodes in self.nodes),
            "ep_nodes": sum(graph_patch.is_ep(node) for node in flat),
            **kinds,
        }

    def capture(self, graphs: int = 1, layers: int = 2, extras: bool = False) -> dict[str, float]:
        """Both."""
        return {**self.capture_only(graphs, layers, extras), **self.record(extras)}

    def _usage(self) -> dict[str, int]:
        free, _ = torch.cuda.mem_get_info()
        return {
            "gpu_bytes": -free,
            "host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }

    def _probe(self, extras: bool = False) -> list[graph_patch.Node]:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            for _ in range(2):
                self._forward(extras)
        self.probe_graph = graph  # the nodes' parameters live in it
        return graph_patch.read_nodes(graph)

    def rebind(self, extras: bool = False) -> dict[str, Any]:
        """Make all graphs use the present Buffer."""
        for _ in range(2):  # kernels of a new Buffer must be loaded outside capture
            self._forward(extras)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        probe = self._probe(extras)
        probe_s = time.perf_counter() - begin
        table = graph_patch.substitutions(self.probe, probe, self.owned)
        address = self._memory().data_ptr()
        moves = [(self.base_address, self.buffer_bytes, address)]
        totals: dict[str, int] = {}
        begin = time.perf_counter()
        for graph, nodes in zip(self.graphs, self.nodes, strict=True):
            for kind, count in graph_patch.patch(graph, nodes, table, moves).items():
                totals[kind] = totals.get(kind, 0) + count
        patch_s = time.perf_counter() - begin
        # torch's memory as it is now: what it owned earlier may be another Buffer's tomorrow.
        self.owned = graph_patch.allocator_ranges()
        self.probe, moved = probe, address != self.base_address
        self.base_address = address
        return {
            "probe_s": probe_s,
            "patch_s": patch_s,
            "moved": moved,
            "table": sum(len(renamed) for rows in table.values() for renamed in rows.values()),
            **totals,
        }

    def forget_graphs(self) -> None:
        """Drop all graphs, to measure a capture from nothing."""
        self.graphs, self.nodes = [], []
        torch.cuda.synchronize()

    def replay_each(self, active: list[int]) -> dict[str, Any]:
        """Replay every graph and check it."""
        worst, bad = 0.0, 0
        for index in range(len(self.graphs)):
            self.replay(1, index)
            result = self.check(active)
            worst, bad = max(worst, result["error"]), bad + result["bad_tokens"]
        return {"graphs": len(self.graphs), "worst_error": worst, "bad_tokens": bad}

    def tail_check(self) -> dict[str, bool]:
        """Whether the graph's fill and copy nodes write the present Buffer."""
        tail = self._memory()[self.buffer_bytes - TAIL_BYTES :]
        tail.fill_(5)
        self.replay()
        filled, copied = tail[:4096], tail[8192 : 8192 + 4096]
        return {"memset": bool((filled == 0).all()), "memcpy": bool((copied == 9).all())}

    def lanes(self) -> list[bool]:
        """Which peers the kernels write by plain stores; others go through the device API."""
        context = int.from_bytes(self._dispatch().buffers[-1].raw, "little")
        head = _device_bytes(context, 96)
        ranks = int.from_bytes(head[MAX_RANKS_OFFSET : MAX_RANKS_OFFSET + 4], "little")
        if ranks != self.max_ranks:
            raise RuntimeError("NIXL EP's device context has another layout")
        table = int.from_bytes(head[P2P_TABLE_OFFSET : P2P_TABLE_OFFSET + 8], "little")
        return [word != 0 for word in _device_words(table, self.max_ranks)]

    def arrivals(self) -> list[int]:
        """For each source rank, how many of this rank's experts got its token counts."""
        first = int.from_bytes(self._dispatch().buffers[RECV_COUNT_PARAMETER].raw, "little")
        words = _device_words(first, EXPERTS_PER_RANK * self.max_ranks)
        return [
            sum(words[expert * self.max_ranks + source] != 0 for expert in range(EXPERTS_PER_RANK))
            for source in range(self.max_ranks)
        ]

    def _dispatch(self) -> graph_patch.Node:
        """A dispatch kernel launched with the present Buffer."""
        return next(
            node for node in self.probe if graph_patch.is_ep(node) and "dispatch" in node.name
        )


def _device_words(address: int, count: int) -> list[int]:
    raw = _device_bytes(address, 8 * count)
    return [int.from_bytes(raw[i * 8 : i * 8 + 8], "little") for i in range(count)]


def _device_bytes(address: int, size: int) -> bytes:
    buffer = ctypes.create_string_buffer(size)
    graph_patch.check(driver.cuMemcpyDtoH(ctypes.addressof(buffer), address, size))
    return buffer.raw


if __name__ == "__main__":
    torch.cuda.init()
    rank_process.serve(EpRank(), Path(sys.argv[1]))
