"""Expert maps of a group, as tensors. `physical` is [layers, slots]: the expert in each slot, -1
for none; slots of one rank are neighbours. Pure."""

from __future__ import annotations

import heapq

import torch
from torch import Tensor


def logical_maps(
    physical_to_logical_map: Tensor, num_logical_experts: int
) -> tuple[Tensor, Tensor]:
    """Slots of every expert, [layers, experts, most replicas] padded with -1 and in ascending
    order, and how many each has. One layer without its dimension is fine too.

    It stands in for vLLM's compute_logical_maps, which walks over the slots in Python: 12 ms for
    the 128 slots of one layer, in the way of steps. The map is on the host.
    """
    physical, experts = physical_to_logical_map, num_logical_experts
    rows = physical.unsqueeze(0) if physical.dim() == 1 else physical
    layers, slots = rows.shape
    held = rows >= 0
    # Slots without an expert sort behind all others.
    key = torch.where(held, rows, torch.full_like(rows, experts))
    order = torch.argsort(key, dim=1, stable=True)
    expert = key.gather(1, order)
    counts = torch.zeros(layers, experts + 1, dtype=rows.dtype)
    counts.scatter_add_(1, key, torch.ones_like(rows))
    first = counts.cumsum(1) - counts
    replica = torch.arange(slots, dtype=rows.dtype).expand(layers, -1) - first.gather(1, expert)
    counts = counts[:, :experts].contiguous()
    most = int(counts.max()) if counts.numel() else 0
    found = torch.full((layers, experts + 1, max(most, slots)), -1, dtype=rows.dtype)
    layer = torch.arange(layers).unsqueeze(1).expand(-1, slots)
    found[layer, expert, replica] = order.to(rows.dtype)
    found = found[:, :experts, :most].contiguous()
    if physical.dim() == 1:
        return found.squeeze(0), counts.squeeze(0)
    return found, counts


def is_complete(physical: Tensor, slots: int, experts: int) -> bool:
    """Whether the first `slots` slots hold every expert in every layer: those who have them can go
    on without the others, and nothing has to be moved.

    >>> is_complete(torch.tensor([[0, 1, 1, 0]]), 2, 2)
    True
    """
    present = torch.zeros(physical.shape[0], experts + 1, dtype=torch.bool, device=physical.device)
    kept = physical[:, :slots].long()
    present.scatter_(1, torch.where(kept >= 0, kept, torch.full_like(kept, experts)), True)
    return bool(present[:, :experts].all())


def complete_prefix(physical: Tensor, slots_per_rank: int, experts: int) -> int:
    """The fewest first ranks that have every expert in every layer; 0 if all ranks have not.

    >>> complete_prefix(torch.tensor([[0, 1, 1, 0, 0, -1]]), 2, 2)
    1
    """
    ranks = physical.shape[1] // slots_per_rank
    counts = range(1, ranks + 1)
    return next((n for n in counts if is_complete(physical, n * slots_per_rank, experts)), 0)


def beside_prefix(physical: Tensor, load: Tensor, kept: int, slots_per_rank: int) -> Tensor:
    """The map in which the first `kept` ranks, who have every expert, stay as they are, and the
    others hold copies of the experts with the most load for each copy. A rank keeps what it holds
    of those. So all the others may leave at any time, and nothing has to be moved for it. `load` is
    [layers, experts]."""
    first = kept * slots_per_rank
    made = physical.clone()
    for layer in range(physical.shape[0]):
        row = physical[layer].tolist()
        held = row[:first] + [-1] * (len(row) - first)
        wanted = _most_loaded(row[:first], load[layer].tolist(), len(row) - first)
        for start in range(first, len(row), slots_per_rank):
            for slot in range(start, start + slots_per_rank):
                if row[slot] in wanted and row[slot] not in held[start : start + slots_per_rank]:
                    wanted.remove(row[slot])
                    held[slot] = row[slot]
        made[layer] = torch.tensor(_filled(held, wanted, first, slots_per_rank))
    return made


def _most_loaded(prefix: list[int], load: list[float], copies: int) -> list[int]:
    """Of which experts to make that many copies, one after the other."""
    counts = [prefix.count(expert) for expert in range(len(load))]
    heap = [(-load[e] / counts[e], counts[e], e) for e in range(len(load))]
    heapq.heapify(heap)
    chosen = []
    for _ in range(copies):
        _, count, expert = heapq.heappop(heap)
        chosen.append(expert)
        heapq.heappush(heap, (-load[expert] / (count + 1), count + 1, expert))
    return chosen


def _filled(held: list[int], wanted: list[int], first: int, slots_per_rank: int) -> list[int]:
    """Free slots get what is wanted, two copies on one rank only if there is no other way."""
    for expert in wanted:
        free = [slot for slot in range(first, len(held)) if held[slot] < 0]
        start = {slot: slot - (slot - first) % slots_per_rank for slot in free}
        apart = [s for s in free if expert not in held[start[s] : start[s] + slots_per_rank]]
        held[(apart or free)[0]] = expert
    return held
