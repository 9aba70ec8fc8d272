"""Experts of one step on a GPU: dispatch, two grouped products, combine; the same calls for every
tile, so that a graph can hold them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from dynamo_elastic.comm.base import ExpertBuffer
from dynamo_elastic.engine.reference.experts import Placement
from dynamo_elastic.engine.reference.gpu_kernels import DOWN, GATE_UP, Choices, product
from dynamo_elastic.engine.reference.layout import slot_prefix
from dynamo_elastic.engine.reference.model import LIVE, Routing, Weights
from dynamo_elastic.types import Rank, Region

NOBODY = -1
"""In place of an expert's number: the token goes nowhere."""


def expert_table(
    placement: Placement, num_experts: int, rows: int, seats: Mapping[Rank, Rank], slots: int
) -> NDArray[np.int64]:
    """Which slot of the whole group serves `expert` for a row: int64, (rows, num_experts).

    Slot s of the rank in seat k has the number k * slots + s. Replicas share the rows among them as
    in Placement.choose().
    """
    table = np.full((rows, num_experts), NOBODY, dtype=np.int64)
    for expert in range(num_experts):
        replicas = placement.replicas(expert)
        if replicas:
            numbers = np.array([seats[rank] * slots + slot for rank, slot in replicas])
            table[:, expert] = numbers[(np.arange(rows) + placement.me) % len(numbers)]
    return table


def own_experts(num_experts: int, rows: int, seat: Rank, slots: int) -> NDArray[np.int64]:
    """As expert_table(): the first experts are in our slots, the others nowhere; for steps without
    peers."""
    table = np.full((rows, num_experts), NOBODY, dtype=np.int64)
    own = min(slots, num_experts)
    table[:, :own] = np.arange(own) + seat * slots
    return table


@dataclass(frozen=True, slots=True)
class ExpertStacks:
    """All expert slots of a rank, layer by layer, as two tensors a layer over the arena:
    (slots, 2 * inner, hidden) and (slots, hidden, inner)."""

    gate_up: tuple[Tensor, ...]
    down: tuple[Tensor, ...]


def stack_experts(weights: Weights) -> ExpertStacks:
    """Views of `weights`, not copies. Raises ValueError if slots are not laid out alike."""
    layers = range(weights.shape.num_hidden_layers)
    return ExpertStacks(
        tuple(_stack(weights, f"layers.{layer}.gate_up") for layer in layers),
        tuple(_stack(weights, f"layers.{layer}.down") for layer in layers),
    )


def _stack(weights: Weights, name: str) -> Tensor:
    item_bytes = weights.store.dtype.itemsize
    regions = [weights.arena.region(slot_prefix(s) + name) for s in range(weights.slots)]
    offsets = np.array([r.offset for r in regions])
    steps = np.diff(offsets)
    if len(set(steps.tolist())) > 1 or (steps % item_bytes).any():
        raise ValueError(f"expert slots are not laid out alike: {name}")
    size_bytes = int(offsets[-1] - offsets[0]) + regions[-1].size_bytes
    whole = Region(name, int(offsets[0]), size_bytes)
    flat = weights.arena.tensor(whole, weights.store.dtype, (size_bytes // item_bytes,))
    one = weights.tensors[regions[0].name]
    step = int(steps[0]) // item_bytes if len(steps) else one.numel()
    size = (weights.slots, *one.shape)
    return flat.as_strided(size, (step, *one.stride()))


class BufferExperts:
    """The experts of a step over `buffer`, as the model calls them.

    `tile` is the packed tile of the step and `table` what expert_table() gives, both on the GPU and
    read when the step runs, not when it is captured.
    """

    def __init__(
        self,
        buffer: ExpertBuffer,
        stacks: ExpertStacks,
        table: Tensor,
        tile: Tensor,
        kernels: Choices,
    ) -> None:
        self._buffer = buffer
        self._stacks = stacks
        self._table = table
        self._tile = tile
        self._kernels = kernels

    def __call__(self, routing: Routing) -> Tensor:
        """Every rank of the group calls this for every layer, with or without rows."""
        # Whatever a graph reads must outlive it, which this object does not.
        slots = self._table[: len(self._tile)].gather(1, routing.experts)
        slots = torch.where(self._tile[:, LIVE, None] == 1, slots, NOBODY)
        slots = slots.to(self._buffer.topk_dtype)
        sent = self._buffer.dispatch(routing.hidden, slots)
        gate_up, down = self._stacks.gate_up[routing.layer], self._stacks.down[routing.layer]
        gate, up = product(self._kernels[GATE_UP], sent.tokens, gate_up).chunk(2, dim=-1)
        results = self._buffer.staging(sent)
        product(self._kernels[DOWN], functional.silu(gate) * up, down, out=results)
        out = torch.empty_like(routing.hidden)
        self._buffer.combine(results, slots, routing.weights, sent, out=out, staged=True)
        return out
