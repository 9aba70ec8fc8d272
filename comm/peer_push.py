"""Weights pushed into a peer's arena that is mapped here, inside one host and without NIXL.

The target offers its arena on a unix socket. A source connects, gets the arena's chunks as file
descriptors, maps them, and copies with the GPU's copy engine. The connection stays open for as long
as the mapping does: each side learns by it that the other is gone.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dynamo_elastic.comm.base import MemoryKind, Span, TransferState
from dynamo_elastic.comm.peer_link import (
    fetch_chunks,
    greet,
    hung_up,
    listen,
    send_chunks,
)
from dynamo_elastic.errors import DeviceMemoryError, TransferError
from dynamo_elastic.failpoints import failpoint
from dynamo_elastic.types import SharedChunk

log = logging.getLogger(__name__)

_LOCAL = "none"


class MappedArena(Protocol):
    """A peer's arena, mapped in this process."""

    @property
    def address(self) -> int: ...

    def close(self) -> None:
        """Unmap it, once nothing copies into it any more."""
        ...


class CopyEngine(Protocol):
    """Maps and copies device memory. Raises DeviceMemoryError."""

    def map(self, chunks: Sequence[SharedChunk]) -> MappedArena:
        """Map chunks side by side; their descriptors stay open and the caller's."""
        ...

    def copy(self, pairs: Sequence[tuple[Span, Span]]) -> Callable[[], bool]:
        """Start copying each first span to its second one, equal in size, in this process's
        addresses. Returns what tells whether all of it is done."""
        ...


@dataclass(slots=True)
class _Remote:
    """A peer whose arena is mapped here."""

    arena: Span
    mapped: MappedArena
    connection: socket.socket

    @property
    def alive(self) -> bool:
        return not hung_up(self.connection)

    def translate(self, span: Span) -> int | None:
        """Where `span` of the peer is in this process; None if it is not all in its arena."""
        offset = span.address - self.arena.address
        inside = offset >= 0 and offset + span.size_bytes <= self.arena.size_bytes
        return self.mapped.address + offset if inside else None


def joined(pairs: Sequence[tuple[Span, Span]]) -> list[tuple[Span, Span]]:
    """The same copies, neighbours in one. A push starts thousands, each of which has to wait for
    the interpreter while a step is served."""
    whole: list[tuple[Span, Span]] = []
    for source, target in pairs:
        if whole:
            before, there = whole[-1]
            if (before.address + before.size_bytes, there.address + there.size_bytes) == (
                source.address,
                target.address,
            ):
                size_bytes = before.size_bytes + source.size_bytes
                whole[-1] = (
                    Span(before.address, size_bytes, before.device),
                    Span(there.address, size_bytes, there.device),
                )
                continue
        whole.append((source, target))
    return whole


class PeerTransfer:
    """A Transfer (see comm.base) by the copy engine: it can't be stopped once it is started."""

    def __init__(self, remote: _Remote, name: str, done: Callable[[], bool]) -> None:
        self._remote = remote
        self._name = name
        self._done = done
        self._released = False

    def poll(self) -> TransferState:
        if self._released:
            raise TransferError("the write was released", remote=self._name)
        try:
            if self._done():
                return TransferState.DONE
        except DeviceMemoryError as exc:
            raise TransferError(f"a write failed: {exc}", remote=self._name) from exc
        if not self._remote.alive:
            raise TransferError("the remote went away", remote=self._name)
        return TransferState.RUNNING

    def release(self) -> None:
        self._released = True


