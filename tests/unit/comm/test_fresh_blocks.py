"""Blocks that lie in no chunk that was there before, on a heap of chunks like the driver's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_elastic.comm.fresh_blocks import CHUNK_BYTES, LEAST_BYTES, fresh_blocks
from dynamo_elastic.errors import DeviceMemoryError

_BASE = 0x7F00_0000_0000
SIZES = st.one_of(st.integers(1, 8 * LEAST_BYTES), st.integers(1, CHUNK_BYTES // 2))


def first(holes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    return holes[0]


def best(holes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    return min(holes, key=lambda hole: hole[1] - hole[0])


def last(holes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    return holes[-1]


class ChunkedHeap:
    """Blocks out of chunks; a chunk without blocks is given back. `choose` takes one of the holes
    (begin, end) in which a block fits. `left`: allocations before it is full."""

    def __init__(
        self,
        choose: Callable[[Sequence[tuple[int, int]]], tuple[int, int]] = first,
        left: int = 1 << 20,
    ) -> None:
        self.blocks: dict[int, int] = {}
        self._choose = choose
        self._next = _BASE
        self.left = left

    @property
    def chunks(self) -> set[int]:
        return {address // CHUNK_BYTES for address in self.blocks}

    def allocate(self, size_bytes: int) -> int:
        if self.left == 0:
            raise DeviceMemoryError("cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY")
        self.left -= 1
        size_bytes = -(-size_bytes // LEAST_BYTES) * LEAST_BYTES
        holes = [hole for hole in self._holes() if hole[1] - hole[0] >= size_bytes]
        if holes:
            address, _ = self._choose(holes)
        else:
            address, self._next = self._next, self._next + CHUNK_BYTES
        self.blocks[address] = size_bytes
        return address

    def free(self, address: int) -> None:
        del self.blocks[address]

    def _holes(self) -> list[tuple[int, int]]:
        found = []
        for chunk in sorted(self.chunks):
            begin, end = chunk * CHUNK_BYTES, (chunk + 1) * CHUNK_BYTES
            inside = sorted((a, a + s) for a, s in self.blocks.items() if begin <= a < end)
            edges = [(begin, begin), *inside, (end, end)]
            found += [(a, b) for (_, a), (b, _) in pairwise(edges) if b > a]
        return found


@given(
    choose=st.sampled_from([first, best, last]),
    before=st.lists(st.tuples(SIZES, st.booleans()), max_size=30),
    wanted=st.lists(SIZES, max_size=10),
)
def test_blocks_lie_in_new_chunks(
    choose: Callable[[Sequence[tuple[int, int]]], tuple[int, int]],
    before: list[tuple[int, bool]],
    wanted: list[int],
) -> None:
    heap = ChunkedHeap(choose)
    addresses = [(heap.allocate(size_bytes), stays) for size_bytes, stays in before]
    for address, stays in addresses:
        if not stays:
            heap.free(address)
    old, kept = heap.chunks, set(heap.blocks)
    with fresh_blocks(heap):
        made = {heap.allocate(size_bytes) for size_bytes in wanted}
    assert not {address // CHUNK_BYTES for address in made} & old
    assert set(heap.blocks) == kept | made


@pytest.mark.parametrize("left", range(14))
def test_full_memory_leaves_nothing_held(left: int) -> None:
    heap = ChunkedHeap()
    kept = [heap.allocate(3 * LEAST_BYTES), heap.allocate(CHUNK_BYTES // 4)]
    heap.left = left
    with pytest.raises(DeviceMemoryError), fresh_blocks(heap):
        pytest.fail("there is no room")
    assert sorted(heap.blocks) == kept


def test_memory_that_never_yields_a_whole_chunk_is_given_back() -> None:
    class Whole:
        """A heap that has a chunk for every block."""

        def __init__(self) -> None:
            self.blocks: set[int] = set()

        def allocate(self, size_bytes: int) -> int:
            address = _BASE + len(self.blocks) * CHUNK_BYTES
            self.blocks.add(address)
            return address

        def free(self, address: int) -> None:
            self.blocks.remove(address)

    heap = Whole()
    with pytest.raises(DeviceMemoryError, match="no new chunk"), fresh_blocks(heap):
        pytest.fail("no block of half a chunk is cut out of a chunk")
    assert not heap.blocks
