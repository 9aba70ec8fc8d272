"""The group of one epoch on GPUs: records over TCP as on the host, experts through one buffer.

A rank's seat in the expert buffer is its slot, whatever its rank in the group of an epoch: seats
can't change while a buffer lives, and ranks do when one of them leaves.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from dynamo_elastic.comm.base import ExpertBuffer
from dynamo_elastic.comm.expert_rules import PeerState
from dynamo_elastic.comm.host_group import HostExpertGroup
from dynamo_elastic.types import Epoch, Rank

_MAPPED = frozenset({PeerState.CONNECTED, PeerState.ACTIVE})


class BufferGroup:
    """An ExpertGroup (see comm.base) whose ranks share expert buffers; it does not own `buffer`.

    Its control records go over TCP. exchange() is that of the TCP group too: steps use the buffer.
    """

    def __init__(self, epoch: Epoch, rank: Rank, world_size: int, buffer: ExpertBuffer) -> None:
        self._host = HostExpertGroup(epoch, rank, world_size)
        self._buffer = buffer
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
        return f"{self._host.address} {self._buffer.rank} {self._buffer.metadata().hex()}"

    @property
    def masked(self) -> frozenset[Rank]:
        states = self._buffer.states
        out = {r for r, seat in self.seats.items() if states[seat] is PeerState.TIMED_OUT}
        return self._host.masked | out

    def connect(self, addresses: Mapping[Rank, str], *, timeout_s: float) -> None:
        """As in ExpertGroup. Peers that the buffer has already stay as they are; the others come
        in masked."""
        deadline = time.monotonic() + timeout_s
        parts = {rank: address.split(" ") for rank, address in addresses.items()}
        self._host.connect({r: host for r, (host, _, _) in parts.items()}, timeout_s=timeout_s)
        seats = {rank: Rank(int(seat)) for rank, (_, seat, _) in parts.items()}
        states = self._buffer.states
        strangers = {
            seats[rank]: bytes.fromhex(metadata)
            for rank, (_, _, metadata) in parts.items()
            if states[seats[rank]] not in _MAPPED
        }
        self._buffer.connect(strangers, timeout_s=max(0.0, deadline - time.monotonic()))
        self.seats = seats

    def arrived(self, ranks: Sequence[Rank]) -> bool:
        return self._host.arrived(ranks)

    def control(self, record: bytes, *, timeout_s: float) -> Mapping[Rank, bytes]:
        return self._host.control(record, timeout_s=timeout_s)

    def exchange(self, payloads: Mapping[Rank, bytes], *, timeout_s: float) -> Mapping[Rank, bytes]:
        return self._host.exchange(payloads, timeout_s=timeout_s)

    def close(self) -> None:
        """As in ExpertGroup. What the buffer has mapped is let go of by GpuExecutor.keep_only()."""
        self._host.close()
