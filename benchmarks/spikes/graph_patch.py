"""Rewrites the executable CUDA graphs of a process so that they use another NIXL EP Buffer.

Two rules decide what changes. (1) A probe step captured with the new Buffer shows which parameters
of the EP kernels differ from the probe captured with the old one: contexts, masks, workspaces, the
rank. (2) Any 64-bit word of any other node that points into the old Buffer's memory is moved to the
new one; this reaches engine kernels, copies and fills.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from cuda.bindings import driver

KERNEL = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
MEMCPY = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMCPY
MEMSET = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET
Range = tuple[int, int]  # first address, size
Move = tuple[int, int, int]  # old first address, size, new first address
Table = dict[str, dict[int, dict[bytes, bytes]]]  # kernel -> parameter -> old -> new
_layouts: dict[int, tuple[str, list[int]]] = {}


class PatchError(RuntimeError):
    """The graphs cannot be patched safely; recapture instead."""


@dataclass
class Node:
    """One graph node. A kernel's parameters lie in `buffers`, ready to be passed again."""

    handle: Any
    kind: Any
    name: str
    params: Any
    buffers: list[Any] = field(default_factory=list)
    addresses: Any = None  # the array that params.kernelParams points to
    words: list[tuple[int, int]] = field(default_factory=list)  # (parameter, offset) of pointers

    def values(self) -> list[bytes]:
        """A kernel's parameters as they stand now."""
        return [buffer.raw for buffer in self.buffers]


def check(result: tuple[Any, ...]) -> Any:
    """Unpack a driver call's answer, or raise PatchError with the driver's code."""
    if result[0] != driver.CUresult.CUDA_SUCCESS:
        raise PatchError(f"driver says {result[0].name}")
    values = result[1:]
    return values[0] if len(values) == 1 else (values or None)


def keep_templates() -> None:
    """Make `torch.cuda.CUDAGraph()` keep its template, for code that does not ask for it."""
    # Python's half of the class reads the flag in __new__, the C++ half in __init__.
    new, init = torch.cuda.CUDAGraph.__new__, torch.cuda.CUDAGraph.__init__

    def patched_new(
        cls: type[torch.cuda.CUDAGraph], keep_graph: bool = True
    ) -> torch.cuda.CUDAGraph:
        return new(cls, keep_graph=True)

    def patched_init(self: torch.cuda.CUDAGraph, keep_graph: bool = True) -> None:
        init(self, keep_graph=True)

    torch.cuda.CUDAGraph.__new__ = patched_new  # type: ignore[method-assign,assignment]
    torch.cuda.CUDAGraph.__init__ = patched_init  # type: ignore[method-assign,assignment]


def _layout(params: Any) -> tuple[str, list[int]]:
    """Name and parameter sizes of a kernel, asked once per kernel."""
    by_function = int(params.func) != 0
    handle = params.func if by_function else params.kern
    if int(handle) not in _layouts:
        name = check(
            (driver.cuFuncGetName if by_function else driver.cuKernelGetName)(handle)
        ).decode()
        info = driver.cuFuncGetParamInfo if by_function else driver.cuKernelGetParamInfo
        sizes: list[int] = []
        while (answer := info(handle, len(sizes)))[0] == driver.CUresult.CUDA_SUCCESS:
            sizes.append(int(answer[2]))
        _layouts[int(handle)] = (name, sizes)
    return _layouts[int(handle)]


def _kernel_node(handle: Any) -> Node:
    params = check(driver.cuGraphKernelNodeGetParams(handle))
    name, sizes = _layout(params)
    array = ctypes.cast(int(params.kernelParams), ctypes.POINTER(ctypes.c_void_p))
    node = Node(handle, KERNEL, name, params)
    for index, size in enumerate(sizes):
        content = ctypes.string_at(array[index], size)
        node.buffers.append(ctypes.create_string_buffer(content, size))
    addresses = [ctypes.addressof(buffer) for buffer in node.buffers]
    node.addresses = (ctypes.c_void_p * len(addresses))(*addresses)
    params.kernelParams = ctypes.addressof(node.addresses)
    return node


def read_nodes(graph: torch.cuda.CUDAGraph) -> list[Node]:
    """Kernel, copy and fill nodes of a kept template, in creation order."""
    template = driver.CUgraph(graph.raw_cuda_graph())
    _, count = check(driver.cuGraphGetNodes(template, 0))
    handles, _ = check(driver.cuGraphGetNodes(template, count))
    nodes = []
    for handle in handles:
        kind = check(driver.cuGraphNodeGetType(handle))
        if kind == KERNEL:
            nodes.append(_kernel_node(handle))
        elif kind == MEMCPY:
            nodes.append(
                Node(handle, kind, "memcpy", check(driver.cuGraphMemcpyNodeGetParams(handle)))
            )
        elif kind == MEMSET:
            nodes.append(
                Node(handle, kind, "memset", check(driver.cuGraphMemsetNodeGetParams(handle)))
            )
    return nodes


