"""How the ranks of one epoch find each other: one TCP connection a pair, each end known.

The higher rank of a pair dials, the lower accepts, and each says a hello that names the epoch, the
group's size and both ranks. Whoever says anything else (an older epoch, a stranger) is hung up on.
"""

from __future__ import annotations

import selectors
import socket
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from dynamo_elastic.errors import PeerLost
from dynamo_elastic.types import Epoch, Rank

_MAGIC = b"DYN-EP-1"
_HELLO = struct.Struct("!8sQIII")
_BACKLOG_SPARE = 16


@dataclass(frozen=True, slots=True)
class Seat:
    """One rank's place in the group of an epoch."""

    epoch: Epoch
    rank: Rank
    world_size: int

    @property
    def others(self) -> frozenset[Rank]:
        return frozenset(Rank(r) for r in range(self.world_size) if r != self.rank)

    def hello_to(self, rank: Rank) -> bytes:
        return _HELLO.pack(_MAGIC, self.epoch, self.world_size, self.rank, rank)

    def sender_of(self, hello: bytes) -> Rank | None:
        """The rank that says `hello` to this seat; None if it is not of this group."""
        magic, epoch, world_size, sender, receiver = _HELLO.unpack(hello)
        if (magic, epoch, world_size) != (_MAGIC, self.epoch, self.world_size):
            return None
        return Rank(sender) if receiver == self.rank else None


def listen(host: str, world_size: int) -> socket.socket:
    """A listening socket on a free port of `host`."""
    listener = socket.create_server((host, 0), backlog=world_size + _BACKLOG_SPARE)
    listener.setblocking(False)
    return listener


def connect_mesh(
    listener: socket.socket, seat: Seat, addresses: Mapping[Rank, str], *, timeout_s: float
) -> dict[Rank, socket.socket]:
    """A connected, non-blocking socket to every other rank; the caller closes them.

    `addresses` are "host:port" of the listeners of (at least) all lower ranks. Raises PeerLost,
    with no connection left open: at once with a rank that refused, or that was gone; after
    `timeout_s` with all that did not come.
    """
    with selectors.DefaultSelector() as selector:
        meeting = _Meeting(selector, seat)
        try:
            meeting.run(listener, addresses, time.monotonic() + timeout_s)
        except PeerLost:
            for sock in meeting.connected.values():
                sock.close()
            raise
        finally:
            for sock in meeting.unknown:
                sock.close()
        return meeting.connected


class _Meeting:
    """The connections of one connect_mesh(), each with what to do at its next event."""

    def __init__(self, selector: selectors.BaseSelector, seat: Seat) -> None:
        self.connected: dict[Rank, socket.socket] = {}
        self.unknown: dict[socket.socket, bytes] = {}
        """Connections that have not said their whole hello, and what they said of it."""
        self._selector = selector
        self._seat = seat

    def run(self, listener: socket.socket, addresses: Mapping[Rank, str], deadline: float) -> None:
        self._selector.register(listener, selectors.EVENT_READ, partial(self._accept, listener))
        for rank in sorted(self._seat.others):
            if rank < self._seat.rank:
                self._dial(rank, addresses[rank])
        while missing := self._seat.others - self.connected.keys():
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise PeerLost(sorted(missing))
            for key, _ in self._selector.select(remaining_s):
                act: Callable[[], None] = key.data
                act()

    def _dial(self, rank: Rank, address: str) -> None:
        host, _, port = address.rpartition(":")
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self.unknown[sock] = b""
        sock.setblocking(False)
        try:
            sock.connect_ex((host, int(port)))
        except OSError as exc:  # The name of the host does not resolve.
            raise PeerLost([rank]) from exc
        self._selector.register(sock, selectors.EVENT_WRITE, partial(self._greet, rank, sock))

    def _greet(self, rank: Rank, sock: socket.socket) -> None:
        """The dialed connection stands or has failed."""
        try:
            sock.send(self._seat.hello_to(rank))
        except OSError as exc:
            raise PeerLost([rank]) from exc
        on_answer = partial(self._hear_answer, rank, sock)
        self._selector.modify(sock, selectors.EVENT_READ, on_answer)

    def _hear_answer(self, rank: Rank, sock: socket.socket) -> None:
        hello = self._hear(sock)
        if hello is None:
            return
        if not hello or self._seat.sender_of(hello) != rank:
            raise PeerLost([rank])
        self._keep(rank, sock)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # It hung up before we picked up.
        except OSError as exc:  # The listener was shut down under us: the group is being closed.
            raise PeerLost(sorted(self._seat.others - self.connected.keys())) from exc
        sock.setblocking(False)
        self.unknown[sock] = b""
        self._selector.register(sock, selectors.EVENT_READ, partial(self._hear_caller, sock))

    def _hear_caller(self, sock: socket.socket) -> None:
        hello = self._hear(sock)
        if hello is None:
            return
        rank = self._seat.sender_of(hello) if hello else None
        expected = self._seat.others - self.connected.keys()
        if rank is None or rank not in expected or rank < self._seat.rank:
            return self._refuse(sock)
        try:
            sock.send(self._seat.hello_to(rank))
        except OSError:
            return self._refuse(sock)
        self._keep(rank, sock)

    def _hear(self, sock: socket.socket) -> bytes | None:
        """The whole hello, None if more is to come, b"" if the other end is gone."""
        try:
            said = sock.recv(_HELLO.size - len(self.unknown[sock]))
        except BlockingIOError:
            return None
        except OSError:
            return b""
        if not said:
            return b""
        self.unknown[sock] += said
        return self.unknown[sock] if len(self.unknown[sock]) == _HELLO.size else None

    def _keep(self, rank: Rank, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector.unregister(sock)
        del self.unknown[sock]
        self.connected[rank] = sock

    def _refuse(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        del self.unknown[sock]
        sock.close()
