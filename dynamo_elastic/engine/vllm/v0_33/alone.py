"""A group that has shrunk to one rank, which vLLM has no notion of: it would have no expert
parallelism, no expert buffer and no expert map, none of which it could get back while it serves.

Here such a rank keeps all three. Its layers dispatch over the buffer to itself, every peer is
disconnected, and the next rank that joins finds what a group of two would have.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch


def with_experts_of_its_own(made: Any, before: Any) -> Any:
    """`made`, vLLM's configuration of a layer for a group of one, with the parallelism of the one
    `before`: experts are still dispatched, all of them to this rank."""
    parallel = replace(before.moe_parallel_config, ep_size=1, ep_rank=0, dp_rank=0)
    return replace(made, moe_parallel_config=parallel)


def keep_expert_maps(layers: Iterable[Any], device: torch.device) -> None:
    """Layers of a rank that holds every slot have a map that says so; vLLM has none for them, and
    can't make one for a larger group without."""
    for layer in layers:
        experts = layer.routed_experts
        manager = experts.expert_map_manager
        if manager.expert_map is None:
            count = manager.global_num_experts
            manager._expert_map = torch.arange(count, dtype=torch.int32, device=device)
            experts.update_expert_map_info()
