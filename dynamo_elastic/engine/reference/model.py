"""The decoder: one step over a tile of rows whose shape never changes.

On the host every matrix product has the same shape in every step, on one thread: a tile has
`batch_tokens` rows, padded with zeros, and a row attends to `max_context` keys, masked. So the
logits of a row are the same bits whatever the other rows are, wherever it stands, whichever rank
computes it. A GPU has a graph for each of several tile sizes, and bits depend on the size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from dynamo_elastic.engine.reference.kv import BLOCK_TOKENS, SCRATCH_BLOCK, KvCache, blocks_for
from dynamo_elastic.engine.reference.layout import DENSE, arena_pieces, slot_prefix, slot_spans
from dynamo_elastic.engine.reference.store import HOST, Store
from dynamo_elastic.engine.shape import ModelShape
from dynamo_elastic.memory.arena import layout
from dynamo_elastic.types import Region


@dataclass(frozen=True, slots=True)
class Row:
    """One token at one position of one sequence, and the blocks that hold its context."""

    token: int
    position: int
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class Routing:
    """Where the rows of a tile go in one layer. Rows from `live` on are padding.

    `experts`: int64, `weights`: float32, both (batch_tokens, experts_per_token).
    """

    layer: int
    live: int
    hidden: Tensor
    experts: Tensor
    weights: Tensor


Experts = Callable[[Routing], Tensor]
"""The weighted sum of every row's experts, (batch_tokens, hidden_size); padding rows are zero."""


def no_experts(routing: Routing) -> Tensor:
    """All experts masked: what is left is the dense part of the model."""
    return torch.zeros_like(routing.hidden)


@dataclass(frozen=True, slots=True)
class TileSize:
    """The fixed shape of a step."""

    batch_tokens: int
    max_context: int

    @property
    def context_blocks(self) -> int:
        return blocks_for(self.max_context)


class Weights:
    """The arena of one rank with a tensor for every region. Contents are zero until loaded."""

    def __init__(self, shape: ModelShape, slots: int, store: Store = HOST) -> None:
        self.shape = shape
        self.slots = slots
        self.store = store
        pieces = arena_pieces(shape, slots)
        item_bytes = store.dtype.itemsize
        self.arena = store.arena(layout((p.name, p.size_bytes(item_bytes)) for p in pieces))
        self.tensors: Mapping[str, Tensor] = {
            p.name: self.arena.tensor(self.arena.region(p.name), store.dtype, p.shape)
            for p in pieces
        }
        self._slots = slot_spans(self.arena.regions, slots)

    def slot(self, slot: int) -> Region:
        """All weights of an expert slot, which lie side by side. Its name is that of no piece."""
        return self._slots[slot_prefix(slot)]

    def dense(self, name: str) -> Tensor:
        return self.tensors[DENSE + name]

    def digests(self, names: Iterable[str]) -> dict[str, str]:
        """Of the regions of these names, or whole slots. Raises KeyError."""
        regions = [self._slots.get(name) or self.arena.region(name) for name in names]
        data = [self.arena.tensor(r, torch.uint8, (r.size_bytes,)) for r in regions]
        return dict(zip((r.name for r in regions), self.store.digests(data), strict=True))


