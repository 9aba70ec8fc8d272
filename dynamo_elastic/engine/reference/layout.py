"""Which region of the arena holds which weights: the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dynamo_elastic.engine.shape import ModelShape
from dynamo_elastic.types import Region

DENSE = "dense/"


@dataclass(frozen=True, slots=True)
class Piece:
    """One weight: a tensor of `shape`, the `sources` of the file stacked on dimension 0."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]

    def size_bytes(self, item_bytes: int) -> int:
        """With so many bytes a number."""
        return item_bytes * math.prod(self.shape)


def dense_pieces(shape: ModelShape) -> Iterator[Piece]:
    """Every weight that each rank holds, in arena order."""
    hidden = shape.hidden_size
    yield Piece(f"{DENSE}embed", (shape.vocab_size, hidden), ("model.embed_tokens.weight",))
    for layer in range(shape.num_hidden_layers):
        yield from _layer_pieces(shape, layer)
    yield Piece(f"{DENSE}norm", (hidden,), ("model.norm.weight",))
    if not shape.tie_word_embeddings:
        yield Piece(f"{DENSE}lm_head", (shape.vocab_size, hidden), ("lm_head.weight",))


def _layer_pieces(shape: ModelShape, layer: int) -> Iterator[Piece]:
    hidden, dense = shape.hidden_size, shape.intermediate_size
    heads = shape.num_attention_heads * shape.head_dim
    kv_heads = shape.num_key_value_heads * shape.head_dim
    ours, theirs = f"{DENSE}layers.{layer}.", f"model.layers.{layer}."
    attention = f"{theirs}self_attn."
    qkv = tuple(f"{attention}{p}_proj.weight" for p in "qkv")
    yield Piece(f"{ours}input_norm", (hidden,), (f"{theirs}input_layernorm.weight",))
    yield Piece(f"{ours}qkv", (heads + 2 * kv_heads, hidden), qkv)
    yield Piece(f"{ours}o", (hidden, heads), (f"{attention}o_proj.weight",))
    yield Piece(f"{ours}post_norm", (hidden,), (f"{theirs}post_attention_layernorm.weight",))
    yield Piece(f"{ours}router", (shape.num_experts, hidden), (f"{theirs}mlp.gate.weight",))
    if dense:
        shared = f"{theirs}mlp.shared_expert."
        yield Piece(f"{ours}shared_gate_up", (2 * dense, hidden), _gate_up(shared))
        yield Piece(f"{ours}shared_down", (hidden, dense), (f"{shared}down_proj.weight",))


def expert_pieces(shape: ModelShape, slot: int, expert: int) -> Iterator[Piece]:
    """The weights of `expert`, as they lie in expert slot `slot`."""
    hidden, inner = shape.hidden_size, shape.moe_intermediate_size
    for layer in range(shape.num_hidden_layers):
        ours = f"{slot_prefix(slot)}layers.{layer}."
        theirs = f"model.layers.{layer}.mlp.experts.{expert}."
        yield Piece(f"{ours}gate_up", (2 * inner, hidden), _gate_up(theirs))
        yield Piece(f"{ours}down", (hidden, inner), (f"{theirs}down_proj.weight",))


def _gate_up(prefix: str) -> tuple[str, str]:
    return f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight"


def slot_prefix(slot: int) -> str:
    """What the names of all regions of expert slot `slot` begin with."""
    return f"slot{slot}/"


def slot_spans(regions: Iterable[Region], slots: int) -> dict[str, Region]:
    """From the first to the last byte of each expert slot, by slot_prefix(): one piece to move and
    to digest, where a model has a hundred in it."""
    spans: dict[str, Region] = {}
    for region in regions:
        name = region.name.partition("/")[0] + "/"
        first = spans.get(name, region)
        size_bytes = region.offset + region.size_bytes - first.offset
        spans[name] = Region(name, first.offset, size_bytes)
    return {slot_prefix(slot): spans[slot_prefix(slot)] for slot in range(slots)}


def arena_pieces(shape: ModelShape, slots: int) -> list[Piece]:
    """All of a rank's weights in arena order; the sources of expert slots mean nothing here."""
    experts = (p for slot in range(slots) for p in expert_pieces(shape, slot, expert=0))
    return [*dense_pieces(shape), *experts]
