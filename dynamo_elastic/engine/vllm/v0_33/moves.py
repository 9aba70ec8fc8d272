"""Moves of experts between ranks, which vLLM makes in the background, a layer at a time: here they
can be stopped between two layers, and make no rank needed that may leave.

vLLM waits for the end of all moves before it scales, and throws them away; here they end at the
next layer, and what was moved stays. Its own balance may leave an expert to any rank; here the
first ranks that have all of them keep them, and the others get copies.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.distributed.eplb import eplb_state
from vllm.distributed.eplb.eplb_utils import CpuGpuEvent
from vllm.distributed.eplb.policy import DefaultEplbPolicy

from dynamo_elastic.engine.vllm.elastic.placement import (
    beside_prefix,
    complete_prefix,
    logical_maps,
)
from dynamo_elastic.engine.vllm.elastic.settings import ElasticSettings
from dynamo_elastic.errors import EngineError

_POLL_S = 0.0005


class TrackedEvent(CpuGpuEvent):  # type: ignore[misc]
    """vLLM's event, of which one can see whether anybody waits."""

    def __init__(self) -> None:
        super().__init__()
        self._waits = False

    def wait(self, stream: Any = None) -> None:
        self._waits = True
        try:
            super().wait(stream)
        finally:
            self._waits = False

    @property
    def rests(self) -> bool:
        """Somebody waits, and nobody has called."""
        return self._waits and not self._recorded.is_set()


def stop_moves(state: Any) -> None:
    """No expert is on its way; layers that were moved stay so. All ranks must call it between the
    same two steps. Raises EngineError if that takes too long."""
    if not state.is_async or state.async_worker is None:
        return
    until_s = time.monotonic() + ElasticSettings.from_environment().group_timeout_s
    while True:
        for model_state in state.model_states.values():
            # vLLM's thread looks at it before each layer, on all ranks at once.
            model_state.rebalanced = False
            result, model_state.pending_result = model_state.pending_result, None
            if result is not None:
                result.consumed_event.record()
        if state.rearrange_event.rests or not state.async_worker.is_alive():
            return
        if time.monotonic() > until_s:
            raise EngineError("experts on their way between ranks did not come to rest")
        time.sleep(_POLL_S)


def start_moves(state: Any) -> None:
    """vLLM's thread of moves is there to be woken: one that has met an error has ended for good."""
    thread = state.async_worker
    if thread is not None and not thread.is_alive():
        state.async_worker, state.rearrange_event = None, TrackedEvent()
    state.start_async_loop()


class PrefixPolicy(DefaultEplbPolicy):  # type: ignore[misc]
    """vLLM's balance, as long as every rank is needed; then the first ones keep what they have."""

    @classmethod
    def rebalance_experts(
        cls,
        weight: torch.Tensor,
        num_replicas: int,
        num_groups: int,
        num_nodes: int,
        num_ranks: int,
        old_global_expert_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        old = old_global_expert_indices
        if old is not None and old.shape[1] == num_replicas:
            slots = num_replicas // num_ranks
            kept = complete_prefix(old, slots, weight.shape[1])
            if 0 < kept < num_ranks:
                return beside_prefix(old, weight.float().cpu(), kept, slots)
        balanced: torch.Tensor = super().rebalance_experts(
            weight, num_replicas, num_groups, num_nodes, num_ranks, old
        )
        return balanced


def install() -> None:
    """vLLM's state of experts uses ours from now on."""

    def drain_async(self: Any) -> None:
        stop_moves(self)

    eplb_state.compute_logical_maps = logical_maps
    eplb_state.CpuGpuEvent = TrackedEvent
    eplb_state.EplbState.drain_async = drain_async
    eplb_state.EPLB_POLICIES["default"] = PrefixPolicy
