"""A worker after a step that failed because a peer died: it computes nothing, nobody waits for it,
and it says where it believes the experts to be."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators.all2all import NixlEPAll2AllManager

from dynamo_elastic.engine.vllm.elastic.groups import Numbers, close_gloo
from dynamo_elastic.engine.vllm.elastic.placement import complete_prefix

_GROUPS = ("_DP", "_EP", "_EPLB", "_WORLD")
"""Of vLLM's parallel_state."""


class RestingWorker:
    """Mixed into vLLM's ElasticEPScalingExecutor, before it."""

    worker: Any
    """vLLM's own."""
    rests = False
    """A step has failed, and no other group is in force yet."""

    def rest(self) -> dict[str, Any]:
        """A step has failed: nothing of it is left. Returns what a survivors.Word says."""
        self.rests = True
        let_go_of_step(self.worker.model_runner)
        return self.placement()

    def placement(self) -> dict[str, Any]:
        ep_size = parallel_state.get_ep_group().world_size
        return placement(self.worker.model_runner.eplb_state, ep_size)

    def switch_and_prepare(self) -> tuple[Any, ...]:
        retired: tuple[Any, ...] = super().switch_and_prepare()  # type: ignore[misc]
        if self.rests:
            forget_step(parallel_state.get_ep_group().world_size)
            self.rests = False
        return retired


def let_go_of_step(runner: Any) -> None:
    """Of vLLM's model runner: nothing of a step is left that was begun. Peers that wait for this
    rank see that it has gone. Raises RuntimeError if this GPU is not well."""
    for name in _GROUPS:
        group = getattr(parallel_state, name)
        if group is not None:
            close_gloo(group.cpu_group)
            group.cpu_group = group.device_group = Numbers(group.rank_in_group, group.world_size)
    runner.execute_model_state = None
    runner.kv_connector_output = None
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def placement(state: Any, ep_size: int) -> dict[str, Any]:
    """What a survivors.Word says, of vLLM's EplbState. Moves in the middle of a step can't be seen
    from here; those that vLLM makes beside its steps can."""
    digest, complete = hashlib.blake2s(), 1
    rests = state.is_async and (state.async_worker is None or state.rearrange_event.rests)
    for model_state in state.model_states.values():
        held = model_state.physical_to_logical_map.cpu()
        experts = model_state.model.num_logical_experts
        fewest = complete_prefix(held, held.shape[1] // ep_size, experts)
        complete = max(complete, fewest) if fewest and complete else 0
        digest.update(held.contiguous().numpy().tobytes())
    return {"complete": complete if rests else 0, "placement": digest.hexdigest()}


def forget_step(size: int) -> None:
    """The expert buffer of this rank has no trace of the failed step: no count of tokens that were
    under way, and none of the first `size` ranks is masked, which live. All of them must call it
    while none of them steps."""
    with NixlEPAll2AllManager._lock:
        state = NixlEPAll2AllManager._buffer
        if state is None:
            return
        torch.accelerator.synchronize()
        # As vLLM's clean_buffers(), which would unmask ranks that were never connected as well.
        state.buffer.get_local_buffer_tensor(dtype=torch.int8, use_rdma_buffer=True).zero_()
        for rank in range(size):
            if rank != state.buffer.rank:
                state.buffer.update_mask_buffer(rank, mask=False)
        torch.accelerator.synchronize()
        NixlEPAll2AllManager._last_mask = None
