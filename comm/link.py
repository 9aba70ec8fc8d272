"""Framed messages over one non-blocking stream socket: what goes out, and what has come in."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import deque
from dataclasses import dataclass

MAX_FRAME_BYTES = 1 << 30
"""More than this in one frame is garbage, not a frame."""

_HEADER = struct.Struct("!BQI")


@dataclass(frozen=True, slots=True)
class Frame:
    """One message. `number` counts the frames of the connection; `kind` is the user's."""

    kind: int
    number: int
    payload: bytes


class Link:
    """One peer, over a connected, non-blocking socket, which it owns.

    Once the connection breaks, or the peer talks nonsense, it is no longer `alive`; frames that
    came before stay in the inbox.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.inbox: deque[Frame] = deque()
        self.alive = True
        self._unsent: list[memoryview] = []
        self._header = bytearray(_HEADER.size)
        self._body: bytearray | None = None
        self._filled = 0

    @property
    def sending(self) -> bool:
        """True while a part of a frame waits for room in the socket."""
        return bool(self._unsent)

    def send(self, frame: Frame) -> None:
        """Queue `frame` and send of it what the socket takes at once. A dead link drops it.

        Raises ValueError if it is larger than MAX_FRAME_BYTES.
        """
        if len(frame.payload) > MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {len(frame.payload)} bytes; at most {MAX_FRAME_BYTES}")
        if not self.alive:
            return
        header = _HEADER.pack(frame.kind, frame.number, len(frame.payload))
        self._unsent += [memoryview(header), memoryview(frame.payload)]
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes. A peer that is gone is found out here too."""
        try:
            while self._unsent:
                self._unsent = _drop(self._unsent, self.sock.sendmsg(self._unsent))
        except BlockingIOError:
            return
        except OSError:
            self.receive()  # What it sent before it went still counts.
            self.shut_down()

    def receive(self) -> None:
        """Move all that has arrived into the inbox, without waiting for more."""
        try:
            while self.alive:
                wanted = self._header if self._body is None else self._body
                if self._filled < len(wanted):
                    count = self.sock.recv_into(memoryview(wanted)[self._filled :])
                    if count == 0:
                        return self.shut_down()
                    self._filled += count
                if self._filled == len(wanted):
                    self._complete()
        except BlockingIOError:
            return
        except OSError:
            self.shut_down()

    def _complete(self) -> None:
        """A header is here: make room for its body. A body is here: that is a frame."""
        self._filled = 0
        kind, number, size_bytes = _HEADER.unpack(self._header)
        if self._body is None:
            if size_bytes > MAX_FRAME_BYTES:
                return self.shut_down()
            self._body = bytearray(size_bytes)
        else:
            self.inbox.append(Frame(kind, number, bytes(self._body)))
            self._body = None

    def shut_down(self) -> None:
        """Hang up; the peer sees the end, and whoever waits for this socket wakes. Idempotent.

        The descriptor stays ours, so another thread may call this while an exchange goes on.
        """
        self.alive = False
        self._unsent = []
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up and free the descriptor. Idempotent."""
        self.shut_down()
        self.sock.close()


def _drop(buffers: list[memoryview], count: int) -> list[memoryview]:
    """`buffers` without their first `count` bytes."""
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[index + 1 :]]
        count -= len(buffer)
    return []
