"""How the descriptors of an arena's chunks get from one process of a host to another.

A source connects to the target's unix socket and says its name; the target sends all chunks, a
message at a time. After that neither says anything: the connection stands for the mapping, and
each side sees by it that the other is gone.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

from dynamo_elastic.types import SharedChunk

_CHUNKS_A_MESSAGE = 64
"""The kernel passes at most 253 descriptors in one message."""
_MESSAGE_BYTES = 1 << 16
_TIMEOUT_S = 10.0
_BACKLOG = 16
_MAX_PATH_BYTES = 107


def listen(path: Path) -> socket.socket:
    """A listening socket at `path`. Raises OSError."""
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise OSError(f"{path} is too long for a socket")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(os.fspath(path))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def fetch_chunks(path: str, name: str, chunks: list[SharedChunk]) -> socket.socket:
    """Connect to the target at `path` as `name`, and append all that it sends: what has come is in
    `chunks` also if this raises OSError or ValueError. The connection stands for the mapping."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(_TIMEOUT_S)
        connection.connect(path)
        connection.send(name.encode())
        _receive_chunks(connection, chunks)
    except (OSError, ValueError):
        connection.close()
        raise
    return connection


def greet(connection: socket.socket) -> str:
    """The name of a source that has come. Raises OSError for one of another user."""
    connection.settimeout(_TIMEOUT_S)
    name = connection.recv(_MESSAGE_BYTES).decode()
    if _user_of(connection) != os.geteuid():
        raise OSError(f"{name} is of another user")
    return name


def send_chunks(connection: socket.socket, chunks: Sequence[SharedChunk]) -> None:
    """Pass all `chunks`, which stay open here. Raises OSError."""
    for start in range(0, len(chunks), _CHUNKS_A_MESSAGE):
        part = chunks[start : start + _CHUNKS_A_MESSAGE]
        more = start + len(part) < len(chunks)
        places = [[c.offset, c.size_bytes] for c in part]
        message = json.dumps({"chunks": places, "more": more}).encode()
        socket.send_fds(connection, [message], [c.descriptor for c in part])


def _receive_chunks(connection: socket.socket, chunks: list[SharedChunk]) -> None:
    """Append all that the target sends: what has come is in `chunks` also if this raises."""
    more = True
    while more:
        data, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, _CHUNKS_A_MESSAGE)
        received = [SharedChunk(descriptor, 0, 0) for descriptor in descriptors]
        try:
            said = json.loads(data or b"{}")
            places, more = said.get("chunks", []), bool(said.get("more"))
            if not places or len(places) != len(descriptors):
                raise OSError("the target hung up, or sent other descriptors than it said")
            received = [
                SharedChunk(descriptor, offset, size_bytes)
                for descriptor, (offset, size_bytes) in zip(descriptors, places, strict=True)
            ]
        finally:
            chunks += received


def hung_up(connection: socket.socket) -> bool:
    """Whether the other end is gone; neither side says anything after the handshake."""
    try:
        poller = select.poll()
        poller.register(connection, select.POLLIN | select.POLLRDHUP)
        return bool(poller.poll(0))
    except (OSError, ValueError):  # it is broken, or closed by us
        return True


def _user_of(connection: socket.socket) -> int:
    credentials = struct.Struct("iII")  # pid, user, group
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    return int(credentials.unpack(raw)[1])