def to_patch(nodes: Sequence[Node], memory: Range) -> list[Node]:
    """Nodes that a new Buffer can concern, found before the snapshot: a restore must not search."""
    return [node for node in nodes if is_ep(node) or _points_into(node, memory)]


def _points_into(node: Node, memory: Range) -> bool:
    if node.kind != KERNEL:
        return any(_inside(int(getattr(node.params, name)), [memory]) for name in _fields(node))
    for index, value in enumerate(node.values()):
        for offset in range(0, len(value) - 7, 8):
            if _inside(int.from_bytes(value[offset : offset + 8], "little"), [memory]):
                node.words.append((index, offset))
    return bool(node.words)


def _fields(node: Node) -> tuple[str, ...]:
    return ("srcDevice", "dstDevice") if node.kind == MEMCPY else ("dst",)


def is_ep(node: Node) -> bool:
    """Whether the node is a NIXL EP kernel."""
    return node.kind == KERNEL and "nixl_ep" in node.name


def allocator_ranges() -> list[Range]:
    """Memory that torch's allocator owns: its pointers differ from probe to probe and must stay."""
    return [(part["address"], part["total_size"]) for part in torch.cuda.memory_snapshot()]


def _inside(address: int, ranges: Iterable[Range]) -> bool:
    return any(first <= address < first + size for first, size in ranges)


def substitutions(
    old_probe: Sequence[Node], new_probe: Sequence[Node], owned: Sequence[Range]
) -> Table:
    """Per kernel and parameter: old to new bytes; PatchError where the probes disagree."""
    old_ep = [node for node in old_probe if is_ep(node)]
    new_ep = [node for node in new_probe if is_ep(node)]
    if [node.name for node in old_ep] != [node.name for node in new_ep]:
        raise PatchError("the probes launched different kernels")
    seen: dict[tuple[str, int, bytes], bytes] = {}
    for old, new in zip(old_ep, new_ep, strict=True):
        for index, (before, after) in enumerate(zip(old.values(), new.values(), strict=True)):
            if len(before) == 8 and _inside(int.from_bytes(before, "little"), owned):
                continue
            if seen.setdefault((old.name, index, before), after) != after:
                raise PatchError(f"parameter {index} of {old.name[:60]} has two new values")
    table: Table = {}
    for (name, index, before), after in seen.items():
        if before != after:
            table.setdefault(name, {}).setdefault(index, {})[before] = after
    return table


def _moved(address: int, moves: Sequence[Move]) -> int:
    for first, size, target in moves:
        if first <= address < first + size:
            return address - first + target
    return address


def _patch_kernel(executable: Any, node: Node, table: Table, moves: Sequence[Move]) -> bool:
    changed = False
    for index, renamed in table.get(node.name, {}).items():
        after = renamed.get(node.buffers[index].raw)
        if after is not None:
            node.buffers[index].raw = after
            changed = True
    for index, offset in node.words:
        raw = bytearray(node.buffers[index].raw)
        address = int.from_bytes(raw[offset : offset + 8], "little")
        raw[offset : offset + 8] = _moved(address, moves).to_bytes(8, "little")
        changed = changed or node.buffers[index].raw != bytes(raw)
        node.buffers[index].raw = bytes(raw)
    if changed:
        check(driver.cuGraphExecKernelNodeSetParams(executable, node.handle, node.params))
    return changed


def _patch_copy_or_fill(executable: Any, node: Node, moves: Sequence[Move], context: Any) -> bool:
    changed = False
    for name in _fields(node):
        before = int(getattr(node.params, name))
        after = _moved(before, moves)
        if after != before:
            setattr(node.params, name, driver.CUdeviceptr(after))
            changed = True
    if changed:
        is_copy = node.kind == MEMCPY
        write = (
            driver.cuGraphExecMemcpyNodeSetParams
            if is_copy
            else driver.cuGraphExecMemsetNodeSetParams
        )
        check(write(executable, node.handle, node.params, context))
    return changed


def patch(
    graph: torch.cuda.CUDAGraph, nodes: Sequence[Node], table: Table, moves: Sequence[Move]
) -> dict[str, int]:
    """Patch one executable graph; returns how many nodes of each kind changed."""
    executable = driver.CUgraphExec(graph.raw_cuda_graph_exec())
    context = check(driver.cuCtxGetCurrent())
    counts = {"ep": 0, "kernel": 0, "memcpy": 0, "memset": 0}
    for node in nodes:
        if node.kind == KERNEL:
            kind = "ep" if is_ep(node) else "kernel"
            counts[kind] += _patch_kernel(executable, node, table, moves)
        else:
            counts[node.name] += _patch_copy_or_fill(executable, node, moves, context)
    return counts
