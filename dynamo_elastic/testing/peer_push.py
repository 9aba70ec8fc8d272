"""What a PeerAgent needs, without a GPU: arenas of memfds that other processes can map."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import suppress

from dynamo_elastic.comm.base import Span
from dynamo_elastic.errors import DeviceMemoryError
from dynamo_elastic.types import SharedChunk

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value


def _mmap(address: int, size_bytes: int, descriptor: int, flags: int) -> int:
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    mapped = _libc.mmap(address, size_bytes, protection, flags, descriptor, 0)
    if mapped is None or mapped == _FAILED:
        raise DeviceMemoryError("mmap", os.strerror(ctypes.get_errno()))
    return int(mapped)


class MappedChunks:
    """Chunks side by side in this process. Close it."""

    def __init__(self, chunks: Sequence[SharedChunk]) -> None:
        self.size_bytes = sum(chunk.size_bytes for chunk in chunks)
        self._address = _mmap(0, self.size_bytes, -1, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for chunk in chunks:
            place = self._address + chunk.offset
            _mmap(place, chunk.size_bytes, chunk.descriptor, mmap.MAP_SHARED | _MAP_FIXED)

    @property
    def address(self) -> int:
        return self._address

    def close(self) -> None:
        if self._address:
            _libc.munmap(self._address, self.size_bytes)
            self._address = 0

    def view(self) -> memoryview:
        """The bytes, not to be used after close()."""
        return memoryview((ctypes.c_char * self.size_bytes).from_address(self._address)).cast("B")


class HostSharedArena:
    """Host memory in chunks of one memfd each. Sizes are multiples of a page. Close it."""

    def __init__(self, size_bytes: int, chunk_bytes: int) -> None:
        self.chunks: list[SharedChunk] = []
        for offset in range(0, size_bytes, chunk_bytes):
            descriptor = os.memfd_create("chunk")
            size = min(chunk_bytes, size_bytes - offset)
            os.truncate(descriptor, size)
            self.chunks.append(SharedChunk(descriptor, offset, size))
        self._mapped = MappedChunks(self.chunks)

    @property
    def span(self) -> Span:
        return Span(self._mapped.address, self._mapped.size_bytes)

    def view(self) -> memoryview:
        return self._mapped.view()

    def export_chunks(self) -> tuple[SharedChunk, ...]:
        """As VmmArena: descriptors that the caller closes."""
        return tuple(SharedChunk(os.dup(c.descriptor), c.offset, c.size_bytes) for c in self.chunks)

    def close(self) -> None:
        self._mapped.close()
        for chunk in self.chunks:
            with suppress(OSError):
                os.close(chunk.descriptor)
        self.chunks = []


class HostCopyEngine:
    """A CopyEngine on host memory that copies at once, unless a test says that it is `stuck`: then
    copies are done but never said to be."""

    def __init__(self) -> None:
        self.stuck = False
        self.started_bytes = 0

    def map(self, chunks: Sequence[SharedChunk]) -> MappedChunks:
        return MappedChunks(chunks)

    def copy(self, pairs: Sequence[tuple[Span, Span]]) -> Callable[[], bool]:
        for source, target in pairs:
            ctypes.memmove(target.address, source.address, source.size_bytes)
            self.started_bytes += source.size_bytes
        return lambda: not self.stuck
