from __future__ import annotations

import os

import pytest
import torch

from dynamo_elastic.errors import DeviceMemoryError, DeviceMemoryFull, ResourceMissing
from dynamo_elastic.memory.arena import layout
from dynamo_elastic.memory.base import ArenaLike
from dynamo_elastic.memory.cuda_vmm import CudaVmm
from dynamo_elastic.memory.vmm import ImportedArena, VmmArena, close_chunks
from dynamo_elastic.testing.gpu_memory import GRANULARITY_BYTES, FakeVmm
from dynamo_elastic.types import SharedChunk

CHUNK_BYTES = 2 * GRANULARITY_BYTES
REGIONS = layout([("w", 7 * GRANULARITY_BYTES - 5)])


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_chunks_are_large_and_the_last_one_is_what_is_left() -> None:
    driver = FakeVmm()
    arena = VmmArena(REGIONS, driver, chunk_bytes=CHUNK_BYTES - 1)
    assert arena.size_bytes == 7 * GRANULARITY_BYTES
    assert len(driver.handles) == 4
    assert arena.regions == tuple(REGIONS)
    arena.close()
    arena.close()
    assert (driver.handles, driver.mapped_bytes, driver.reserved) == ((), 0, {})


@pytest.mark.parametrize(
    "call",
    [
        "cuMemAddressReserve",
        "cuMemCreate",
        "cuMemMap",
        "cuMemSetAccess",
        "cuPointerGetAttribute",
    ],
)
def test_a_refused_call_leaves_nothing(call: str) -> None:
    driver, before = FakeVmm(), descriptors()
    driver.fails.add(call)
    with pytest.raises(DeviceMemoryError, match=call) as caught:
        VmmArena(REGIONS, driver, chunk_bytes=CHUNK_BYTES)
    assert caught.value.name == "CUDA_ERROR_INVALID_VALUE"
    assert (driver.handles, driver.mapped_bytes, driver.reserved) == ((), 0, {})
    assert descriptors() == before


def test_an_arena_that_finds_no_memory_stays_without_and_can_try_again() -> None:
    driver = FakeVmm(total_bytes=8 * GRANULARITY_BYTES)
    arena = VmmArena(REGIONS, driver, chunk_bytes=CHUNK_BYTES)
    arena.discard()
    other = driver.create(3 * GRANULARITY_BYTES, 0)
    with pytest.raises(DeviceMemoryFull) as caught:
        arena.populate()
    assert caught.value.needed_bytes == CHUNK_BYTES
    assert caught.value.free_bytes == GRANULARITY_BYTES
    assert driver.handles == (other,)
    driver.release(other)
    arena.populate()
    arena.tensor(arena.region("w"), torch.uint8, (REGIONS[0].size_bytes,)).fill_(1)
    arena.close()


def test_without_memory_there_is_nothing_to_export() -> None:
    arena = VmmArena(REGIONS, FakeVmm(), chunk_bytes=CHUNK_BYTES)
    arena.discard()
    with pytest.raises(ValueError, match=r"populate\(\) it first"):
        arena.export_chunks()
    arena.close()


def test_a_failed_export_or_import_leaves_no_descriptor() -> None:
    driver = FakeVmm()
    arena = VmmArena(REGIONS, driver, chunk_bytes=CHUNK_BYTES)
    before = descriptors()
    driver.fails.add("cuMemExportToShareableHandle")
    with pytest.raises(DeviceMemoryError):
        arena.export_chunks()
    assert descriptors() == before
    driver.fails.clear()

    chunks = arena.export_chunks()
    held = driver.mapped_bytes
    driver.fails.add("cuMemSetAccess")
    with pytest.raises(DeviceMemoryError):
        ImportedArena(chunks, driver)
    close_chunks(chunks)
    assert descriptors() == before
    assert driver.mapped_bytes == held
    arena.close()


@pytest.mark.parametrize(
    "chunks", [[], [SharedChunk(0, 4, 4)], [SharedChunk(0, 0, 4), SharedChunk(0, 8, 4)]]
)
def test_chunks_must_be_side_by_side(chunks: list[SharedChunk]) -> None:
    with pytest.raises(ValueError, match="chunk"):
        ImportedArena(chunks, FakeVmm())


def test_both_arenas_are_one_thing_to_an_engine() -> None:
    def life(arena: ArenaLike) -> int:
        arena.discard()
        arena.populate()
        tensor = arena.tensor(arena.region("w"), torch.uint8, (REGIONS[0].size_bytes,))
        tensor.fill_(1)
        return int(tensor.double().sum())

    from dynamo_elastic.memory.arena import HostArena

    arena = VmmArena(REGIONS, FakeVmm())
    assert life(arena) == life(HostArena(REGIONS)) == REGIONS[0].size_bytes
    arena.close()


def test_an_empty_arena_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one region"):
        VmmArena([], FakeVmm())


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a host without a GPU")
def test_without_a_gpu_the_driver_says_so() -> None:
    with pytest.raises(ResourceMissing, match="no GPU"):
        CudaVmm()
