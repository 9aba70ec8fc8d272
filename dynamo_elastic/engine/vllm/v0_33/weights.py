"""Weights that every rank has alike, on their way from a rank that serves to one that joins."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from dynamo_elastic.comm.base import TransferAgent
from dynamo_elastic.comm.tensor_digest import WORD_BYTES, digests
from dynamo_elastic.engine.vllm.elastic.stream import Stream


def replicated(model: Any, experts: Iterable[Iterable[torch.Tensor]]) -> dict[str, torch.Tensor]:
    """What every rank has alike: all of the model's state but experts and their maps."""
    skipped = {weight.data_ptr() for group in experts for weight in group}
    return {
        name: tensor
        for name, tensor in model.state_dict().items()
        if not name.endswith("expert_map")
        and "._shared_experts" not in name
        and tensor.data_ptr() not in skipped
    }


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """Of the names and of every byte, in one launch on a GPU; equal for tensors of equal layout."""
    found = digests({name: _in_order(tensors[name]) for name in sorted(tensors)})
    return hashlib.blake2s(repr(found).encode()).hexdigest()


def _in_order(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes as they lie in memory, where they lie without gaps and at whole words."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    laid = tensor.detach().permute(order)
    if laid.is_contiguous() and laid.data_ptr() % WORD_BYTES == 0:
        return laid
    return laid.clone(memory_format=torch.contiguous_format)


def stream_of(group: Any, joiner: int, device: torch.device, timeout_s: float) -> Stream:
    """This rank's end of the way of `joiner`'s weights."""
    return Stream(
        group.tcp_store_group.store,
        f"weights/{joiner}",
        new_agent(f"weights-{joiner}-{group.rank_in_group}-{uuid.uuid4().hex[:8]}"),
        device,
        timeout_s=timeout_s,
    )


def new_agent(name: str) -> TransferAgent:
    """Of NIXL. Its module gives UCX transports that are good for one host, to whoever names none:
    vLLM's own agents in this process keep their choice."""
    named = os.environ.get("UCX_TLS")
    from dynamo_elastic.comm.nixl_agent import NixlAgent

    if named is None:
        os.environ.pop("UCX_TLS", None)
    return NixlAgent(name)


def sender_of(joiner: int, old_size: int) -> int:
    """Which rank sends a joiner its weights: in turn."""
    return (joiner - old_size) % old_size
