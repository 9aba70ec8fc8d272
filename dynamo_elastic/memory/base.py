"""The seams of memory: an arena, whatever holds it, and the driver's calls behind one on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from dynamo_elastic.types import Region


class ArenaLike(Protocol):
    """One block of memory at one address that survives a snapshot, holding named regions."""

    @property
    def address(self) -> int:
        """Of the first byte; the same for life, also in a restored process."""
        ...

    @property
    def size_bytes(self) -> int:
        """Of the whole block, in whole pages of its kind of memory."""
        ...

    @property
    def regions(self) -> tuple[Region, ...]: ...

    def region(self, name: str) -> Region:
        """The region called `name`. Raises KeyError."""
        ...

    def tensor(self, region: Region, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """`region` as a tensor, not copied. Raises ValueError if the size does not fit."""
        ...

    def discard(self) -> None:
        """Give the memory back, so that no snapshot holds it: the contents are lost, addresses and
        tensors stay. Idempotent."""
        ...

    def populate(self) -> None:
        """Every byte can be used again, at the old addresses; contents are not those of before.
        Idempotent."""
        ...


class VmmDriver(Protocol):
    """Addresses and physical memory of GPUs, managed apart. Devices are this process's ordinals.

    Raises DeviceMemoryError naming the call, DeviceMemoryFull if a GPU has too little, and
    ResourceMissing without a driver.
    """

    def granularity_bytes(self, device: int) -> int:
        """Sizes and addresses are multiples of it."""
        ...

    def free_bytes(self, device: int) -> int: ...

    def reserve(self, size_bytes: int) -> int:
        """The first of so many addresses without memory."""
        ...

    def free_addresses(self, address: int, size_bytes: int) -> None: ...

    def create(self, size_bytes: int, device: int) -> int:
        """A handle of new physical memory, not mapped, that can be exported."""
        ...

    def release(self, handle: int) -> None:
        """The memory goes once it is not mapped anywhere, in no process."""
        ...

    def map(self, address: int, size_bytes: int, handle: int) -> None: ...

    def allow(self, address: int, size_bytes: int, device: int) -> None:
        """`device` may read and write there."""
        ...

    def unmap(self, address: int, size_bytes: int) -> None: ...

    def export_descriptor(self, handle: int) -> int:
        """A file descriptor with which another process of this host can map that memory."""
        ...

    def import_descriptor(self, descriptor: int) -> int:
        """A handle of a peer's memory; `descriptor` stays open."""
        ...

    def as_bytes(self, address: int, size_bytes: int, device: int) -> torch.Tensor:
        """Mapped memory as uint8, not copied. It keeps nothing alive: the memory has to outlive the
        last use."""
        ...

    def synchronize(self, device: int) -> None:
        """Return once no work of this process uses `device`'s memory any more."""
        ...
