"""What the expert buffers of a deployment are built for: a pure function of its settings."""

from __future__ import annotations

from dynamo_elastic.comm.expert_rules import RANKS_PER_NODE, BufferShape
from dynamo_elastic.engine.launch import EngineSettings
from dynamo_elastic.engine.shape import ModelShape


def buffer_shape(settings: EngineSettings, shape: ModelShape) -> BufferShape:
    """What the expert buffers of a deployment are built for."""
    capacity = settings.capacity
    if capacity >= RANKS_PER_NODE:
        capacity = -(-capacity // RANKS_PER_NODE) * RANKS_PER_NODE
    return BufferShape(
        capacity=capacity,
        experts_per_rank=settings.slots_per_rank,
        hidden=shape.hidden_size,
        top_k=shape.num_experts_per_tok,
        max_tokens=settings.batch_tokens,
        timeout_ms=int(settings.peer_timeout_s * 1000),
    )
