"""Where the tensors of an engine lie: what differs between host memory and a GPU, and no more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from dynamo_elastic.comm.base import MemoryKind
from dynamo_elastic.comm.weights import digest
from dynamo_elastic.memory.arena import HostArena
from dynamo_elastic.memory.base import ArenaLike
from dynamo_elastic.types import Region


class Store(Protocol):
    """A kind of memory, and the numbers that weights and keys are made of there."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def kind(self) -> MemoryKind: ...

    def arena(self, regions: Sequence[Region]) -> ArenaLike:
        """New memory for `regions`."""
        ...

    def digests(self, data: Sequence[Tensor]) -> list[str]:
        """Of the bytes of each of `data` (uint8); the same on every rank of a deployment."""
        ...


class HostStore:
    """Host memory, float32: the same bits on every rank."""

    dtype = torch.float32
    device = torch.device("cpu")
    kind = MemoryKind.DRAM

    def arena(self, regions: Sequence[Region]) -> HostArena:
        return HostArena(regions)

    def digests(self, data: Sequence[Tensor]) -> list[str]:
        return [digest(one.numpy().data) for one in data]


HOST = HostStore()
