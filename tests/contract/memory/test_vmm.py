"""What arenas need of the driver, on the fake and on a real GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from dynamo_elastic.errors import DeviceMemoryError, DeviceMemoryFull
from dynamo_elastic.memory.arena import layout
from dynamo_elastic.memory.base import VmmDriver
from dynamo_elastic.memory.cuda_vmm import CudaVmm
from dynamo_elastic.memory.vmm import ImportedArena, VmmArena, close_chunks
from dynamo_elastic.testing.gpu_memory import FakeVmm

MIB = 1 << 20
CHUNK_BYTES = 4 * MIB


@pytest.fixture(params=["fake", pytest.param("cuda", marks=pytest.mark.gpu(1))])
def driver(request: pytest.FixtureRequest) -> VmmDriver:
    if request.param == "fake":
        return FakeVmm()
    return CudaVmm()


@pytest.fixture
def arena(driver: VmmDriver) -> Iterator[VmmArena]:
    regions = layout([("a", 5 * MIB), ("b", 6 * MIB)])
    arena = VmmArena(regions, driver, chunk_bytes=CHUNK_BYTES)
    yield arena
    arena.close()


def test_memory_goes_and_comes_back_at_the_same_addresses(
    driver: VmmDriver, arena: VmmArena
) -> None:
    b = arena.tensor(arena.region("b"), torch.float32, (6, MIB // 4))
    b.fill_(2.5)  # which loads a kernel on a GPU, and that takes memory
    driver.synchronize(0)
    before = driver.free_bytes(0)
    address = arena.address
    assert arena.size_bytes == 12 * MIB
    assert b.data_ptr() == address + arena.region("b").offset

    arena.discard()
    arena.discard()
    assert not arena.populated
    assert driver.free_bytes(0) - before == 12 * MIB

    arena.populate()
    arena.populate()
    assert driver.free_bytes(0) == before
    assert (arena.address, b.data_ptr()) == (address, address + arena.region("b").offset)
    b.fill_(3.0)
    assert float(b.double().sum()) == 3.0 * b.numel()
    a = arena.tensor(arena.region("a"), torch.uint8, (5 * MIB,))
    a.fill_(7)
    assert float(b.double().sum()) == 3.0 * b.numel()


def test_a_peer_that_maps_the_chunks_writes_into_the_arena(
    driver: VmmDriver, arena: VmmArena
) -> None:
    everything = arena.tensor(arena.region("b"), torch.uint8, (6 * MIB,))
    everything.fill_(1)
    chunks = arena.export_chunks()
    assert [(c.offset, c.size_bytes) for c in chunks] == [
        (0, 4 * MIB),
        (4 * MIB, 4 * MIB),
        (8 * MIB, 4 * MIB),
    ]
    imported = ImportedArena(chunks, driver)
    close_chunks(chunks)
    theirs = imported.bytes()
    assert imported.size_bytes == arena.size_bytes
    assert int(theirs[5 * MIB]) == 1
    theirs.fill_(9)
    imported.close()
    imported.close()
    driver.synchronize(0)
    assert int(everything.double().sum()) == 9 * 6 * MIB


def test_memory_outlives_its_owner_until_the_peer_lets_go(
    driver: VmmDriver, arena: VmmArena
) -> None:
    chunks = arena.export_chunks()
    imported = ImportedArena(chunks, driver)
    close_chunks(chunks)
    imported.bytes().fill_(4)
    arena.discard()
    assert int(imported.bytes().double().sum()) == 4 * arena.size_bytes
    imported.close()


def test_too_little_memory_takes_nothing(driver: VmmDriver) -> None:
    free_bytes = driver.free_bytes(0)
    regions = layout([("w", free_bytes + CHUNK_BYTES)])
    with pytest.raises(DeviceMemoryFull, match=r"bytes free, .* are needed") as caught:
        VmmArena(regions, driver, chunk_bytes=1 << 30)
    assert caught.value.free_bytes < caught.value.needed_bytes + (1 << 30)
    assert driver.free_bytes(0) >= free_bytes - 64 * MIB


def test_a_descriptor_of_something_else_is_refused(driver: VmmDriver) -> None:
    if isinstance(driver, FakeVmm):
        driver.fails.add("cuMemImportFromShareableHandle")
    descriptor = os.open(os.devnull, os.O_RDONLY)
    try:
        with pytest.raises(DeviceMemoryError, match="cuMemImportFromShareableHandle"):
            driver.import_descriptor(descriptor)
    finally:
        os.close(descriptor)
