"""A NIXL EP rank's Buffer and its steps.

Every expert multiplies by its number plus one, so lost tokens show in the result.
"""

from __future__ import annotations

import base64
import time
from typing import Any

import graph_patch
import nixl_ep_cu13 as nixl_ep
import torch
from cuda.bindings import driver

EXPERTS_PER_RANK, TOKENS, HIDDEN, TOP_K = 4, 64, 2048, 4
TAIL_BYTES = 2 << 20  # memory of the Buffer that no kernel uses: what the copy and fill nodes write
BAD_TOKEN = 0.02  # relative error; bf16 rounding stays under 0.005


class EpSteps:
    """Operations the driver may ask for."""

    def __init__(self) -> None:
        self.buffer: Any = None
        self.rank = self.max_ranks = 0
        self.timeout_ms = 4000
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.buffer_bytes = 0
        self.decoys: list[Any] = []

    # -- life of the Buffer --------------------------------------------------------------------
    def open(self, rank: int, max_ranks: int, timeout_ms: int = 4000) -> dict[str, Any]:
        """First Buffer and the tensors that every step uses; their addresses never change."""
        self.max_ranks, self.timeout_ms = max_ranks, timeout_ms
        torch.manual_seed(100 + rank)
        self.x = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16)
        self.routes = torch.zeros(TOKENS, TOP_K, device="cuda", dtype=nixl_ep.topk_idx_t)
        self.weights = torch.full((TOKENS, TOP_K), 1 / TOP_K, device="cuda")
        self.scales = torch.zeros(EXPERTS_PER_RANK, 1, 1, device="cuda", dtype=torch.bfloat16)
        self.out = torch.zeros(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16)
        self.pattern = torch.full((4096,), 9, device="cuda", dtype=torch.uint8)
        self.side = torch.cuda.Stream()
        return self.fresh(rank)

    def fresh(self, rank: int, timeout_ms: int | None = None) -> dict[str, Any]:
        """A new Buffer for `rank`; the old one must be gone."""
        begin = time.perf_counter()
        self.rank, self.timeout_ms = rank, timeout_ms or self.timeout_ms
        buffer = nixl_ep.Buffer(rank=rank, explicitly_destroy=True, timeout_ms=self.timeout_ms)
        experts = self.max_ranks * EXPERTS_PER_RANK
        size = (
            buffer.get_low_latency_buffer_size_hint(TOKENS, HIDDEN, self.max_ranks, experts)
            + TAIL_BYTES
        )
        buffer.update_memory_buffers(self.max_ranks, EXPERTS_PER_RANK, size)
        seconds = time.perf_counter() - begin
        self.buffer, self.buffer_bytes = buffer, size
        self.scales.copy_(
            (torch.arange(EXPERTS_PER_RANK) + 1 + rank * EXPERTS_PER_RANK).view(-1, 1, 1)
        )
        torch.cuda.synchronize()
        return {"buffer_s": seconds, "address": hex(self._memory().data_ptr()), "bytes": size}

    def drop(self) -> float:
        """Destroy the Buffer and everything NIXL holds."""
        begin = time.perf_counter()
        self.buffer.destroy()
        self.buffer = None
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    def occupy(self, count: int = 4) -> int:
        """Allocate blocks of the Buffer's sizes, so that the next one gets other addresses."""
        for size in (self.buffer_bytes, 32 << 20, 2 << 20) * count:
            self.decoys.append(graph_patch.check(driver.cuMemAlloc(size)))
        return len(self.decoys)

    def metadata(self) -> str:
        """Agent metadata, for the peers."""
        return base64.b64encode(self.buffer.runtime.get_local_metadata()).decode()

    def connect(self, ranks: list[int], blobs: list[str], activate: bool = False) -> float:
        """Connect to peers by metadata that the driver carried, without a store."""
        begin = time.perf_counter()
        decoded = [base64.b64decode(blob) for blob in blobs]
        self.buffer.runtime.connect_ranks(ranks, decoded, activate=activate)
        return time.perf_counter() - begin

    def disconnect(self, ranks: list[int]) -> float:
        """Unmap peers."""
        begin = time.perf_counter()
        self.buffer.disconnect_ranks(ranks)
        return time.perf_counter() - begin

    def set_masks(self, ranks: list[int], masked: bool) -> float:
        """Mask or unmask peers."""
        begin = time.perf_counter()
        for rank in ranks:
            self.buffer.update_mask_buffer(rank, masked)
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    def masks(self) -> list[int]:
        """1 for every rank left out; the device itself writes -1 for one never connected."""
        status = torch.zeros(self.max_ranks, device="cuda", dtype=torch.int)
        self.buffer.query_mask_buffer(status)
        torch.cuda.synchronize()
        return [int(flag != 0) for flag in status.tolist()]

    # -- steps ---------------------------------------------------------------------------------
    def route(self, world: list[int], seed: int = 7) -> None:
        """Random experts of the given ranks for every token, in a tensor that the graphs read."""
        generator = torch.Generator().manual_seed(seed * 1000 + self.rank)
        experts = torch.tensor(
            [rank * EXPERTS_PER_RANK + i for rank in world for i in range(EXPERTS_PER_RANK)]
        )
        picks = [
            experts[torch.randperm(len(experts), generator=generator)[:TOP_K]]
            for _ in range(TOKENS)
        ]
        self.routes.copy_(torch.stack(picks).to(self.routes.dtype))
        torch.cuda.synchronize()

    def _memory(self) -> torch.Tensor:
        memory: torch.Tensor = self.buffer.get_local_buffer_tensor(
            torch.uint8, use_rdma_buffer=True
        )
        return memory

    def _forward(self, extras: bool = False) -> None:
        """Dispatch, experts, combine; extras add copies and fills of Buffer memory."""
        experts = self.max_ranks * EXPERTS_PER_RANK
        received, _, handle, _, _ = self.buffer.low_latency_dispatch(
            self.x, self.routes, TOKENS, experts, use_fp8=False
        )
        result = received * self.scales
        if extras:
            self.buffer.get_next_combine_buffer(handle).copy_(result)
            tail = self._memory()[self.buffer_bytes - TAIL_BYTES :]
            stream = torch.cuda.current_stream().cuda_stream
            graph_patch.check(driver.cuMemsetD8Async(tail.data_ptr(), 0, 4096, stream))
            tail[8192 : 8192 + 4096].copy_(self.pattern)
        self.buffer.low_latency_combine(
            result, self.routes, self.weights, handle, zero_copy=extras, out=self.out
        )

    def eager(self, count: int = 2) -> float:
        """Steps without a graph; an even count keeps the ranks' double buffers in step."""
        self.out.zero_()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            self._forward()
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    def half_step(self) -> float:
        """Dispatch without a combine: where a rank stands that stops in the middle of a layer."""
        begin = time.perf_counter()
        experts = self.max_ranks * EXPERTS_PER_RANK
        self.received, _, self.handle, _, _ = self.buffer.low_latency_dispatch(
            self.x, self.routes, TOKENS, experts, use_fp8=False
        )
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    def second_half(self) -> float:
        """The combine that belongs to half_step."""
        begin = time.perf_counter()
        result = self.received * self.scales
        self.buffer.low_latency_combine(
            result, self.routes, self.weights, self.handle, out=self.out
        )
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    def phase(self, name: str) -> float:
        """A quarter of a step, in which no kernel waits: ranks that share a GPU take turns."""
        begin = time.perf_counter()
        experts = self.max_ranks * EXPERTS_PER_RANK
        if name == "dispatch_send":
            self.out.zero_()
            self.received, _, self.handle, _, self.hook = self.buffer.low_latency_dispatch(
                self.x, self.routes, TOKENS, experts, use_fp8=False, return_recv_hook=True
            )
        elif name == "combine_send":
            self.result = self.received * self.scales
            _, _, self.hook = self.buffer.low_latency_combine(
                self.result,
                self.routes,
                self.weights,
                self.handle,
                return_recv_hook=True,
                out=self.out,
            )
        else:
            self.hook()
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    def queue(self, count: int) -> float:
        """Launch replays without waiting: traffic for the calls that follow."""
        begin = time.perf_counter()
        for _ in range(count):
            self.graphs[0].replay()
        return time.perf_counter() - begin

    def replay(self, count: int = 1, index: int = 0) -> float:
        """Replay one graph `count` times; returns seconds per replay."""
        self.out.zero_()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            self.graphs[index].replay()
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / count

    def watched_step(self, layers: int = 1) -> dict[str, Any]:
        """Eager layers, with the mask read from another stream all the while."""
        self.out.zero_()
        status = torch.zeros(self.max_ranks, device="cuda", dtype=torch.int)
        torch.cuda.synchronize()
        before, first_seen_s = self.masks(), None
        begin = time.perf_counter()
        for _ in range(layers):
            self._forward()
        done = torch.cuda.Event()
        done.record()
        while not done.query():
            with torch.cuda.stream(self.side):
                self.buffer.query_mask_buffer(status)
                now = [int(flag != 0) for flag in status.cpu().tolist()]
            if now != before and first_seen_s is None:
                first_seen_s = time.perf_counter() - begin
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        return {"step_s": seconds, "mask_seen_s": first_seen_s, "masks": self.masks()}

    def check(self, active: list[int]) -> dict[str, Any]:
        """Compare `out` with what the active ranks' experts must give."""
        experts = self.routes.cpu().long()
        owner = experts // EXPERTS_PER_RANK
        alive = torch.isin(owner, torch.tensor(active))
        factor = ((experts + 1).float() * alive / TOP_K).sum(1).cuda()
        expected = self.x.float() * factor[:, None]
        difference = (self.out.float() - expected).norm(dim=1)
        relative = difference / expected.norm(dim=1).clamp_min(1e-6)
        overall = float(difference.norm() / expected.norm().clamp_min(1e-6))
        return {"error": overall, "bad_tokens": int((relative > BAD_TOKEN).sum()), "tokens": TOKENS}
