"""Memory of another process that is filled through its userfaultfd (see userfaultfd(2))."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
from collections.abc import Iterator

from dynamo_elastic.errors import SnapshotError

PAGE_BYTES = mmap.PAGESIZE

_COPY_IOCTL, _ZERO_IOCTL = 0xC028AA03, 0xC020AA04
_COPY = struct.Struct("=QQQQq")  # to, from, length, mode, copied
_ZERO = struct.Struct("=QQQq")  # start, length, mode, zeroed
_MESSAGE = struct.Struct("=B7xQQ8x")  # event; of a fault: flags, address
_MESSAGES = 16
_FAULT = 0x12
_TRIES = 1000


class Userfault:
    """One process's missing pages. It waits wherever it touches one, until we fill it. Owns the
    descriptor; once that is closed, pages still missing are zero. Threads may share it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        os.close(self._fd)

    def give_up(self) -> None:
        """Like close(), while other threads may still call us: they get an OSError."""
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        os.dup2(null, self._fd, inheritable=False)
        os.close(null)

    def faults(self) -> Iterator[int]:
        """Addresses of pages that threads wait for now. Raises SnapshotError if the process has
        changed its mappings: it was not to run yet."""
        try:
            data = os.read(self._fd, _MESSAGES * _MESSAGE.size)
        except BlockingIOError:
            return
        for event, _, address in _MESSAGE.iter_unpack(data):
            if event != _FAULT:
                raise SnapshotError(f"a process changed its memory ({event:#x}) as it was filled")
            yield address - address % PAGE_BYTES

    def copy(self, address: int, source: int, size_bytes: int) -> None:
        """Fill whole pages with what is at `source` in our memory; those that are there stay.
        Raises OSError."""
        done = idle = 0
        step = size_bytes
        while done < size_bytes and idle < _TRIES:
            place = (address + done, source + done, min(step, size_bytes - done), 0, 0)
            try:
                more = self._step(_COPY_IOCTL, _COPY, place)
            except OSError as exc:
                # The kernel fills one mapping at a time, and pages in a row may be of several.
                if exc.errno != errno.ENOENT or step == PAGE_BYTES:
                    raise
                step = max(PAGE_BYTES, step // 2 // PAGE_BYTES * PAGE_BYTES)
                continue
            done, idle = done + more, 0 if more else idle + 1
            step = min(size_bytes, 2 * step)
        if done < size_bytes:
            raise OSError(errno.EAGAIN, f"the memory at {address + done:#x} keeps changing")

    def zero(self, address: int) -> None:
        """Fill one page with zeros, if it is not there; it may have to be asked for again. Raises
        OSError."""
        self._step(_ZERO_IOCTL, _ZERO, (address, PAGE_BYTES, 0, 0))

    def _step(self, request: int, form: struct.Struct, fields: tuple[int, ...]) -> int:
        """How many bytes are done."""
        argument = bytearray(form.pack(*fields))
        try:
            fcntl.ioctl(self._fd, request, argument, True)
        except OSError as exc:
            if exc.errno == errno.EEXIST:
                return PAGE_BYTES
            if exc.errno != errno.EAGAIN:
                raise
        return max(0, int(form.unpack(argument)[-1]))
