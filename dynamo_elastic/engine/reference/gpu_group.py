"""The group of one epoch on GPUs: records over TCP as on the host, experts through one buffer.

A rank's seat in the expert buffer is its slot, whatever its rank in the group of an epoch: seats
can't change while a buffer lives, and ranks do when one of them leaves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from dynamo_elastic.comm.base import ExpertBuffer
from dynamo_elastic.comm.expert_rules import PeerState
from dynamo_elastic.comm.host_group import HostExpertGroup
from dynamo_elastic.errors import PeerLost
from dynamo_elastic.types import Epoch, Rank

_FRESH = b"fresh"
_MAPPED = frozenset({PeerState.CONNECTED, PeerState.ACTIVE})


class BufferGroup:
    """An ExpertGroup (see comm.base) whose ranks share expert buffers; it owns none.

    Its control records go over TCP. exchange() is that of the TCP group too: steps use the buffer.
    """

    def __init__(
        self,
        epoch: Epoch,
        rank: Rank,
        world_size: int,
        buffer: ExpertBuffer,
        make_fresh: Callable[[], ExpertBuffer],
    ) -> None:
        """Its steps use `buffer`, or if connections of that, or of a peer's, can't be changed any
        more, what `make_fresh` returns."""
        self._host = HostExpertGroup(epoch, rank, world_size)
        self._make_fresh = make_fresh
        self.buffer = buffer
        """What its steps use; settled by connect()."""
        self.seats: Mapping[Rank, Rank] = {}
        """Rank in this group -> seat in the buffer, of every other rank, once connected."""

    @property
    def epoch(self) -> Epoch:
        return self._host.epoch

    @property
    def rank(self) -> Rank:
        return self._host.rank

    @property
    def world_size(self) -> int:
        return self._host.world_size

    @property
    def address(self) -> str:
        return f"{self._host.address} {self.buffer.rank} {self.buffer.metadata().hex()}"

    @property
    def masked(self) -> frozenset[Rank]:
        states = self.buffer.states
        out = {r for r, seat in self.seats.items() if states[seat] is PeerState.TIMED_OUT}
        return self._host.masked | out

    def connect(self, addresses: Mapping[Rank, str], *, timeout_s: float) -> None:
        """As in ExpertGroup. Peers that the buffer has already stay as they are; the others come
        in masked.

        An expert buffer that a peer does not answer is spent, so the ranks meet over TCP first: who
        does not come, or has stopped, is found out there. What is left is a peer that is lost right
        in the buffer's connect. After that every rank takes a fresh buffer: no rank can be known by
        two, and what came of the last attempt may still lie in an old one.
        """
        deadline = time.monotonic() + timeout_s
        parts = {rank: address.split(" ") for rank, address in addresses.items()}
        self._host.connect({r: host for r, (host, _, _) in parts.items()}, timeout_s=timeout_s)
        seats = {rank: Rank(int(seat)) for rank, (_, seat, _) in parts.items()}
        states = self.buffer.states
        strangers = {
            seats[rank]: bytes.fromhex(metadata)
            for rank, (_, _, metadata) in parts.items()
            if states[seats[rank]] not in _MAPPED
        }
        spent = bool(strangers) and not self.buffer.can_connect
        wishes = self._tell_all(_FRESH if spent else b"", deadline)
        if _FRESH in wishes.values():
            self.buffer = self._make_fresh()
            told = self._tell_all(self.buffer.metadata(), deadline)
            strangers = {seats[rank]: metadata for rank, metadata in told.items() if rank in seats}
        self.buffer.connect(strangers, timeout_s=_left_s(deadline))
        self.seats = seats

    def _tell_all(self, said: bytes, deadline: float) -> Mapping[Rank, bytes]:
        """What each rank says. Raises PeerLost with those that don't."""
        everyone = {Rank(rank): said for rank in range(self.world_size)}
        heard = self._host.exchange(everyone, timeout_s=_left_s(deadline))
        if missing := everyone.keys() - heard.keys():
            raise PeerLost(sorted(missing))
        return heard

    def arrived(self, ranks: Sequence[Rank]) -> bool:
        return self._host.arrived(ranks)

    def control(self, record: bytes, *, timeout_s: float) -> Mapping[Rank, bytes]:
        return self._host.control(record, timeout_s=timeout_s)

    def exchange(self, payloads: Mapping[Rank, bytes], *, timeout_s: float) -> Mapping[Rank, bytes]:
        return self._host.exchange(payloads, timeout_s=timeout_s)

    def close(self) -> None:
        """As in ExpertGroup. What the buffer has mapped is let go of by GpuExecutor.keep_only()."""
        self._host.close()


def _left_s(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
