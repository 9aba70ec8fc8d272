"""Rewrites the executable CUDA graphs of a process so that they use another NIXL EP Buffer.

Two rules decide what changes. (1) A probe step captured with the new Buffer shows which parameters
of the EP kernels differ from the probe captured with the old one: contexts, masks, workspaces, the
rank. (2) Any 64-bit word of any other node that points into the old Buffer's memory is moved to the
new one; this reaches engine kernels, copies and fills.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from cuda.bindings import driver

KERNEL = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
MEMCPY = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMCPY
MEMSET = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET
Range = tuple[int, int]  # first address, size
Move = tuple[int, int, int]  # old first address, size, new first address
Table = dict[tuple[str, int, bytes], bytes]
_layouts: dict[int, tuple[str, list[int]]] = {}


class PatchError(RuntimeError):
    """The graphs cannot be patched safely; recapture instead."""


@dataclass
class Node:
    """One graph node; `values` are a kernel's parameters as bytes."""

    handle: Any
    kind: Any
    name: str
    values: list[bytes]
    params: Any


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


def read_nodes(graph: torch.cuda.CUDAGraph) -> list[Node]:
    """Kernel, copy and fill nodes of a kept template, in creation order."""
    template = driver.CUgraph(graph.raw_cuda_graph())
    _, count = check(driver.cuGraphGetNodes(template, 0))
    handles, _ = check(driver.cuGraphGetNodes(template, count))
    nodes = []
    for handle in handles:
        kind = check(driver.cuGraphNodeGetType(handle))
        if kind == KERNEL:
            params = check(driver.cuGraphKernelNodeGetParams(handle))
            name, sizes = _layout(params)
            array = ctypes.cast(int(params.kernelParams), ctypes.POINTER(ctypes.c_void_p))
            values = [ctypes.string_at(array[index], size) for index, size in enumerate(sizes)]
            nodes.append(Node(handle, kind, name, values, params))
        elif kind == MEMCPY:
            nodes.append(
                Node(handle, kind, "memcpy", [], check(driver.cuGraphMemcpyNodeGetParams(handle)))
            )
        elif kind == MEMSET:
            nodes.append(
                Node(handle, kind, "memset", [], check(driver.cuGraphMemsetNodeGetParams(handle)))
            )
    return nodes


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
    """(kernel, parameter, old bytes) -> new bytes; PatchError where the probes disagree."""
    old_ep, new_ep = (
        [node for node in old_probe if is_ep(node)],
        [node for node in new_probe if is_ep(node)],
    )
    if [node.name for node in old_ep] != [node.name for node in new_ep]:
        raise PatchError("the probes launched different kernels")
    table: Table = {}
    for old, new in zip(old_ep, new_ep, strict=True):
        for index, (before, after) in enumerate(zip(old.values, new.values, strict=True)):
            if len(before) == 8 and _inside(int.from_bytes(before, "little"), owned):
                continue
            if table.setdefault((old.name, index, before), after) != after:
                raise PatchError(
                    f"parameter {index} of {old.name[:60]} has two new values for one old value"
                )
    return {key: after for key, after in table.items() if key[2] != after}


def _moved(value: bytes, moves: Sequence[Move]) -> bytes:
    """The parameter with every aligned word that points into an old range moved."""
    changed = None
    for offset in range(0, len(value) - 7, 8):
        word = int.from_bytes(value[offset : offset + 8], "little")
        for first, size, target in moves:
            if first <= word < first + size and first != target:
                changed = changed or bytearray(value)
                changed[offset : offset + 8] = (word - first + target).to_bytes(8, "little")
    return bytes(changed) if changed else value


def _new_address(address: Any, moves: Sequence[Move]) -> int | None:
    for first, size, target in moves:
        if first <= int(address) < first + size and first != target:
            return int(address) - first + target
    return None


def _patch_kernel(executable: Any, node: Node, table: Table, moves: Sequence[Move]) -> bool:
    values = node.values
    if is_ep(node):
        values = [table.get((node.name, index, value), value) for index, value in enumerate(values)]
    else:
        values = [_moved(value, moves) if len(value) >= 8 else value for value in values]
    if values == node.values:
        return False
    buffers = [ctypes.create_string_buffer(value, len(value)) for value in values]
    array = (ctypes.c_void_p * len(buffers))(*[ctypes.addressof(buffer) for buffer in buffers])
    node.params.kernelParams = ctypes.addressof(array)
    check(driver.cuGraphExecKernelNodeSetParams(executable, node.handle, node.params))
    node.values = values
    return True


def _patch_copy_or_fill(executable: Any, node: Node, moves: Sequence[Move], context: Any) -> bool:
    fields = ("srcDevice", "dstDevice") if node.kind == MEMCPY else ("dst",)
    targets = {name: _new_address(getattr(node.params, name), moves) for name in fields}
    if not any(targets.values()):
        return False
    for name, address in targets.items():
        if address is not None:
            setattr(node.params, name, driver.CUdeviceptr(address))
    is_copy = node.kind == MEMCPY
    write = (
        driver.cuGraphExecMemcpyNodeSetParams if is_copy else driver.cuGraphExecMemsetNodeSetParams
    )
    check(write(executable, node.handle, node.params, context))
    return True


def patch(
    graph: torch.cuda.CUDAGraph, nodes: Sequence[Node], table: Table, moves: Sequence[Move]
) -> dict[str, int]:
    """Patch one executable graph; returns how many nodes of each kind changed."""
    executable = driver.CUgraphExec(graph.raw_cuda_graph_exec())
    context = check(driver.cuCtxGetCurrent())
    counts = {"ep": 0, "kernel": 0, "memcpy": 0, "memset": 0}
    for node in nodes:
        if node.kind == KERNEL:
            counts["ep" if is_ep(node) else "kernel"] += _patch_kernel(
                executable, node, table, moves
            )
        else:
            counts[node.name] += _patch_copy_or_fill(executable, node, moves, context)
    return counts
