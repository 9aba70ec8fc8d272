"""One block of host memory at one address, holding named regions: weights, or a KV cache.

The block is plain private anonymous memory, so a snapshot takes it as it is; discard() before it
and the image holds none of it, while every address and every tensor stays valid.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from dynamo_elastic.failpoints import failpoint
from dynamo_elastic.types import Region

ALIGN_BYTES = 64
_PAGEMAP_ENTRY_BYTES = 8
_PAGEMAP_PRESENT_OR_SWAPPED = np.uint64(0b11 << 62)


def layout(sizes: Iterable[tuple[str, int]], *, align_bytes: int = ALIGN_BYTES) -> list[Region]:
    """Place regions of (name, size in bytes) one after the other, in the order given.

    Pure: the same sizes have the same offsets on every rank. Raises ValueError if a name comes
    twice or a size is not positive.
    """
    regions: list[Region] = []
    names: set[str] = set()
    end = 0
    for name, size_bytes in sizes:
        if name in names:
            raise ValueError(f"region {name} comes twice")
        if size_bytes < 1:
            raise ValueError(f"region {name} has {size_bytes} bytes")
        offset = -(-end // align_bytes) * align_bytes
        regions.append(Region(name, offset, size_bytes))
        names.add(name)
        end = offset + size_bytes
    return regions


def typed_view(
    block: torch.Tensor, region: Region, dtype: torch.dtype, shape: Sequence[int]
) -> torch.Tensor:
    """`region` of `block` (uint8) as a tensor, not copied. Raises ValueError if the size does not
    fit."""
    wanted = torch.Size(shape).numel() * dtype.itemsize
    if wanted != region.size_bytes:
        raise ValueError(
            f"region {region.name} has {region.size_bytes} bytes, "
            f"{dtype} of shape {tuple(shape)} needs {wanted}"
        )
    end = region.offset + region.size_bytes
    return block[region.offset : end].view(dtype).view(*shape)


class HostArena:
    """Memory for `regions`; it lives until the arena and every tensor of it are gone.

    Its contents are zero until written. Raises ValueError if there are no regions.
    """

    def __init__(self, regions: Sequence[Region]) -> None:
        if not regions:
            raise ValueError("an arena needs at least one region")
        end = max(r.offset + r.size_bytes for r in regions)
        self._size_bytes = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map = mmap.mmap(-1, self._size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._regions = {r.name: r for r in regions}

    @property
    def address(self) -> int:
        """Of the first byte; the same for life, also in a restored process."""
        return self._bytes.data_ptr()

    @property
    def size_bytes(self) -> int:
        """Of the whole block: whole pages."""
        return self._size_bytes

    @property
    def regions(self) -> tuple[Region, ...]:
        return tuple(self._regions.values())

    def region(self, name: str) -> Region:
        """The region called `name`. Raises KeyError."""
        return self._regions[name]

    def tensor(self, region: Region, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """`region` as a tensor, not copied. Raises ValueError if the size does not fit."""
        return typed_view(self._bytes, region, dtype, shape)

    def view(self, region: Region) -> memoryview:
        """The bytes of `region`, writable, not copied."""
        return memoryview(self._map)[region.offset : region.offset + region.size_bytes]

    def discard(self) -> None:
        """Give the pages back: contents are zero after this, addresses and tensors stay valid."""
        failpoint("memory.before_discard")
        self._map.madvise(mmap.MADV_DONTNEED)

    def populate(self) -> None:
        """Nothing to do: pages come when they are written to."""

    def resident_bytes(self) -> int:
        """How much of the block holds pages, in memory or swapped out."""
        first_page = self.address // mmap.PAGESIZE
        pages = self._size_bytes // mmap.PAGESIZE
        with open("/proc/self/pagemap", "rb") as pagemap:
            pagemap.seek(first_page * _PAGEMAP_ENTRY_BYTES)
            entries = np.frombuffer(pagemap.read(pages * _PAGEMAP_ENTRY_BYTES), dtype=np.uint64)
        held = np.count_nonzero(entries & _PAGEMAP_PRESENT_OR_SWAPPED)
        return int(held) * mmap.PAGESIZE
