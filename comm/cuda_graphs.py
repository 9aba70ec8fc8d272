"""torch's CUDA graphs behind the GraphDriver seam: the one importer of the driver's graph calls."""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from cuda.bindings import driver

from dynamo_elastic.comm.base import Span
from dynamo_elastic.comm.graph_values import WORD_BYTES, Node, NodeKind, Probe
from dynamo_elastic.errors import RebindFailed, RebindRefused

_TYPE = driver.CUgraphNodeType
_KINDS = {
    _TYPE.CU_GRAPH_NODE_TYPE_KERNEL: NodeKind.KERNEL,
    _TYPE.CU_GRAPH_NODE_TYPE_MEMCPY: NodeKind.MEMCPY,
    _TYPE.CU_GRAPH_NODE_TYPE_MEMSET: NodeKind.MEMSET,
    _TYPE.CU_GRAPH_NODE_TYPE_EMPTY: NodeKind.OTHER,
    _TYPE.CU_GRAPH_NODE_TYPE_WAIT_EVENT: NodeKind.OTHER,
    _TYPE.CU_GRAPH_NODE_TYPE_EVENT_RECORD: NodeKind.OTHER,
}
_rebound: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
"""Graphs whose templates are not what they launch any more."""
_COPY_ADDRESSES, _FILL_ADDRESSES = ("srcDevice", "dstDevice"), ("dst",)


def keep_graphs_patchable(graph_class: type = torch.cuda.CUDAGraph) -> None:
    """From now on every torch CUDA graph keeps the template that a rebind reads, also where the
    capturing code does not ask for it; such a graph is instantiated at its first replay. Costs host
    memory, about 2.5 KB a node. Call it before the engine captures; idempotent."""
    patched: Any = graph_class
    if getattr(patched, "keeps_template", False):
        return
    # Python's half of the class reads the flag in __new__, the half in C++ in __init__.
    new, init = patched.__new__, patched.__init__

    @functools.wraps(new)
    def keeping_new(cls: type, keep_graph: bool = True) -> Any:
        return new(cls, keep_graph=True)

    @functools.wraps(init)
    def keeping_init(self: object, keep_graph: bool = True) -> None:
        init(self, keep_graph=True)

    patched.__new__ = keeping_new
    patched.__init__ = keeping_init
    patched.keeps_template = True


class CudaGraphDriver:
    """A GraphDriver (see comm.graph_rebind) on this process's current device."""

    def open(self, graph: torch.cuda.CUDAGraph) -> CudaPatchableGraph:
        return CudaPatchableGraph(graph)

    def probe(self, step: Callable[[], None], buffer: Span, parity: int) -> Probe:
        step()  # Kernels are loaded outside of a capture.
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        # A thread that is left behind in a connect may still call the driver.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            step()
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        owned = tuple(Span(int(s["address"]), int(s["total_size"])) for s in segments)
        return Probe(tuple(node for _, node, _ in _read(graph)), owned, buffer, parity)


class CudaPatchableGraph:
    """A PatchableGraph. Raises RebindRefused if the graph's template was not kept, or does not say
    any more what the graph launches."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        if graph in _rebound:
            raise RebindRefused(
                "a graph was rebound before: only who did that knows what it launches"
            )
        entries = _read(graph)
        self._graph = graph
        self._nodes = tuple(node for _, node, _ in entries)
        self._handles = [handle for handle, _, _ in entries]
        self._params = [_own(node, params) for _, node, params in entries]
        self._context = _call("cuCtxGetCurrent")
        self._executable = driver.CUgraphExec(_executable(graph))

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self._nodes

    def write(self, index: int, values: Mapping[int, bytes]) -> None:
        kind, handle, owned = self._nodes[index].kind, self._handles[index], self._params[index]
        for parameter, value in values.items():
            owned.put(parameter, value)
        _rebound.add(self._graph)
        target = (self._executable, handle, owned.params)
        if kind is NodeKind.KERNEL:
            result = driver.cuGraphExecKernelNodeSetParams(*target)
        elif kind is NodeKind.MEMCPY:
            result = driver.cuGraphExecMemcpyNodeSetParams(*target, self._context)
        else:
            result = driver.cuGraphExecMemsetNodeSetParams(*target, self._context)
        if result[0] != driver.CUresult.CUDA_SUCCESS:
            raise RebindFailed(f"{self._nodes[index].name[:60]}: {result[0].name}")


class _KernelParams:
    """A kernel node's parameters in memory of ours, ready to be passed again."""

    def __init__(self, params: Any, values: tuple[bytes, ...]) -> None:
        self.params = params
        self._buffers = [ctypes.create_string_buffer(value, len(value)) for value in values]
        addresses = [ctypes.addressof(buffer) for buffer in self._buffers]
        self._array = (ctypes.c_void_p * len(addresses))(*addresses)
        params.kernelParams = ctypes.addressof(self._array)
        params.extra = 0  # It may be one or the other.

    def put(self, parameter: int, value: bytes) -> None:
        self._buffers[parameter].raw = value


class _AddressParams:
    """A copy or fill node's parameters, whose device addresses can be changed."""

    def __init__(self, params: Any, fields: tuple[str, ...]) -> None:
        self.params = params
        self._fields = fields

    def put(self, parameter: int, value: bytes) -> None:
        address = driver.CUdeviceptr(int.from_bytes(value, "little"))
        setattr(self.params, self._fields[parameter], address)


