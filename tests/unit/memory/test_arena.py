from __future__ import annotations

import ctypes
import mmap

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynamo_elastic.memory.arena import HostArena, layout

MIB = 1 << 20


@given(
    st.lists(st.integers(1, 10_000), min_size=1, max_size=20),
    st.sampled_from([1, 64, 4096]),
)
def test_layout_is_aligned_in_order_and_without_overlap(sizes: list[int], align: int) -> None:
    regions = layout(((f"r{i}", s) for i, s in enumerate(sizes)), align_bytes=align)
    assert [(r.name, r.size_bytes) for r in regions] == [(f"r{i}", s) for i, s in enumerate(sizes)]
    end = 0
    for region in regions:
        assert region.offset % align == 0
        assert 0 <= region.offset - end < align
        end = region.offset + region.size_bytes


def test_layout_refuses_a_name_twice_and_an_empty_region() -> None:
    with pytest.raises(ValueError, match="w comes twice"):
        layout([("w", 1), ("w", 2)])
    with pytest.raises(ValueError, match="w has 0 bytes"):
        layout([("w", 0)])
    with pytest.raises(ValueError, match="at least one region"):
        HostArena([])


def test_tensors_share_the_memory_of_their_region_alone() -> None:
    arena = HostArena(layout([("a", 10), ("b", 24), ("c", 4)]))
    a, b, c = arena.regions
    tensor = arena.tensor(b, torch.float32, (2, 3))
    tensor.fill_(1.5)
    assert tensor.data_ptr() == arena.address + b.offset
    assert bytes(arena.view(b)) == bytes(tensor.numpy().tobytes())
    assert bytes(arena.view(a)) == bytes(10)
    assert bytes(arena.view(c)) == bytes(4)
    arena.view(b)[:4] = bytes(4)
    assert tensor[0, 0] == 0
    assert arena.region("b") == b


def test_a_tensor_must_fill_its_region() -> None:
    arena = HostArena(layout([("w", 24)]))
    with pytest.raises(ValueError, match=r"region w has 24 bytes.*needs 20"):
        arena.tensor(arena.region("w"), torch.float32, (5,))


def test_the_block_is_whole_pages_at_an_address_that_others_can_use() -> None:
    arena = HostArena(layout([("w", mmap.PAGESIZE + 1)]))
    assert arena.size_bytes == 2 * mmap.PAGESIZE
    ctypes.memset(arena.address, 9, arena.size_bytes)
    assert arena.view(arena.region("w"))[-1] == 9


def test_discard_gives_the_pages_back_and_keeps_the_addresses() -> None:
    arena = HostArena(layout([("w", 8 * MIB)]))
    assert arena.resident_bytes() == 0
    tensor = arena.tensor(arena.region("w"), torch.uint8, (8, MIB))
    tensor.fill_(3)
    assert arena.resident_bytes() == 8 * MIB
    address = arena.address

    arena.discard()

    assert arena.resident_bytes() == 0
    assert arena.address == address == tensor.data_ptr()
    assert int(tensor.sum()) == 0
    tensor.fill_(4)
    assert arena.view(arena.region("w"))[5] == 4


def test_a_tensor_keeps_the_memory_after_the_arena_is_gone() -> None:
    arena = HostArena(layout([("w", 4096)]))
    tensor = arena.tensor(arena.region("w"), torch.uint8, (4096,))
    tensor.fill_(8)
    del arena
    assert int(tensor.sum()) == 8 * 4096
