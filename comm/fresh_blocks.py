"""Small blocks of GPU memory that peers can open, whatever this process shared in earlier lives.

The driver cuts blocks of less than 2 MiB out of chunks of that size, and CUDA IPC shares the whole
chunk. One of which anything was shared before a checkpoint can't be opened after it any more:
peers get CUDA_ERROR_NOT_PERMITTED, for new blocks in it too (docs/findings.md, section 13).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from cuda.bindings import driver

from dynamo_elastic.errors import DeviceMemoryError

CHUNK_BYTES = 2 << 20
LEAST_BYTES = 512
"""The driver rounds sizes up to it."""
_HALF_BYTES = CHUNK_BYTES // 2
_MOST_BLOCKS = 1 << 12


class Heap(Protocol):
    """Device memory of the current context, by address."""

    def allocate(self, size_bytes: int) -> int: ...

    def free(self, address: int) -> None: ...


class DriverHeap:
    """The driver's own, in the primary context of `device`, which becomes this thread's. Raises
    DeviceMemoryError; nothing is allocated or freed then."""

    def __init__(self, device: int) -> None:
        # A thread that has not used CUDA yet has no context, and the runtime gives it none here.
        result, context = driver.cuDevicePrimaryCtxRetain(device)
        _check("cuDevicePrimaryCtxRetain", result, f"device {device}")
        (result,) = driver.cuCtxSetCurrent(context)
        driver.cuDevicePrimaryCtxRelease(device)  # its other holders are those that use it
        _check("cuCtxSetCurrent", result, f"device {device}")

    def allocate(self, size_bytes: int) -> int:
        result, address = driver.cuMemAlloc(size_bytes)
        _check("cuMemAlloc", result, f"{size_bytes} B")
        return int(address)

    def free(self, address: int) -> None:
        (result,) = driver.cuMemFree(address)
        _check("cuMemFree", result, hex(address))


@contextmanager
def fresh_blocks(heap: Heap) -> Iterator[None]:
    """What is allocated within lies in chunks that did not exist before, as long as nobody frees
    small blocks meanwhile: all room in older chunks is held until the end. Takes some milliseconds
    and no memory but a chunk. Raises DeviceMemoryError, and holds nothing then."""
    held: list[int] = []
    try:
        _fill(heap, held)
        yield
    finally:
        for address in held:
            heap.free(address)


def _fill(heap: Heap, held: list[int]) -> None:
    """Hold all room in the chunks that there are, the largest pieces first."""
    old: set[int] = set()
    size_bytes = _HALF_BYTES
    while size_bytes >= LEAST_BYTES:
        address = heap.allocate(size_bytes)
        held.append(address)
        if _chunk(address) not in old and _is_new(heap, address):
            heap.free(held.pop())
            size_bytes //= 2
            continue
        old.add(_chunk(address))
        if len(held) > _MOST_BLOCKS:
            raise DeviceMemoryError("cuMemAlloc", "", "no new chunk of small blocks is to be had")


def _is_new(heap: Heap, address: int) -> bool:
    """True if the chunk of the block at `address` was made for it. Then it has room for a half, and
    older ones have not: larger pieces of them are held."""
    half = heap.allocate(_HALF_BYTES)
    heap.free(half)
    return _chunk(half) == _chunk(address)


def _chunk(address: int) -> int:
    return address // CHUNK_BYTES


def _check(call: str, result: driver.CUresult, what: str) -> None:
    if result != driver.CUresult.CUDA_SUCCESS:
        raise DeviceMemoryError(call, result.name, f"{result.name} ({what})")