def _own(node: Node, params: Any) -> _KernelParams | _AddressParams:
    if node.kind is NodeKind.KERNEL:
        return _KernelParams(params, node.values)
    fields = _COPY_ADDRESSES if node.kind is NodeKind.MEMCPY else _FILL_ADDRESSES
    return _AddressParams(params, fields)


def _read(graph: torch.cuda.CUDAGraph) -> list[tuple[Any, Node, Any]]:
    """Handle, values and driver's parameters of every node, in the order of their creation."""
    try:
        template = driver.CUgraph(graph.raw_cuda_graph())
    except RuntimeError as exc:
        raise RebindRefused(
            "a graph was captured without its template: call keep_graphs_patchable() first"
        ) from exc
    _, count = _call("cuGraphGetNodes", template, 0)
    handles, _ = _call("cuGraphGetNodes", template, count)
    return [(handle, *_read_node(handle)) for handle in handles]


def _read_node(handle: Any) -> tuple[Node, Any]:
    kind_there = _call("cuGraphNodeGetType", handle)
    kind = _KINDS.get(kind_there, NodeKind.OPAQUE)
    if kind is NodeKind.KERNEL:
        params = _call("cuGraphKernelNodeGetParams", handle)
        return _kernel(params), params
    if kind is NodeKind.MEMCPY:
        params = _call("cuGraphMemcpyNodeGetParams", handle)
        extent = (params.WidthInBytes, params.Height, params.Depth)
        return _with_addresses(kind, params, _COPY_ADDRESSES, extent), params
    if kind is NodeKind.MEMSET:
        params = _call("cuGraphMemsetNodeGetParams", handle)
        extent = (params.elementSize, params.width, params.height)
        return _with_addresses(kind, params, _FILL_ADDRESSES, extent), params
    return Node(kind, str(kind_there.name)), None


def _kernel(params: Any) -> Node:
    by_function = int(params.func) != 0
    name, places = _signature(int(params.func if by_function else params.kern), by_function)
    values = []
    for index, address in enumerate(_addresses(params, places)):
        if address is None:
            raise RebindRefused(f"{name[:60]} was launched without parameter {index}")
        values.append(ctypes.string_at(address, places[index][1]))
    grid = (params.gridDimX, params.gridDimY, params.gridDimZ)
    block = (params.blockDimX, params.blockDimY, params.blockDimZ)
    launch = (*grid, *block, params.sharedMemBytes)
    return Node(NodeKind.KERNEL, name, tuple(values), tuple(int(n) for n in launch))


def _addresses(params: Any, places: tuple[tuple[int, int], ...]) -> list[int | None]:
    """Where the value of each parameter is. A launch gives an array of pointers, or, as cuBLAS
    does, one buffer in which every parameter has its offset."""
    if params.kernelParams:
        array = ctypes.cast(int(params.kernelParams), ctypes.POINTER(ctypes.c_void_p))
        return [array[index] for index in range(len(places))]
    buffer = _packed(int(params.extra)) if params.extra else None
    return [None if buffer is None else buffer + offset for offset, _ in places]


def _packed(extra: int) -> int | None:
    """The buffer of parameters in the launch options `extra`: pairs of key and value, then 0."""
    words = ctypes.cast(extra, ctypes.POINTER(ctypes.c_void_p))
    at = 0
    while key := words[at]:
        if key == driver.CU_LAUNCH_PARAM_BUFFER_POINTER_AS_INT:
            buffer: int | None = words[at + 1]
            return buffer
        at += 2
    return None


@functools.cache
def _signature(handle: int, by_function: bool) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Name of a kernel, offset and size of its parameters."""
    if by_function:
        wrapped: Any = driver.CUfunction(handle)
        naming, info = "cuFuncGetName", driver.cuFuncGetParamInfo
    else:
        wrapped = driver.CUkernel(handle)
        naming, info = "cuKernelGetName", driver.cuKernelGetParamInfo
    places: list[tuple[int, int]] = []
    while (answer := info(wrapped, len(places)))[0] == driver.CUresult.CUDA_SUCCESS:
        places.append((int(answer[1]), int(answer[2])))
    return _call(naming, wrapped).decode(), tuple(places)


def _with_addresses(
    kind: NodeKind, params: Any, fields: tuple[str, ...], extent: tuple[Any, ...]
) -> Node:
    values = tuple(int(getattr(params, field)).to_bytes(WORD_BYTES, "little") for field in fields)
    return Node(kind, kind.value, values, tuple(int(n) for n in extent))


def _executable(graph: torch.cuda.CUDAGraph) -> int:
    """The executable graph; one that was never instantiated is now."""
    try:
        return int(graph.raw_cuda_graph_exec())
    except RuntimeError:
        graph.instantiate()
        return int(graph.raw_cuda_graph_exec())


def _call(name: str, *arguments: Any) -> Any:
    """The call's values, as one or a tuple. Raises RebindRefused: nothing was written yet."""
    result, *values = getattr(driver, name)(*arguments)
    if result != driver.CUresult.CUDA_SUCCESS:
        raise RebindRefused(f"{name}: {result.name}")
    return values[0] if len(values) == 1 else tuple(values)
