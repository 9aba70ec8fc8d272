"""Steps of one life on a GPU: who takes part, where experts are, which graph to replay."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from dynamo_elastic.comm.base import ExpertBuffer, ExpertGroup
from dynamo_elastic.comm.expert_rules import PeerState
from dynamo_elastic.engine.reference.device import StepResult
from dynamo_elastic.engine.reference.experts import Placement
from dynamo_elastic.engine.reference.gpu_experts import NOBODY, expert_table, own_experts
from dynamo_elastic.engine.reference.gpu_group import BufferGroup
from dynamo_elastic.engine.reference.gpu_kernels import Choices
from dynamo_elastic.engine.reference.membership import Membership
from dynamo_elastic.engine.reference.model import Row, TileSize, pack
from dynamo_elastic.types import Epoch, Rank

_LET_GO_FROM = frozenset({PeerState.CONNECTED, PeerState.TIMED_OUT, PeerState.BROKEN})


class Tiles(Protocol):
    """Runs packed tiles of a few sizes over one expert buffer."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Ascending; the last one is that of a whole batch."""
        ...

    @property
    def kernels(self) -> Choices:
        """By which they compute; empty before the first use()."""
        ...

    def adopt(self, kernels: Choices) -> None:
        """Compute by `kernels` from now on, in between two steps and with no peer active. Raises
        EngineError if this release does not have them."""
        ...

    def use(self, buffer: ExpertBuffer) -> None:
        """Run over `buffer` from now on, none of whose peers is active. Raises RebindFailed."""
        ...

    def run(self, tile: Tensor) -> Tensor:
        """Logits of `tile`, which has one of the sizes and is on the host. They hold until the next
        run, and the device may still be at work on them."""
        ...


class GpuExecutor:
    """An Executor (see device.py) over expert buffers that it makes and owns: the one that its
    steps use, and for a while another one, if the connections of that can't be changed any more.

    `table` is the tensor of experts that `tiles` read, (batch_tokens, num_experts) on the GPU.
    """

    def __init__(
        self,
        make: Callable[[], ExpertBuffer],
        tiles: Tiles,
        table: Tensor,
        tile: TileSize,
        beside: AbstractContextManager[object],
    ) -> None:
        self._make = make
        self._tiles = tiles
        self._table = table
        self._tile = tile
        self._beside = beside
        self._placed: Placement | None = None
        self._spare: list[ExpertBuffer] = []
        """Not stepped over: made for groups to come."""
        self._parted: list[ExpertBuffer] = []
        """Not used any more, and without peers. They go when the peers, too, have parted."""
        self._buffer = make()
        self._use()

    def group(self, epoch: Epoch, rank: Rank, world_size: int) -> BufferGroup:
        # An operation begins when the one before is over on all ranks.
        while self._parted:
            _destroy(self._parted.pop())
        return BufferGroup(epoch, rank, world_size, self._buffer, self._fresh)

    @property
    def kernels(self) -> Choices:
        return self._tiles.kernels

    def adopt(self, kernels: Choices) -> None:
        self._tiles.adopt(kernels)

    def _fresh(self) -> ExpertBuffer:
        self._spare.append(self._make())
        return self._spare[-1]

    def enter(self, group: ExpertGroup) -> None:
        """As in Executor: a group that has a buffer of its own is entered with graphs of it. All
        ranks have ended the last step of the old one."""
        buffer = _of_buffers(group).buffer
        if buffer is self._buffer:
            return
        self._spare.remove(buffer)
        old, self._buffer = self._buffer, buffer
        self._part(old)
        self._use()

    def _use(self) -> None:
        """The tiles run over the buffer, without peers."""
        rows, experts = self._table.shape
        shape, seat = self._buffer.shape, self._buffer.rank
        own = own_experts(experts, rows, seat, shape.experts_per_rank)
        self._table.copy_(torch.from_numpy(own))
        self._placed = None
        self._tiles.use(self._buffer)

    def step(self, rows: list[Row], membership: Membership) -> StepResult:
        seats = _of_buffers(membership.group).seats
        taking_part = {seat for rank, seat in seats.items() if rank not in membership.masked}
        _align(self._buffer, taking_part)
        if self._placed is not membership.placement:
            self._place(membership, {**seats, membership.rank: self._buffer.rank})
        known = {s for s, state in self._buffer.states.items() if state is PeerState.TIMED_OUT}
        size = next(s for s in self._tiles.sizes if s >= len(rows))
        logits = self._tiles.run(pack(rows, self._tile, size))
        # Waits for the device. Without the ranks that it masked the tokens are plausible and wrong.
        lost = self._buffer.masked() != known
        return StepResult(logits.cpu().numpy(), lost)

    def _place(self, membership: Membership, seats: Mapping[Rank, Rank]) -> None:
        rows, experts = self._table.shape
        slots = self._buffer.shape.experts_per_rank
        table = expert_table(membership.placement, experts, rows, seats, slots)
        self._table.copy_(torch.from_numpy(table))
        self._placed = membership.placement

    def beside(self) -> AbstractContextManager[object]:
        return self._beside

    def keep_only(self, groups: Collection[ExpertGroup]) -> None:
        used = [_of_buffers(group) for group in groups]
        here = [group for group in used if group.buffer is self._buffer]
        _let_go(self._buffer, {seat for group in here for seat in group.seats.values()})
        for buffer in [b for b in self._spare if all(b is not group.buffer for group in used)]:
            self._spare.remove(buffer)
            self._part(buffer)

    def _part(self, buffer: ExpertBuffer) -> None:
        _let_go(buffer, frozenset())
        self._parted.append(buffer)

    def close(self) -> None:
        """As in Executor: the coordinator has had every peer disconnect, or the peer is dead."""
        for buffer in (self._buffer, *self._spare, *self._parted):
            _let_go(buffer, frozenset())
            _destroy(buffer)
        self._spare.clear()
        self._parted.clear()


