"""The paged KV cache: its memory, and who holds which block."""

from __future__ import annotations

import torch

from dynamo_elastic.engine.reference.store import HOST, Store
from dynamo_elastic.engine.shape import ModelShape
from dynamo_elastic.memory.arena import layout

BLOCK_TOKENS = 16
SCRATCH_BLOCK = 0
"""Where the padding rows of a tile write; no sequence ever owns it."""


def blocks_for(tokens: int) -> int:
    """How many blocks `tokens` positions need."""
    return -(-tokens // BLOCK_TOKENS)


class KvCache:
    """Keys and values of `blocks` blocks, plus the scratch block, in one arena.

    `keys[layer]` and `values[layer]`: shape (kv_heads, 1 + blocks, BLOCK_TOKENS, head_dim), so that
    gathering blocks yields each head's context in one piece.
    """

    def __init__(self, shape: ModelShape, blocks: int, store: Store = HOST) -> None:
        sizes = (shape.num_key_value_heads, 1 + blocks, BLOCK_TOKENS, shape.head_dim)
        size_bytes = store.dtype.itemsize * torch.Size(sizes).numel()
        names = [f"kv/layers.{i}.{p}" for i in range(shape.num_hidden_layers) for p in "kv"]
        self.arena = store.arena(layout((name, size_bytes) for name in names))
        tensors = [self.arena.tensor(self.arena.region(name), store.dtype, sizes) for name in names]
        self.keys, self.values = tensors[0::2], tensors[1::2]


class BlockPool:
    """Free block numbers, 1 to `blocks`."""

    def __init__(self, blocks: int) -> None:
        self.total = blocks
        self._free = list(range(blocks, 0, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A free block. Raises IndexError if there is none: ask `free` first."""
        return self._free.pop()

    def give_back(self, blocks: list[int]) -> None:
        """Return blocks that take() gave; the list is emptied."""
        self._free.extend(reversed(blocks))
        blocks.clear()
