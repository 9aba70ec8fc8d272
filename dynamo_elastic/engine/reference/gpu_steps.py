"""Steps of one life on a GPU: who takes part, where experts are, which graph to replay."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from dynamo_elastic.comm.base import ExpertBuffer, ExpertGroup
from dynamo_elastic.comm.expert_rules import PeerState
from dynamo_elastic.engine.reference.device import StepResult
from dynamo_elastic.engine.reference.experts import Placement
from dynamo_elastic.engine.reference.gpu_experts import NOBODY, expert_table
from dynamo_elastic.engine.reference.gpu_group import BufferGroup
from dynamo_elastic.engine.reference.membership import Membership
from dynamo_elastic.engine.reference.model import Row, TileSize, pack
from dynamo_elastic.types import Epoch, Rank

_LET_GO_FROM = frozenset({PeerState.CONNECTED, PeerState.TIMED_OUT, PeerState.BROKEN})


class Tiles(Protocol):
    """Runs packed tiles of a few sizes."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Ascending; the last one is that of a whole batch."""
        ...

    def run(self, tile: Tensor) -> Tensor:
        """Logits of `tile`, which has one of the sizes and is on the host. They hold until the next
        run, and the device may still be at work on them."""
        ...


class GpuExecutor:
    """An Executor (see device.py) over one expert buffer, which it owns.

    `table` is the tensor of experts that `tiles` read, (batch_tokens, num_experts) on the GPU.
    """

    def __init__(
        self,
        buffer: ExpertBuffer,
        tiles: Tiles,
        table: Tensor,
        tile: TileSize,
        beside: AbstractContextManager[object],
    ) -> None:
        self._buffer = buffer
        self._tiles = tiles
        self._table = table
        self._tile = tile
        self._beside = beside
        self._placed: Placement | None = None

    def group(self, epoch: Epoch, rank: Rank, world_size: int) -> ExpertGroup:
        return BufferGroup(epoch, rank, world_size, self._buffer)

    def step(self, rows: list[Row], membership: Membership) -> StepResult:
        seats = _seats(membership.group)
        taking_part = {seat for rank, seat in seats.items() if rank not in membership.masked}
        self._align(taking_part)
        if self._placed is not membership.placement:
            self._place(membership, {**seats, membership.rank: self._buffer.rank})
        known = {s for s, state in self._buffer.states.items() if state is PeerState.TIMED_OUT}
        size = next(s for s in self._tiles.sizes if s >= len(rows))
        logits = self._tiles.run(pack(rows, self._tile, size))
        # Waits for the device. Without the ranks that it masked the tokens are plausible and wrong.
        lost = self._buffer.masked() != known
        return StepResult(logits.cpu().numpy(), lost)

    def _align(self, taking_part: set[Rank]) -> None:
        """Between two steps: seats that the group has agreed on are active, the others are not."""
        states = self._buffer.states
        joining = [s for s in sorted(taking_part) if states[s] is PeerState.CONNECTED]
        leaving = [
            s for s, state in states.items() if state is PeerState.ACTIVE and s not in taking_part
        ]
        if leaving:
            self._buffer.deactivate(leaving)
        if joining:
            self._buffer.activate(joining)

    def _place(self, membership: Membership, seats: Mapping[Rank, Rank]) -> None:
        rows, experts = self._table.shape
        slots = self._buffer.shape.experts_per_rank
        table = expert_table(membership.placement, experts, rows, seats, slots)
        self._table.copy_(torch.from_numpy(table))
        self._placed = membership.placement

    def beside(self) -> AbstractContextManager[object]:
        return self._beside

    def keep_only(self, groups: Collection[ExpertGroup]) -> None:
        kept = {seat for group in groups for seat in _seats(group).values()}
        states = self._buffer.states
        self._align({s for s in kept if states[s] is PeerState.ACTIVE})
        states = self._buffer.states
        self._buffer.disconnect(
            [s for s, state in states.items() if state in _LET_GO_FROM and s not in kept]
        )

    def close(self) -> None:
        """As in Executor: the coordinator has had every peer disconnect, or the peer is dead."""
        self.keep_only(())
        self._buffer.destroy(released_by=self._buffer.states.keys())


def _seats(group: ExpertGroup) -> Mapping[Rank, Rank]:
    if not isinstance(group, BufferGroup):
        raise TypeError(f"a group of {type(group).__name__} has no seats in an expert buffer")
    return group.seats


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