class PeerAgent:
    """A TransferAgent (see comm.base) that copies into arenas of other processes of this host.

    The socket lies in `folder`, which only this user may enter. Used by one thread; another one of
    its own answers sources.

    close() stops what this agent sends, and hangs up on sources, but can't take its memory back
    from one that still has it mapped and goes on copying. So before the memory of an aborted
    transfer is used again, wait until `mapped_by` is empty, or give the arena new memory at its
    addresses: what comes late then lands in the old one.
    """

    def __init__(self, name: str, engine: CopyEngine, folder: Path) -> None:
        self._name = name
        self._engine = engine
        self._path = folder / f"{name}.sock"
        self._arena = Span(0, 0)
        self._chunks: Sequence[SharedChunk] = ()
        self._local: list[Span] = []
        self._remotes: dict[str, _Remote] = {}
        self._sources: list[tuple[str, socket.socket]] = []
        self._sources_lock = threading.Lock()
        self._listener: socket.socket | None = None
        self._answering: threading.Thread | None = None
        self._closed = False

    @property
    def name(self) -> str:
        return self._name

    @property
    def mapped_by(self) -> frozenset[str]:
        """Sources that have our arena mapped: they may write into it, and hold its memory. Also
        right after close()."""
        with self._sources_lock:
            gone = [source for source in self._sources if hung_up(source[1])]
            for source in gone:
                source[1].close()
                self._sources.remove(source)
            return frozenset(name for name, _ in self._sources)

    def register(self, span: Span, kind: MemoryKind = MemoryKind.VRAM) -> None:
        self._check_open()
        self._local.append(span)

    def offer(self, arena: Span, chunks: Sequence[SharedChunk]) -> None:
        """Let sources map `arena` by its exported `chunks`, whose descriptors are this agent's from
        now on: they hold the memory until close(). Once an agent. Raises TransferError if the
        socket can't be made."""
        self._check_open()
        self._chunks = chunks
        try:
            listener = listen(self._path)
        except OSError as exc:
            raise TransferError(f"offering memory failed: {exc}", remote=_LOCAL) from exc
        self._arena, self._listener = arena, listener
        self._answering = threading.Thread(target=self._answer, args=(listener,), daemon=True)
        self._answering.start()

    def metadata(self) -> bytes:
        self._check_open()
        arena = [self._arena.address, self._arena.size_bytes, self._arena.device]
        return json.dumps({"name": self._name, "path": str(self._path), "arena": arena}).encode()

    def add_remote(self, metadata: bytes) -> str:
        self._check_open()
        try:
            said = json.loads(metadata)
            name, path, arena = str(said["name"]), str(said["path"]), Span(*said["arena"])
        except (ValueError, KeyError, TypeError) as exc:
            raise TransferError("that is no metadata of an agent", remote="unknown") from exc
        known = self._remotes.get(name)
        if known is not None and known.alive:
            return name
        self.remove_remote(name)
        self._remotes[name] = self._map(name, path, arena)
        return name

    def _map(self, name: str, path: str, arena: Span) -> _Remote:
        chunks: list[SharedChunk] = []
        try:
            connection = fetch_chunks(path, self._name, chunks)
            if sum(c.size_bytes for c in chunks) < arena.size_bytes:
                connection.close()
                raise OSError("it offers less memory than it said")
            failpoint("transfer.before_map")
            try:
                return _Remote(arena, self._engine.map(chunks), connection)
            except DeviceMemoryError:
                connection.close()
                raise
        except (OSError, ValueError, DeviceMemoryError) as exc:
            raise TransferError(f"mapping a remote's memory failed: {exc}", remote=name) from exc
        finally:
            for chunk in chunks:
                os.close(chunk.descriptor)

    def remove_remote(self, name: str) -> None:
        remote = self._remotes.pop(name, None)
        if remote is not None:
            remote.mapped.close()
            remote.connection.close()

    def write(
        self, remote: str, local: Sequence[Span], target: Sequence[Span], kind: MemoryKind
    ) -> PeerTransfer:
        self._check_open()
        peer = self._remotes.get(remote)
        if peer is None or not peer.alive:
            raise TransferError("the remote is unknown, or went away", remote=remote)
        if [s.size_bytes for s in local] != [s.size_bytes for s in target]:
            raise TransferError("local and remote memory do not match", remote=remote)
        pairs: list[tuple[Span, Span]] = []
        for ours, theirs in zip(local, target, strict=True):
            address = peer.translate(theirs)
            if address is None or not self._holds(ours):
                raise TransferError("memory is not registered, or not offered", remote=remote)
            pairs.append((ours, Span(address, ours.size_bytes, ours.device)))
        try:
            return PeerTransfer(peer, remote, self._engine.copy(joined(pairs)))
        except DeviceMemoryError as exc:
            raise TransferError(f"a write failed: {exc}", remote=remote) from exc

    def close(self) -> None:
        self._closed = True
        for name in list(self._remotes):
            self.remove_remote(name)
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            self._listener.close()
            self._listener = None
            self._path.unlink(missing_ok=True)
        if self._answering is not None:
            self._answering.join()  # bounded by the timeouts of one handshake
            self._answering = None
        for chunk in self._chunks:
            os.close(chunk.descriptor)
        self._chunks = ()
        if self.mapped_by:
            with self._sources_lock:
                for _, connection in self._sources:
                    with suppress(OSError):
                        connection.shutdown(socket.SHUT_WR)

    def _holds(self, span: Span) -> bool:
        end = span.address + span.size_bytes
        return any(
            s.address <= span.address and end <= s.address + s.size_bytes for s in self._local
        )

    def _check_open(self) -> None:
        if self._closed:
            raise TransferError(f"agent {self._name} is closed", remote=_LOCAL)

    def _answer(self, listener: socket.socket) -> None:
        """Give every source that comes the arena's chunks, until the listener is shut down."""
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            try:
                name = greet(connection)
            except (OSError, ValueError) as exc:
                log.warning("a source was turned away: %s", exc)
                connection.close()
                continue
            # From the first chunk on it may write, so it counts before it has any.
            with self._sources_lock:
                self._sources.append((name, connection))
            try:
                send_chunks(connection, self._chunks)
            except OSError as exc:
                log.warning("source %s did not take our memory: %s", name, exc)
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
