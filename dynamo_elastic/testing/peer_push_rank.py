"""One end of weight transfers, driven from outside: an arena, agents, and pushes of its share.

Run as a process it serves calls on the socket that it is given, with memory on the GPU (`cuda`) or
on the host (`cpu`):

    python -m dynamo_elastic.testing.peer_push_rank DESCRIPTOR cuda|cpu
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dynamo_elastic.comm.base import MemoryKind, Span, TransferAgent
from dynamo_elastic.comm.peer_push import CopyEngine, PeerAgent
from dynamo_elastic.comm.tensor_digest import digest
from dynamo_elastic.comm.transfer_plan import plan_dense
from dynamo_elastic.comm.weights import Destination, Limits, push
from dynamo_elastic.testing.expert_buffer_rank import serve
from dynamo_elastic.testing.peer_push import HostCopyEngine, HostSharedArena
from dynamo_elastic.types import Region, SharedChunk, WorkerId

_FILL_AT_ONCE = 1 << 26


class PushRank:
    """Operations of one end; arguments and results are what JSON can hold."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._arena: Any = None
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._span = Span(0, 0)
        self._agents: dict[str, TransferAgent] = {}

    def arena(self, size_bytes: int, chunk_bytes: int) -> None:
        """Own memory that peers can map."""
        if self._device == "cpu":
            self._arena = HostSharedArena(size_bytes, chunk_bytes)
            self._use(self._arena.span, torch.frombuffer(self._arena.view(), dtype=torch.uint8))
            return
        from dynamo_elastic.memory.cuda_vmm import CudaVmm
        from dynamo_elastic.memory.vmm import VmmArena

        region = Region("all", 0, size_bytes)
        self._arena = VmmArena([region], CudaVmm(), chunk_bytes=chunk_bytes)
        whole = self._arena.tensor(region, torch.uint8, [size_bytes])
        self._use(Span(self._arena.address, size_bytes), whole)

    def malloc(self, size_bytes: int) -> None:
        """Own memory of torch's allocator, as NIXL needs it."""
        memory = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        self._use(Span(memory.data_ptr(), size_bytes), memory)

    def _use(self, span: Span, memory: torch.Tensor) -> None:
        self._span, self._memory = span, memory

    def free(self) -> None:
        """Close all agents and give the memory back."""
        for agent in self._agents.values():
            agent.close()
        self._agents.clear()
        self._memory = torch.empty(0, dtype=torch.uint8)
        if self._arena is not None:
            self._arena.close()
            self._arena = None
        if self._device != "cpu":
            torch.cuda.empty_cache()

    def peer_agent(self, name: str, folder: str) -> str:
        """An agent that pushes into mapped arenas; its metadata."""
        agent = PeerAgent(name, self._engine(), Path(folder))
        agent.register(self._span)
        if self._arena is not None:
            agent.offer(self._span, self._arena.export_chunks())
        self._agents["peer"] = agent
        return agent.metadata().hex()

    def _engine(self) -> CopyEngine:
        if self._device == "cpu":
            return HostCopyEngine()
        from dynamo_elastic.comm.cuda_copy import CudaCopyEngine
        from dynamo_elastic.memory.cuda_vmm import CudaVmm
        from dynamo_elastic.memory.vmm import ImportedArena

        def mapper(chunks: Sequence[SharedChunk]) -> ImportedArena:
            return ImportedArena(chunks, CudaVmm())

        return CudaCopyEngine(mapper)

    def nixl_agent(self, name: str) -> str:
        """An agent of NIXL, with the memory registered; its metadata."""
        from dynamo_elastic.comm.nixl_agent import NixlAgent

        agent = NixlAgent(name)
        agent.register(self._span, self._kind)
        self._agents["nixl"] = agent
        return agent.metadata().hex()

    @property
    def _kind(self) -> MemoryKind:
        return MemoryKind.DRAM if self._device == "cpu" else MemoryKind.VRAM

    def add(self, agent: str, metadata: str) -> str:
        return self._agents[agent].add_remote(bytes.fromhex(metadata))

    def remove(self, agent: str, name: str) -> None:
        self._agents[agent].remove_remote(name)

    def mapped_by(self) -> list[str]:
        agent = self._agents["peer"]
        return sorted(agent.mapped_by) if isinstance(agent, PeerAgent) else []

    def address(self) -> int:
        return self._span.address

    def push(
        self,
        agent: str,
        me: str,
        sources: Sequence[str],
        targets: Mapping[str, int],
        limits: Mapping[str, float],
        chunk_bytes: int,
    ) -> dict[str, float]:
        """Our share of everything to all `targets`: name of an added agent -> its address."""
        size_bytes = self._span.size_bytes
        joiners = [WorkerId(name) for name in targets]
        plan = plan_dense(
            [Region("all", 0, size_bytes)],
            [WorkerId(s) for s in sources],
            joiners,
            chunk_bytes=chunk_bytes,
        )
        mine = [chunk for chunk in plan if chunk.source == me]
        there = {
            joiner: Destination(joiner, Span(targets[joiner], size_bytes)) for joiner in joiners
        }
        window_bytes = int(limits["window_bytes"])
        rest = {name: value for name, value in limits.items() if name != "window_bytes"}
        self._sync()
        begin = time.perf_counter()
        moved = push(
            self._agents[agent], mine, self._span, there, self._kind, Limits(window_bytes, **rest)
        )
        return {"bytes": moved, "seconds": time.perf_counter() - begin}

    def fill(self, seed: int) -> None:
        """A pattern in which no two places agree for long."""
        words = self._memory.view(torch.int32)
        for first in range(0, words.numel(), _FILL_AT_ONCE):
            part = words[first : first + _FILL_AT_ONCE]
            part.copy_(self._pattern(first, part.numel(), seed))
        self._sync()

    def poison(self) -> None:
        self._memory.fill_(0xA5)
        self._sync()

    def wrong_bytes(self, seed: int) -> int:
        """How many bytes are in words that differ from the pattern."""
        words, wrong = self._memory.view(torch.int32), 0
        for first in range(0, words.numel(), _FILL_AT_ONCE):
            part = words[first : first + _FILL_AT_ONCE]
            wrong += int((part != self._pattern(first, part.numel(), seed)).sum())
        return 4 * wrong

    def _pattern(self, first: int, count: int, seed: int) -> torch.Tensor:
        numbers = torch.arange(first, first + count, device=self._device, dtype=torch.int64)
        return ((numbers * 2654435761 + seed * 40503) >> 7).to(torch.int32)

    def digest(self) -> dict[str, Any]:
        """The digest of all memory, and the seconds that it took."""
        self._sync()
        begin = time.perf_counter()
        value = digest(self._memory)
        return {"digest": value, "seconds": time.perf_counter() - begin}

    def flip(self, offset: int) -> None:
        """Change one bit of one byte."""
        self._memory[offset] ^= 1
        self._sync()

    def _sync(self) -> None:
        if self._device != "cpu":
            torch.cuda.synchronize()


def main() -> None:
    if sys.argv[2] == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
    serve(PushRank(sys.argv[2]), socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
