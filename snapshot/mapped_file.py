"""A file in our memory, by address: what the kernel is told to copy from."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

from dynamo_elastic.errors import SnapshotError

_POPULATE_READ = 22
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class MappedFile:
    """Read only, and shared: it costs no memory but the file's own. Close it."""

    def __init__(self, path: Path) -> None:
        """Raises OSError, or SnapshotError of an empty file."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.size_bytes = os.fstat(fd).st_size
            if self.size_bytes == 0:
                raise SnapshotError(f"{path} is empty")
            flags = (mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
            address = _libc.mmap(None, self.size_bytes, *flags)
        finally:
            os.close(fd)
        if address is None or address == _FAILED:
            raise OSError(ctypes.get_errno(), f"{path} can't be mapped")
        self.address: int = address

    def prepare(self, offset: int, size_bytes: int) -> None:
        """Have it read and mapped at once, which is cheaper than page by page. `offset`: of a page.
        Where the kernel can't, whoever reads does it."""
        _libc.madvise(self.address + offset, size_bytes, _POPULATE_READ)

    def close(self) -> None:
        _libc.munmap(self.address, self.size_bytes)
