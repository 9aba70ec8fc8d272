"""Fills the memory of processes that CRIU restores, with many threads instead of its one.

CRIU (`restore --lazy-pages`) makes the mappings of each process, leaves their pages missing and
hands us its userfaultfd. We are what `criu lazy-pages` would be, with one difference: the processes
are stopped until every page is there, so nothing of the server outlives the restore.
"""

from __future__ import annotations

import bisect
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType

from dynamo_elastic.errors import ImagerError, SnapshotError
from dynamo_elastic.snapshot.criu_images import PageRange, own_pages, own_pids, pages_file
from dynamo_elastic.snapshot.mapped_file import MappedFile
from dynamo_elastic.snapshot.userfault import PAGE_BYTES, Userfault

SOCKET = "lazy-pages.socket"
"""In CRIU's working directory: where it looks for its page server."""

_THREADS = 8
_PIECE_BYTES = 8 << 20
_NUMBER_BYTES = 4
_RESTORED = 0x52535446
"""In place of a pid: all have been sent."""
_JOIN_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class _Process:
    """One process being filled. `pid`: in the image; `ranges`: by address; `pages`: their
    content."""

    pid: int
    memory: Userfault
    ranges: list[PageRange]
    pages: MappedFile

    def pieces(self) -> Iterator[PageRange]:
        for r in self.ranges:
            for at in range(0, r.size_bytes, _PIECE_BYTES):
                size = min(_PIECE_BYTES, r.size_bytes - at)
                yield PageRange(r.address + at, size, r.offset + at)

    def fill(self, piece: PageRange) -> None:
        if piece.offset + piece.size_bytes > self.pages.size_bytes:
            raise SnapshotError(f"the file of pages ends at {self.pages.size_bytes} bytes")
        self.pages.prepare(piece.offset, piece.size_bytes)
        self.memory.copy(piece.address, self.pages.address + piece.offset, piece.size_bytes)

    def fill_page(self, address: int) -> None:
        """The page that somebody waits for; zeros if the image does not have it."""
        at = bisect.bisect_right(self.ranges, address, key=lambda r: r.address) - 1
        if at < 0 or address >= self.ranges[at].address + self.ranges[at].size_bytes:
            self.memory.zero(address)
            return
        offset = self.ranges[at].offset + address - self.ranges[at].address
        self.fill(PageRange(address, PAGE_BYTES, offset))

    def serve(self) -> None:
        """The pages that threads wait for now."""
        for address in self.memory.faults():
            self.fill_page(address)

    def close(self) -> None:
        self.memory.close()
        self.pages.close()


class PageServer:
    """Serves one `criu restore --lazy-pages`. A context: entered before CRIU starts, left when
    fill() has returned or the processes are ended; pages that are missing then are zero."""

    def __init__(self, images: Path, work_dir: Path) -> None:
        self._images = images
        self._work_dir = work_dir
        self._processes: list[_Process] = []
        self._all_sent = threading.Event()
        self._failure: Exception | None = None
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._serve, name="page-server", daemon=True)
        self._ours, self._stop = socket.socketpair()
        self._sockets = [self._ours, self._stop]

    def __enter__(self) -> PageServer:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sockets.append(listener)
        try:
            _bind(listener, self._work_dir)
        except OSError as exc:
            self._close_sockets()
            raise _failed(f"{self._work_dir / SOCKET}: {exc.strerror}") from exc
        self._watch(listener, partial(self._accept, listener))
        self._selector.register(self._stop, selectors.EVENT_READ, None)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._ours.shutdown(socket.SHUT_RDWR)
        self._thread.join(_JOIN_TIMEOUT_S)
        for process in self._processes:
            process.close()
        self._selector.close()
        (self._work_dir / SOCKET).unlink(missing_ok=True)

    def check(self) -> None:
        """Raises ImagerError if a page could not be served."""
        if self._failure is not None:
            raise _failed(str(self._failure)) from self._failure

    def fill(self, *, timeout_s: float) -> int:
        """Every page of the image is in place; how many bytes. CRIU has ended, the processes are
        stopped. Raises ImagerError; then some are missing, and the processes must be ended."""
        deadline = time.monotonic() + timeout_s
        sent = self._all_sent.wait(max(0.0, timeout_s))
        self.check()
        unknown = own_pids(self._images) - {process.pid for process in self._processes}
        if not sent or unknown:
            raise _failed(f"CRIU did not send the memory of processes {sorted(unknown)}")
        work = iter([(process, p) for process in self._processes for p in process.pieces()])
        count = min(_THREADS, os.cpu_count() or 1)
        with ThreadPoolExecutor(count, thread_name_prefix="pages") as threads:
            futures = [threads.submit(self._fill, work, deadline) for _ in range(count)]
            sizes = [future.result() for future in futures]
        self.check()
        return sum(sizes)

    def _fill(self, work: Iterator[tuple[_Process, PageRange]], deadline: float) -> int:
        size_bytes = 0
        for process, piece in work:
            self.check()
            if time.monotonic() > deadline:
                raise _failed("the pages were not in place before the deadline")
            try:
                process.fill(piece)
            except (OSError, SnapshotError) as exc:
                raise _failed(f"at {piece.address:#x}: {exc}") from exc
            size_bytes += piece.size_bytes
        return size_bytes

    def _serve(self) -> None:
        """Until we are told to stop, or something fails."""
        try:
            self._answer()
        except (OSError, SnapshotError) as exc:
            self._failure = exc
        finally:
            # Nobody is to wait for pages that don't come; who did will be ended.
            for process in self._processes:
                process.memory.give_up()
            self._close_sockets()
            self._all_sent.set()

    def _answer(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    return
                key.data()

    def _watch(self, file: socket.socket | Userfault, act: Callable[[], None]) -> None:
        self._selector.register(file, selectors.EVENT_READ, act)

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        self._sockets.append(connection)
        self._watch(connection, partial(self._receive, connection))

    def _receive(self, connection: socket.socket) -> None:
        number = connection.recv(_NUMBER_BYTES, socket.MSG_WAITALL)
        pid = int.from_bytes(number, "little", signed=True)
        if not number or pid == _RESTORED:
            self._selector.unregister(connection)
            if pid == _RESTORED:
                self._all_sent.set()
        elif pid > 0:  # a zombie's is negative, and has no memory
            self._add(pid, connection)

    def _add(self, pid: int, connection: socket.socket) -> None:
        _, fds, _, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
        if not fds:
            raise SnapshotError(f"CRIU sent no userfaultfd of process {pid}")
        memory = Userfault(fds[0])
        try:
            ranges = own_pages(self._images, pid)
            pages = MappedFile(pages_file(self._images, pid))
        except BaseException:
            memory.close()
            raise
        process = _Process(pid, memory, ranges, pages)
        self._processes.append(process)
        self._watch(memory, process.serve)

    def _close_sockets(self) -> None:
        for file in self._sockets:
            file.close()


def _bind(listener: socket.socket, work_dir: Path) -> None:
    directory = os.open(work_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Not by its own name: that of a socket has 107 bytes at most.
        listener.bind(f"/proc/self/fd/{directory}/{SOCKET}")
    finally:
        os.close(directory)
    listener.listen(1)


def _failed(text: str) -> ImagerError:
    return ImagerError(("page server",), 1, text)
