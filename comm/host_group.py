"""The expert-parallel group on host memory: lockstep exchanges over a full mesh of TCP."""

from __future__ import annotations

import contextlib
import math
import select
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from enum import IntEnum

from dynamo_elastic.comm.link import Frame, Link
from dynamo_elastic.comm.mesh import Seat, connect_mesh, listen
from dynamo_elastic.errors import PeerLost
from dynamo_elastic.failpoints import failpoint
from dynamo_elastic.types import Epoch, Rank

LOOPBACK = "127.0.0.1"


class _Kind(IntEnum):
    CONTROL = 1
    PAYLOAD = 2


class HostExpertGroup:
    """An ExpertGroup (see comm.base) whose ranks exchange bytes over TCP.

    It listens on `host` from construction until connect() is done. A peer is lost when its
    connection breaks, when it is silent for longer than an exchange's deadline, or when it is out
    of step; frames that it sent before are still delivered, in order.
    """

    def __init__(self, epoch: Epoch, rank: Rank, world_size: int, *, host: str = LOOPBACK) -> None:
        self._seat = Seat(epoch, rank, world_size)
        self._links: dict[Rank, Link] = {}
        self._next_number = 0
        self._closed = False
        # Held while sockets are in use, so that close() frees no descriptor under an exchange.
        self._in_use = threading.Lock()
        self._listener = listen(host, world_size)
        self._address = f"{host}:{self._listener.getsockname()[1]}"

    @property
    def epoch(self) -> Epoch:
        return self._seat.epoch

    @property
    def rank(self) -> Rank:
        return self._seat.rank

    @property
    def world_size(self) -> int:
        return self._seat.world_size

    @property
    def address(self) -> str:
        return self._address

    @property
    def masked(self) -> frozenset[Rank]:
        return frozenset(rank for rank, link in self._links.items() if not link.alive)

    def connect(self, addresses: Mapping[Rank, str], *, timeout_s: float) -> None:
        with self._in_use:
            if self._closed:
                raise PeerLost(sorted(self._seat.others))
            failpoint("group.before_connect")
            sockets = connect_mesh(self._listener, self._seat, addresses, timeout_s=timeout_s)
            self._links = {rank: Link(sock) for rank, sock in sorted(sockets.items())}
            self._listener.close()
        failpoint("group.connected")

    def arrived(self, ranks: Sequence[Rank]) -> bool:
        if not self._in_use.acquire(blocking=False):
            return False
        try:
            return all(self._has_control(rank) for rank in ranks if rank != self.rank)
        finally:
            self._in_use.release()

    def _has_control(self, rank: Rank) -> bool:
        link = self._links.get(rank)
        if link is None:
            return False
        link.receive()
        return bool(link.inbox) and link.inbox[0].kind == _Kind.CONTROL

    def control(self, record: bytes, *, timeout_s: float) -> Mapping[Rank, bytes]:
        records = {Rank(rank): record for rank in range(self.world_size)}
        return self._step(_Kind.CONTROL, records, timeout_s)

    def exchange(self, payloads: Mapping[Rank, bytes], *, timeout_s: float) -> Mapping[Rank, bytes]:
        return self._step(_Kind.PAYLOAD, payloads, timeout_s)

    def _step(
        self, kind: _Kind, payloads: Mapping[Rank, bytes], timeout_s: float
    ) -> dict[Rank, bytes]:
        """Send every peer its payload (b"" if it has none) and take the next frame of each."""
        deadline = time.monotonic() + timeout_s
        number = self._next_number
        self._next_number += 1
        received = {self.rank: payloads.get(self.rank, b"")}
        with self._in_use:
            for rank, link in self._links.items():
                link.send(Frame(kind, number, payloads.get(rank, b"")))
            self._settle(deadline)
            if self._closed:
                raise PeerLost(sorted(self._seat.others))
            for rank, link in self._links.items():
                if not link.inbox:
                    continue
                frame = link.inbox.popleft()
                if (frame.kind, frame.number) == (kind, number):
                    received[rank] = frame.payload
                else:
                    link.inbox.clear()
                    link.shut_down()
        return received

    def _settle(self, deadline: float) -> None:
        """Return once every live peer has our frame and we have its; the others are hung up on."""
        while busy := [k for k in self._links.values() if k.alive and (k.sending or not k.inbox)]:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                for link in busy:
                    link.shut_down()
                return
            poller = select.poll()
            for link in busy:
                poller.register(link.sock, select.POLLIN | (select.POLLOUT * link.sending))
            ready = {fd for fd, _ in poller.poll(math.ceil(remaining_s * 1000))}
            for link in busy:
                if link.sock.fileno() in ready:
                    link.flush()
                    link.receive()

    def close(self) -> None:
        self._closed = True
        # Both wake a connect() or an exchange that waits in another thread.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for link in self._links.values():
            link.shut_down()
        with self._in_use:
            self._listener.close()
            for link in self._links.values():
                link.close()