class Model:
    """A decoder over `weights`; knows nothing of ranks. Holds no state between steps."""

    def __init__(self, weights: Weights, tile: TileSize) -> None:
        self.shape = weights.shape
        self.weights = weights
        self.tile = tile
        device = weights.store.device
        self._cos, self._sin = (t.to(device) for t in _rope_tables(self.shape, tile))
        self._width = torch.arange(tile.context_blocks * BLOCK_TOKENS, device=device)

    def forward(self, rows: list[Row], cache: KvCache, experts: Experts) -> Tensor:
        """Logits of `rows`, (batch_tokens, vocab_size); those of padding rows mean nothing.

        Writes the keys and values of each row into `cache`: doing it again changes nothing.
        """
        tile = pack(rows, self.tile, self.tile.batch_tokens).to(self.weights.store.device)
        return self.compute(tile, len(rows), cache, experts)

    @torch.inference_mode()
    def compute(self, tile: Tensor, live: int, cache: KvCache, experts: Experts) -> Tensor:
        """Float32 logits of the rows of `tile`, which pack() made, the first `live` of them."""
        places = _places(tile, self._width)
        hidden = self.weights.dense("embed")[tile[:, _TOKEN]]
        for layer in range(self.shape.num_hidden_layers):
            normed = self._norm(hidden, f"layers.{layer}.input_norm")
            hidden = hidden + self._attention(layer, normed, places, cache)
            normed = self._norm(hidden, f"layers.{layer}.post_norm")
            hidden = hidden + experts(self._route(layer, live, normed))
            if self.shape.intermediate_size:
                hidden = hidden + swiglu(
                    normed,
                    self.weights.dense(f"layers.{layer}.shared_gate_up"),
                    self.weights.dense(f"layers.{layer}.shared_down"),
                )
        head = "embed" if self.shape.tie_word_embeddings else "lm_head"
        logits = functional.linear(self._norm(hidden, "norm"), self.weights.dense(head))
        return logits.float()

    def idle(self, experts: Experts) -> None:
        """A step without rows: what other ranks need of this one, and nothing else."""
        hidden = torch.zeros(self.tile.batch_tokens, self.shape.hidden_size)
        for layer in range(self.shape.num_hidden_layers):
            chosen = torch.zeros(len(hidden), self.shape.num_experts_per_tok, dtype=torch.int64)
            experts(Routing(layer, 0, hidden, chosen, chosen.float()))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.shape.rms_norm_eps)
        return (wide * scale).to(x.dtype) * self.weights.dense(name)

    def _route(self, layer: int, live: int, hidden: Tensor) -> Routing:
        router = self.weights.dense(f"layers.{layer}.router")
        chances = torch.softmax(functional.linear(hidden, router).float(), dim=-1)
        weights, experts = torch.topk(chances, self.shape.num_experts_per_tok, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        return Routing(layer, live, hidden, experts, weights)

    def _attention(self, layer: int, x: Tensor, at: _Places, cache: KvCache) -> Tensor:
        shape, rows = self.shape, len(x)
        kv_heads, size = shape.num_key_value_heads, shape.head_dim
        qkv = functional.linear(x, self.weights.dense(f"layers.{layer}.qkv"))
        qkv = qkv.view(rows, -1, size)
        q, k, v = torch.split(qkv, [shape.num_attention_heads, kv_heads, kv_heads], dim=1)
        cos, sin = self._cos[at.positions, None], self._sin[at.positions, None]
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        cache.keys[layer][:, at.block, at.offset] = k.transpose(0, 1)
        cache.values[layer][:, at.block, at.offset] = v.transpose(0, 1)
        batch, width = (kv_heads * rows, -1, size), len(self._width)
        keys = cache.keys[layer].index_select(1, at.table).view(batch)
        values = cache.values[layer].index_select(1, at.table).view(batch)
        q = q.reshape(rows, kv_heads, -1, size).transpose(0, 1).reshape(batch)
        scores = torch.bmm(q * size**-0.5, keys.transpose(1, 2)).view(kv_heads, rows, -1, width)
        scores = scores.float().masked_fill(at.hidden, float("-inf")).softmax(-1).to(x.dtype)
        mixed = torch.bmm(scores.view(kv_heads * rows, -1, width), values)
        mixed = mixed.view(kv_heads, rows, -1).transpose(0, 1).reshape(rows, -1)
        return functional.linear(mixed, self.weights.dense(f"layers.{layer}.o"))


_TOKEN, _POSITION, _BLOCK, LIVE, _TABLE = 0, 1, 2, 3, 4
"""Columns of a packed tile: all of a step's input in one tensor, so that it travels in one copy.
LIVE is 1 for a row and 0 for padding; from _TABLE on come the blocks of the row's context."""


def tile_columns(tile: TileSize) -> int:
    """Columns of a packed tile."""
    return _TABLE + tile.context_blocks


def pack(rows: list[Row], tile: TileSize, size: int) -> Tensor:
    """`rows`, padded to `size` of them: int64, (size, tile_columns(tile)), on the host."""
    packed = torch.full((size, tile_columns(tile)), SCRATCH_BLOCK, dtype=torch.int64)
    packed[:, :_BLOCK] = 0
    packed[:, LIVE] = 0
    for at, row in enumerate(rows):
        table = row.blocks[: tile.context_blocks]
        head = [row.token, row.position, row.blocks[row.position // BLOCK_TOKENS], 1]
        packed[at, : _TABLE + len(table)] = torch.tensor(head + table)
    return packed


@dataclass(frozen=True, slots=True)
class _Places:
    """Where each row of a tile stands and writes, and what it may see."""

    positions: Tensor
    block: Tensor
    offset: Tensor
    table: Tensor
    """Blocks of all rows one after the other, (rows * context_blocks,)."""
    hidden: Tensor
    """True where a key lies after the row, (1, rows, 1, width)."""


def _places(tile: Tensor, width: Tensor) -> _Places:
    positions = tile[:, _POSITION]
    hidden = width[None, :] > positions[:, None]
    return _Places(
        positions=positions,
        block=tile[:, _BLOCK],
        offset=positions % BLOCK_TOKENS,
        table=tile[:, _TABLE:].flatten(),
        hidden=hidden[None, :, None, :],
    )


def _rope_tables(shape: ModelShape, tile: TileSize) -> tuple[Tensor, Tensor]:
    half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(tile.max_context).float(), shape.rope_theta**-half)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


def swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The gated MLP: down(silu(gate(x)) * up(x))."""
    gate, up = functional.linear(x, gate_up).chunk(2, dim=-1)
    return functional.linear(functional.silu(gate) * up, down)
