"""A VmmDriver without a GPU: device memory is files in memory, device addresses are our own.

It keeps the real one's rules: what is not mapped can't be touched (the process dies of it), memory
lives for as long as a handle or a mapping does, and a descriptor lets another process map it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence

import torch

from dynamo_elastic.errors import DeviceMemoryError, DeviceMemoryFull

GRANULARITY_BYTES = 2 << 20
_INVALID = "CUDA_ERROR_INVALID_VALUE"
_FAILED = ctypes.c_void_p(-1).value
_NO_ACCESS, _MAP_FIXED, _MAP_NORESERVE = 0, 0x10, 0x4000
_NOTHING = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class FakeVmm:
    """GPUs with `total_bytes` each. `fails` names calls that are refused from now on."""

    def __init__(self, *, total_bytes: int = 64 * GRANULARITY_BYTES, devices: int = 1) -> None:
        self._total_bytes = total_bytes
        self._devices = devices
        self._handles: dict[int, tuple[int, int]] = {}
        """File descriptor -> (device, size in bytes)."""
        self._mapped: dict[int, tuple[int, int]] = {}
        """Address -> (size in bytes, handle)."""
        self._allowed: set[int] = set()
        self.reserved: dict[int, int] = {}
        self.fails: set[str] = set()

    @property
    def handles(self) -> Sequence[int]:
        """Those that are not released."""
        return tuple(self._handles)

    @property
    def mapped_bytes(self) -> int:
        return sum(size_bytes for size_bytes, _ in self._mapped.values())

    def granularity_bytes(self, device: int) -> int:
        self._enter("cuMemGetAllocationGranularity", 0 <= device < self._devices)
        return GRANULARITY_BYTES

    def free_bytes(self, device: int) -> int:
        used = sum(size for where, size in self._handles.values() if where == device)
        return self._total_bytes - used

    def reserve(self, size_bytes: int) -> int:
        self._enter("cuMemAddressReserve", _whole(size_bytes))
        address = _libc.mmap(None, size_bytes, _NO_ACCESS, _NOTHING, -1, 0)
        if address in (None, _FAILED):
            raise OSError(ctypes.get_errno(), "mmap")
        self.reserved[address] = size_bytes
        return int(address)

    def free_addresses(self, address: int, size_bytes: int) -> None:
        self._enter("cuMemAddressFree", self.reserved.get(address) == size_bytes)
        _libc.munmap(address, size_bytes)
        del self.reserved[address]

    def create(self, size_bytes: int, device: int) -> int:
        self._enter("cuMemCreate", _whole(size_bytes) and 0 <= device < self._devices)
        free_bytes = self.free_bytes(device)
        if size_bytes > free_bytes:
            raise DeviceMemoryFull(device, needed_bytes=size_bytes, free_bytes=free_bytes)
        handle = os.memfd_create("device-memory", os.MFD_CLOEXEC)
        os.truncate(handle, size_bytes)
        self._handles[handle] = (device, size_bytes)
        return handle

    def release(self, handle: int) -> None:
        self._enter("cuMemRelease", handle in self._handles)
        del self._handles[handle]
        os.close(handle)

    def map(self, address: int, size_bytes: int, handle: int) -> None:
        fits = handle in self._handles and self._handles[handle][1] == size_bytes
        self._enter("cuMemMap", fits and self._within(address, size_bytes))
        self._mapped[address] = (size_bytes, handle)

    def allow(self, address: int, size_bytes: int, device: int) -> None:
        pieces = self._pieces(address, size_bytes)
        self._enter("cuMemSetAccess", sum(self._mapped[at][0] for at in pieces) == size_bytes)
        for at in pieces:
            size, handle = self._mapped[at]
            access = mmap.PROT_READ | mmap.PROT_WRITE
            _libc.mmap(at, size, access, mmap.MAP_SHARED | _MAP_FIXED, handle, 0)
            self._allowed.add(at)

    def unmap(self, address: int, size_bytes: int) -> None:
        pieces = self._pieces(address, size_bytes)
        self._enter("cuMemUnmap", sum(self._mapped[at][0] for at in pieces) == size_bytes)
        for at in pieces:
            size, _ = self._mapped.pop(at)
            _libc.mmap(at, size, _NO_ACCESS, _NOTHING | _MAP_FIXED, -1, 0)
            self._allowed.discard(at)

    def export_descriptor(self, handle: int) -> int:
        self._enter("cuMemExportToShareableHandle", handle in self._handles)
        return os.dup(handle)

    def import_descriptor(self, descriptor: int) -> int:
        self._enter("cuMemImportFromShareableHandle", True)
        handle = os.dup(descriptor)
        self._handles[handle] = (-1, os.fstat(handle).st_size)
        return handle

    def as_bytes(self, address: int, size_bytes: int, device: int) -> torch.Tensor:
        reachable = [at for at in self._pieces(address, size_bytes) if at in self._allowed]
        self._enter(
            "cuPointerGetAttribute", sum(self._mapped[at][0] for at in reachable) == size_bytes
        )
        memory = (ctypes.c_char * size_bytes).from_address(address)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def synchronize(self, device: int) -> None:
        self._enter("cuCtxSynchronize", True)

    def _enter(self, call: str, legal: bool) -> None:
        if call in self.fails or not legal:
            raise DeviceMemoryError(call, _INVALID)

    def _within(self, address: int, size_bytes: int) -> bool:
        return any(
            start <= address and address + size_bytes <= start + reserved
            for start, reserved in self.reserved.items()
        ) and not self._pieces(address, size_bytes)

    def _pieces(self, address: int, size_bytes: int) -> list[int]:
        end = address + size_bytes
        return [at for at, (size, _) in self._mapped.items() if at < end and address < at + size]


def _whole(size_bytes: int) -> bool:
    return size_bytes > 0 and size_bytes % GRANULARITY_BYTES == 0
