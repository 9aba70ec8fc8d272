"""Weights and KV cache of a rank that has left: unmapped, and mapped again at the same addresses.

vLLM's cumem allocator (`--enable-cumem-allocator`) keeps the addresses, which captured graphs hold.
Its pool of weights has more in it than weights: tables of positions, expert maps, the sampler's
state. So every byte that nobody sends is kept on the host, wherever it comes from.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from vllm.device_allocator import cumem

from dynamo_elastic.engine.vllm.elastic.spans import of_tensor, without

KV_CACHE = "kv_cache"


class PoolMemory:
    """All that vLLM's allocator holds in this process."""

    def __init__(self) -> None:
        self._pool: Any = cumem.CuMemAllocator.get_instance()
        self._kept: list[tuple[int, Tensor]] = []

    def unmap(self, sent: Iterable[Tensor]) -> int:
        """No GPU memory is left of the pool; the bytes that were freed. `sent`: what is written
        again after map(), by others. The KV cache is lost. Nothing may use the GPU."""
        torch.cuda.synchronize()
        dropped = [of_tensor(tensor) for tensor in sent]
        mapped = [data for data in self._pool.pointer_to_data.values() if not data.is_asleep]
        for data in mapped:
            if data.tag != KV_CACHE:
                whole = (data.handle[2], data.handle[2] + data.handle[1])
                self._kept += [_copied(*part) for part in without(whole, dropped)]
        self._pool.discard(tuple({data.tag for data in mapped}))
        return sum(int(data.handle[1]) for data in mapped)

    @property
    def kept_bytes(self) -> int:
        return sum(copy.numel() for _, copy in self._kept)

    def map(self) -> None:
        """All of it is there again; what is sent holds anything, the KV cache zeros."""
        self._pool.wake_up(None)
        for address, copy in self._kept:
            cumem.libcudart.cudaMemcpy(address, copy.data_ptr(), copy.numel())
        for data in self._pool.pointer_to_data.values():
            if data.tag == KV_CACHE:
                cumem.libcudart.cudaMemset(data.handle[2], 0, data.handle[1])
        self._kept = []
        torch.cuda.synchronize()


def _copied(start: int, end: int) -> tuple[int, Tensor]:
    copy = torch.empty(end - start, dtype=torch.uint8)
    cumem.libcudart.cudaMemcpy(copy.data_ptr(), start, end - start)
    return start, copy
