"""A warm process without NIXL: a CUDA graph, host memory of a chosen size, and NCCL on demand."""

from __future__ import annotations

import datetime
import sys
import time
from pathlib import Path
from typing import Any

import rank_process
import torch
import torch.distributed as dist

PAGE = 4096


class PlainRank:
    """Operations the driver may ask for."""

    def __init__(self) -> None:
        self.ballast = torch.empty(0, dtype=torch.uint8)
        self.block = torch.empty(0, dtype=torch.uint8)

    def warm(self, ballast_bytes: int = 0) -> dict[str, float]:
        """Context, a graph, and host memory that no compression or zero page makes small."""
        begin = time.perf_counter()
        self.x = torch.ones(1 << 20, device="cuda")
        self.out = torch.zeros(1 << 20, device="cuda")
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out.copy_(self.x * 2 + 1)
        self.block = torch.randint(0, 255, (16 << 20,), dtype=torch.uint8)
        copies = ballast_bytes // self.block.numel()
        self.ballast = torch.empty(copies * self.block.numel(), dtype=torch.uint8)
        if copies:
            self.ballast.view(copies, -1).copy_(self.block.expand(copies, -1))
        return {"warm_s": time.perf_counter() - begin}

    def step(self) -> float:
        """Replay the graph; the sum says whether the device is right."""
        self.out.zero_()
        self.graph.replay()
        torch.cuda.synchronize()
        return float(self.out.sum()) / self.out.numel()

    def touch(self) -> dict[str, Any]:
        """Read every page of the ballast and compare it: the time to have all pages in."""
        begin = time.perf_counter()
        same = True
        if self.ballast.numel():
            rows = self.ballast.view(-1, self.block.numel())
            same = all(bool((row[::PAGE] == self.block[::PAGE]).all()) for row in rows)
        return {"touch_s": time.perf_counter() - begin, "same": same}

    def join(self, path: str, rank: int, world: int, timeout_s: int = 40) -> dict[str, Any]:
        """A new NCCL communicator over a file store, proven by one all-reduce."""
        begin = time.perf_counter()
        dist.init_process_group(
            "nccl",
            store=dist.FileStore(path, world),
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=timeout_s),
            device_id=torch.device("cuda", 0),
        )
        init_s = time.perf_counter() - begin
        total = torch.full((1 << 22,), float(rank + 1), device="cuda")
        dist.all_reduce(total)
        torch.cuda.synchronize()
        first_s = time.perf_counter() - begin
        begin = time.perf_counter()
        for _ in range(20):
            dist.all_reduce(total)
        torch.cuda.synchronize()
        each_s = (time.perf_counter() - begin) / 20
        value = float(total[0])
        wanted = world * (world + 1) / 2 * world**20
        return {
            "init_s": init_s,
            "first_all_reduce_s": first_s,
            "gbps": total.numel() * 4 / each_s / 1e9,
            "right": abs(value / wanted - 1) < 1e-5 and bool((total == total[0]).all()),
        }

    def leave(self) -> float:
        """Destroy the communicator."""
        begin = time.perf_counter()
        torch.cuda.synchronize()
        dist.destroy_process_group()
        return time.perf_counter() - begin


if __name__ == "__main__":
    torch.cuda.init()
    rank_process.serve(PlainRank(), Path(sys.argv[1]))
