"""One rank over an ExpertBuffer, driven from outside: steps whose result shows every lost token.

Expert e multiplies by e + 1, so a token that was lost or went astray changes the result; bf16
rounding is below 0.005. Run as a process it serves calls on the socket that it is given:

    python -m dynamo_elastic.testing.expert_buffer_rank DESCRIPTOR
"""

from __future__ import annotations

import json
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from dynamo_elastic.comm.base import ExpertBuffer
from dynamo_elastic.comm.expert_rules import BufferShape
from dynamo_elastic.types import Rank

BAD_TOKEN = 0.02
"""Relative error of a token that can't be rounding."""
Make = Callable[[BufferShape, Rank], ExpertBuffer]


class ExpertRank:
    """Operations of one rank; arguments and results are what JSON can hold."""

    def __init__(self, make: Make, device: str) -> None:
        self._make = make
        self._device = device
        self._buffer: ExpertBuffer | None = None
        self._shape: BufferShape | None = None
        self._old: list[ExpertBuffer] = []
        self._open_layer: Any = None
        self._graph: Any = None

    def open(self, rank: int, **shape: int) -> float:
        """Build a buffer for `rank`, and once the tensors that steps use; seconds it took. They
        keep their addresses: graphs refer to them."""
        begin = time.perf_counter()
        self._buffer = self._make(BufferShape(**shape), Rank(rank))
        self._sync()
        elapsed_s = time.perf_counter() - begin
        if self._shape != self._buffer.shape:
            self._shape = self._buffer.shape
            self._allocate(self._buffer)
        self._scales.copy_(self._own_experts(rank).view(-1, 1, 1) + 1)
        self.route([rank])
        return elapsed_s

    def open_beside(self) -> float:
        """Build a fresh buffer of the same shape and rank, which is used from now on; the old one
        stays as it is. Seconds it took."""
        old = self.buffer
        elapsed_s = self.open(old.rank, **asdict(old.shape))
        self._old.append(old)
        return elapsed_s

    def destroy_old(self, released_by: Sequence[int]) -> None:
        while self._old:
            self._old.pop().destroy(released_by=[Rank(r) for r in released_by])

    def can_connect(self) -> bool:
        return self.buffer.can_connect

    def can_disconnect(self) -> bool:
        return self.buffer.can_disconnect

    def _allocate(self, buffer: ExpertBuffer) -> None:
        shape, device = buffer.shape, self._device
        count, bf16 = shape.max_tokens, torch.bfloat16
        generator = torch.Generator().manual_seed(100 + buffer.rank)
        self._x = torch.randn(count, shape.hidden, generator=generator).to(device, bf16)
        self._ids = torch.zeros(count, shape.top_k, device=device, dtype=buffer.topk_dtype)
        self._weights = torch.full((count, shape.top_k), 1 / shape.top_k, device=device)
        self._scales = torch.zeros(shape.experts_per_rank, 1, 1, device=device, dtype=bf16)
        self._out = torch.zeros(count, shape.hidden, device=device, dtype=bf16)

    def _own_experts(self, rank: int) -> torch.Tensor:
        per_rank = self.buffer.shape.experts_per_rank
        return torch.arange(rank * per_rank, (rank + 1) * per_rank)

    @property
    def buffer(self) -> ExpertBuffer:
        if self._buffer is None:
            raise RuntimeError("no buffer is open")
        return self._buffer

    def metadata(self) -> str:
        return self.buffer.metadata().hex()

    def connect(self, peers: Mapping[str, str], timeout_s: float) -> float:
        """Connect `peers`: rank -> metadata; seconds it took."""
        begin = time.perf_counter()
        decoded = {Rank(int(rank)): bytes.fromhex(blob) for rank, blob in peers.items()}
        self.buffer.connect(decoded, timeout_s=timeout_s)
        return time.perf_counter() - begin

    def activate(self, ranks: Sequence[int]) -> None:
        self.buffer.activate([Rank(r) for r in ranks])

    def deactivate(self, ranks: Sequence[int]) -> None:
        self.buffer.deactivate([Rank(r) for r in ranks])

    def disconnect(self, ranks: Sequence[int]) -> None:
        self.buffer.disconnect([Rank(r) for r in ranks])

    def destroy(self, released_by: Sequence[int]) -> None:
        self.buffer.destroy(released_by=[Rank(r) for r in released_by])

    def states(self) -> dict[str, str]:
        return {str(rank): state.value for rank, state in self.buffer.states.items()}

    def parity(self) -> int:
        return self.buffer.parity

    def masked(self) -> list[int]:
        return sorted(self.buffer.masked())

    def route(self, world: Sequence[int], seed: int = 7) -> None:
        """Random different experts of the ranks in `world` for every token."""
        shape = self.buffer.shape
        generator = torch.Generator().manual_seed(seed * 1000 + self.buffer.rank)
        experts = torch.cat([self._own_experts(rank) for rank in world])
        picks = torch.stack([torch.randperm(len(experts), generator=generator) for _ in self._x])
        self._ids.fill_(-1)
        count = min(shape.top_k, len(experts))
        self._ids[:, :count] = experts[picks[:, :count]].to(self._ids)

    def layer(self, experts: bool = True) -> None:
        """Dispatch, experts (or none), combine, as an engine launches them."""
        arrived = self.buffer.dispatch(self._x, self._ids)
        results = arrived.tokens * self._scales if experts else arrived.tokens
        self.buffer.combine(results, self._ids, self._weights, arrived, out=self._out)

    def step(self, layers: int = 1, masks: bool = True) -> dict[str, Any]:
        """Layers without a graph; seconds, and who has been masked since."""
        self._sync()
        begin = time.perf_counter()
        for _ in range(layers):
            self.layer()
        self._sync()
        elapsed_s = time.perf_counter() - begin
        return {"step_s": elapsed_s, "masked": self.masked() if masks else []}

    def half_layer(self) -> None:
        """A dispatch without its combine."""
        arrived = self.buffer.dispatch(self._x, self._ids)
        self._open_layer = (arrived, arrived.tokens * self._scales)

    def finish_layer(self) -> None:
        arrived, results = self._open_layer
        self.buffer.combine(results, self._ids, self._weights, arrived, out=self._out)

    def staged_layer(self) -> None:
        """A layer whose results are written straight into the buffer."""
        arrived = self.buffer.dispatch(self._x, self._ids)
        results = arrived.tokens * self._scales
        self.buffer.staging(arrived).copy_(results)
        self.buffer.combine(results, self._ids, self._weights, arrived, out=self._out, staged=True)

    def capture(self, layers: int, experts: bool = True) -> None:
        """One CUDA graph of so many layers, for replay(). All ranks that are active capture at
        the same time, as the layer that warms up is a joint one."""
        self.step(1)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for _ in range(layers):
                self.layer(experts)
        self._sync()

    def memory_bytes(self) -> int:
        return self.buffer.memory.size_bytes

    def replay(self, count: int = 1) -> float:
        """Seconds for one replay of the graph, over `count` of them."""
        self._sync()
        begin = time.perf_counter()
        for _ in range(count):
            self._graph.replay()
        self._sync()
        return (time.perf_counter() - begin) / count

    def check(self, world: Sequence[int]) -> dict[str, float]:
        """The last result against what the experts of the ranks in `world` must give."""
        ids = self._ids.cpu().long()
        per_rank = self.buffer.shape.experts_per_rank
        alive = torch.isin(ids // per_rank, torch.tensor(list(world))) & (ids >= 0)
        factor = ((ids + 1).float() * alive * self._weights.cpu()).sum(1)
        expected = self._x.cpu().float() * factor[:, None]
        difference = (self._out.cpu().float() - expected).norm(dim=1)
        relative = difference / expected.norm(dim=1).clamp_min(1e-6)
        error = float(difference.norm() / expected.norm().clamp_min(1e-6))
        return {"error": error, "bad_tokens": int((relative > BAD_TOKEN).sum())}

    def _sync(self) -> None:
        if self._device != "cpu":
            torch.cuda.synchronize()


def answer(target: object, request: Mapping[str, Any]) -> dict[str, Any]:
    """What the operation returns, or the error that it raised: the rank must survive it."""
    try:
        return {"value": getattr(target, request["op"])(**request["args"])}
    except Exception as exc:  # noqa: BLE001
        kind, trace = type(exc).__name__, traceback.format_exc()[-1500:]
        return {"kind": kind, "message": str(exc)[:600], "trace": trace}


def serve(target: object, connection: socket.socket) -> None:
    """Answer JSON lines until the other end hangs up."""
    with connection, connection.makefile("rw") as lines:
        for line in lines:
            lines.write(json.dumps(answer(target, json.loads(line))) + "\n")
            lines.flush()


def main() -> None:
    from dynamo_elastic.comm.nixl_ep import NixlExpertBuffer

    torch.cuda.init()  # type: ignore[no-untyped-call]
    serve(ExpertRank(NixlExpertBuffer, "cuda"), socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