def _of_buffers(group: ExpertGroup) -> BufferGroup:
    if not isinstance(group, BufferGroup):
        raise TypeError(f"a group of {type(group).__name__} has no expert buffer")
    return group


def _align(buffer: ExpertBuffer, taking_part: Collection[Rank]) -> None:
    """Between two steps: seats that the group has agreed on are active, the others are not."""
    states = buffer.states
    joining = [s for s in sorted(taking_part) if states[s] is PeerState.CONNECTED]
    leaving = [
        s for s, state in states.items() if state is PeerState.ACTIVE and s not in taking_part
    ]
    if leaving:
        buffer.deactivate(leaving)
    if joining:
        buffer.activate(joining)


def _let_go(buffer: ExpertBuffer, kept: Collection[Rank]) -> None:
    """Between two steps: no peer but `kept` is active, or, as far as that can be, connected."""
    states = buffer.states
    _align(buffer, {s for s in kept if states[s] is PeerState.ACTIVE})
    states = buffer.states
    going = [s for s, state in states.items() if state in _LET_GO_FROM and s not in kept]
    if going and buffer.can_disconnect:
        buffer.disconnect(going)


def _destroy(buffer: ExpertBuffer) -> None:
    buffer.destroy(released_by=buffer.states.keys())


def tile_sizes(batch_tokens: int, smallest: int = 8) -> tuple[int, ...]:
    """Powers of two from `smallest` on, and `batch_tokens`.

    >>> tile_sizes(48)
    (8, 16, 32, 48)
    """
    powers = [smallest << n for n in range(16) if smallest << n < batch_tokens]
    return (*powers, batch_tokens)


def empty_table(rows: int, num_experts: int, device: torch.device) -> Tensor:
    """A table in which no expert is anywhere, for a GpuExecutor and its tiles."""
    return torch.full((rows, num_experts), NOBODY, dtype=torch.int64, device=device)
