"""An arena on a GPU: addresses reserved once, physical memory that comes and goes under them.

Before a snapshot the memory is given back; the addresses, the tensors over them, and CUDA graphs
that use them stay. After a restore new memory is mapped at the same addresses.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack

import torch

from dynamo_elastic.failpoints import failpoint
from dynamo_elastic.memory.arena import typed_view
from dynamo_elastic.memory.base import VmmDriver
from dynamo_elastic.types import Region, SharedChunk

CHUNK_BYTES = 2 << 30
"""Few large pieces: each costs a descriptor and a call when a peer maps the arena."""


def _round_up(size_bytes: int, granularity_bytes: int) -> int:
    return -(-size_bytes // granularity_bytes) * granularity_bytes


class _Mapping:
    """Handles of physical memory, mapped side by side from `address` on for `device`."""

    def __init__(self, driver: VmmDriver, address: int, device: int) -> None:
        self._driver = driver
        self._address = address
        self._device = device
        self._mapped_bytes = 0
        self.pieces: list[tuple[int, int]] = []
        """(handle, size in bytes), in the order of their addresses."""

    def add(self, handle: int, size_bytes: int) -> None:
        """Map `handle` after the last one; it is ours from now on, also if this raises."""
        self.pieces.append((handle, size_bytes))
        self._driver.map(self._address + self._mapped_bytes, size_bytes, handle)
        self._mapped_bytes += size_bytes

    def allow(self) -> None:
        self._driver.allow(self._address, self._mapped_bytes, self._device)

    def close(self) -> None:
        """Unmap and release. The device must not use the memory any more. Idempotent."""
        if self._mapped_bytes:
            self._driver.unmap(self._address, self._mapped_bytes)
            self._mapped_bytes = 0
        while self.pieces:
            self._driver.release(self.pieces.pop()[0])


class VmmArena:
    """GPU memory for `regions`, mapped on return. Close it.

    `device` is an ordinal of this process: after a restore onto another GPU the same ordinal means
    that GPU. Tensors and address stay valid from discard() to populate(), but reading or writing
    them meanwhile is an illegal access, which ends this process's use of CUDA. Contents are not
    defined until written.

    Raises ValueError if there are no regions, DeviceMemoryFull, DeviceMemoryError, or
    ResourceMissing without a driver; then nothing is held.
    """

    def __init__(
        self,
        regions: Sequence[Region],
        driver: VmmDriver,
        *,
        device: int = 0,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        if not regions:
            raise ValueError("an arena needs at least one region")
        granularity = driver.granularity_bytes(device)
        self._driver = driver
        self._device = device
        self._regions = {r.name: r for r in regions}
        self._size_bytes = _round_up(max(r.offset + r.size_bytes for r in regions), granularity)
        self._chunk_bytes = _round_up(chunk_bytes, granularity)
        self._address = driver.reserve(self._size_bytes)
        self._mapping: _Mapping | None = None
        with ExitStack() as undo:
            undo.callback(driver.free_addresses, self._address, self._size_bytes)
            self.populate()
            undo.callback(self.discard)
            # torch asks the driver what is at an address, so the tensor is made while it is mapped.
            self._bytes = driver.as_bytes(self._address, self._size_bytes, device)
            undo.pop_all()

    @property
    def address(self) -> int:
        """Of the first byte; the same until close(), also in a restored process."""
        return self._address

    @property
    def size_bytes(self) -> int:
        """Of the whole block: whole pages of the GPU."""
        return self._size_bytes

    @property
    def device(self) -> int:
        return self._device

    @property
    def regions(self) -> tuple[Region, ...]:
        return tuple(self._regions.values())

    @property
    def populated(self) -> bool:
        return self._mapping is not None

    def region(self, name: str) -> Region:
        """The region called `name`. Raises KeyError."""
        return self._regions[name]

    def tensor(self, region: Region, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """`region` as a tensor, not copied. Raises ValueError if the size does not fit."""
        return typed_view(self._bytes, region, dtype, shape)

    def discard(self) -> None:
        """Wait for the device, then give all its memory back; addresses and tensors stay. Memory
        that a peer has mapped goes once the peer has let go of it. Idempotent."""
        failpoint("memory.before_discard")
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            self._driver.synchronize(self._device)
            mapping.close()

    def populate(self) -> None:
        """New memory at every address. Idempotent. Raises DeviceMemoryFull or DeviceMemoryError,
        and the arena is as after discard()."""
        if self._mapping is not None:
            return
        mapping = _Mapping(self._driver, self._address, self._device)
        with ExitStack() as undo:
            undo.callback(mapping.close)
            for offset in range(0, self._size_bytes, self._chunk_bytes):
                size_bytes = min(self._chunk_bytes, self._size_bytes - offset)
                mapping.add(self._driver.create(size_bytes, self._device), size_bytes)
            failpoint("memory.before_access")
            mapping.allow()
            undo.pop_all()
        self._mapping = mapping

    def export_chunks(self) -> tuple[SharedChunk, ...]:
        """All of the arena's memory as file descriptors, for a peer's ImportedArena. The caller
        closes them once they are sent; one that is open at a snapshot can't be in an image. Raises
        ValueError after discard()."""
        if self._mapping is None:
            raise ValueError("an arena without memory can't be exported: populate() it first")
        chunks: list[SharedChunk] = []
        offset = 0
        with ExitStack() as undo:
            undo.callback(close_chunks, chunks)
            for handle, size_bytes in self._mapping.pieces:
                descriptor = self._driver.export_descriptor(handle)
                chunks.append(SharedChunk(descriptor, offset, size_bytes))
                offset += size_bytes
            undo.pop_all()
        return tuple(chunks)

    def close(self) -> None:
        """Give the addresses back too; no tensor of it may be used any more. Idempotent."""
        self.discard()
        if self._address:
            self._driver.free_addresses(self._address, self._size_bytes)
            self._address = 0


class ImportedArena:
    """A peer's arena, mapped here for `device` from the `chunks` that it exported, which stay open
    and belong to the caller. Close it before a snapshot: with an import open, a parked process
    can't come back.

    Raises ValueError unless the chunks are side by side from offset 0, else what VmmArena raises;
    then nothing is held.
    """

    def __init__(
        self, chunks: Sequence[SharedChunk], driver: VmmDriver, *, device: int = 0
    ) -> None:
        self._driver = driver
        self._device = device
        self._size_bytes = sum(chunk.size_bytes for chunk in chunks)
        _check_side_by_side(chunks)
        self._address = driver.reserve(self._size_bytes)
        self._mapping = _Mapping(driver, self._address, device)
        with ExitStack() as undo:
            undo.callback(self.close)
            for chunk in chunks:
                handle = driver.import_descriptor(chunk.descriptor)
                self._mapping.add(handle, chunk.size_bytes)
            self._mapping.allow()
            undo.pop_all()

    @property
    def mapped(self) -> bool:
        """False once it is closed."""
        return bool(self._mapping.pieces)

    @property
    def address(self) -> int:
        """Of the first byte, in this process: not the peer's own address."""
        return self._address

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def bytes(self) -> torch.Tensor:
        """All of it as uint8, on our `device`; not to be used after close()."""
        return self._driver.as_bytes(self._address, self._size_bytes, self._device)

    def close(self) -> None:
        """Wait for the device, unmap, let go: the peer's memory can really go. Idempotent."""
        if self._address:
            self._driver.synchronize(self._device)
            self._mapping.close()
            self._driver.free_addresses(self._address, self._size_bytes)
            self._address = 0


def close_chunks(chunks: Sequence[SharedChunk]) -> None:
    """Close the descriptors of exported chunks."""
    for chunk in chunks:
        os.close(chunk.descriptor)


def _check_side_by_side(chunks: Sequence[SharedChunk]) -> None:
    end = 0
    for chunk in chunks:
        if chunk.offset != end or chunk.size_bytes < 1:
            raise ValueError(f"a chunk of {chunk.size_bytes} bytes at {chunk.offset}, not at {end}")
        end += chunk.size_bytes
    if not end:
        raise ValueError("there are no chunks")
