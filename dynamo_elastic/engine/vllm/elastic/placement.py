"""Expert maps of a group, as tensors. `physical` is [layers, slots]: the expert in each slot, -1
for none; slots of one rank are neighbours. Pure."""

from __future__ import annotations

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
