"""An engine on a GPU: bf16 weights in memory that no snapshot holds, NIXL EP, CUDA graphs.

Imported in an engine process that has a GPU alone: it needs the driver's library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dynamo_elastic.comm.base import MemoryKind, Span, TransferAgent
from dynamo_elastic.comm.cuda_copy import CudaCopyEngine
from dynamo_elastic.comm.expert_rules import check_shape
from dynamo_elastic.comm.nixl_ep import NixlExpertBuffer, abandoned
from dynamo_elastic.comm.peer_push import PeerAgent
from dynamo_elastic.comm.tensor_digest import digest, digest_all
from dynamo_elastic.engine.launch import EngineSettings
from dynamo_elastic.engine.reference.device import Executor
from dynamo_elastic.engine.reference.experts import LocalExperts
from dynamo_elastic.engine.reference.gpu_experts import stack_experts
from dynamo_elastic.engine.reference.gpu_graphs import StepGraphs
from dynamo_elastic.engine.reference.gpu_shape import buffer_shape
from dynamo_elastic.engine.reference.gpu_steps import GpuExecutor, empty_table, tile_sizes
from dynamo_elastic.engine.reference.kv import KvCache
from dynamo_elastic.engine.reference.model import Model, Weights
from dynamo_elastic.engine.shape import read_shape
from dynamo_elastic.errors import EngineError
from dynamo_elastic.memory.cuda_vmm import CudaVmm
from dynamo_elastic.memory.vmm import ImportedArena, VmmArena
from dynamo_elastic.types import Incarnation, Rank, Region, SharedChunk

_PATTERN = 1 << 20
"""Numbers after which fill() begins again."""


class GpuStore:
    """Memory of the current GPU that can be given back before a snapshot, bf16."""

    dtype = torch.bfloat16
    kind = MemoryKind.VRAM

    def __init__(self, driver: CudaVmm, beside: torch.cuda.Stream) -> None:
        """Digests are taken on the stream `beside`."""
        self._driver = driver
        self._beside = beside
        self.device = torch.device("cuda", torch.cuda.current_device())

    def arena(self, regions: Sequence[Region]) -> VmmArena:
        return VmmArena(regions, self._driver, device=self.device.index)

    def digests(self, data: Sequence[Tensor]) -> list[str]:
        """As in Store: after what this thread has launched before, and beside the steps; in turn
        with them, each digest would wait for one."""
        if not data:
            return []
        self._beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._beside):
            return digest_all(data)


class GpuDevice:
    """A Device (see device.py) on the current GPU. Raises ConfigError if the model or the settings
    don't fit NIXL EP, ResourceMissing without a GPU."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._shape = buffer_shape(settings, read_shape(settings.model))
        self._seat = Rank(settings.slot)
        check_shape(self._shape, self._seat)
        self._driver = CudaVmm()
        self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.store = GpuStore(self._driver, self._side)
        self._graphs: StepGraphs | None = None
        self._table: Tensor | None = None
        self._imported: list[ImportedArena] = []

    def agent(self, incarnation: Incarnation, weights: Weights) -> TransferAgent:
        arena = weights.arena
        if not isinstance(arena, VmmArena):
            raise EngineError("weights that are not in a VMM arena can't be offered to peers")
        device = self.store.device.index
        engine = CudaCopyEngine(lambda chunks: self._map(chunks, device))
        agent = PeerAgent(incarnation, engine, self._settings.control_dir)
        agent.offer(Span(arena.address, arena.size_bytes, device), arena.export_chunks())
        return agent

    def _map(self, chunks: Sequence[SharedChunk], device: int) -> ImportedArena:
        arena = ImportedArena(chunks, self._driver, device=device)
        self._imported = [*(a for a in self._imported if a.mapped), arena]
        return arena

    def held(self) -> dict[str, int]:
        # A buffer that could not be given back has its peers' memory mapped.
        imports = sum(arena.mapped for arena in self._imported) + abandoned()
        return {"multicast": 0, "ipc_imports": imports, "managed_bytes": 0}

    @property
    def kernels(self) -> Mapping[str, str]:
        return {} if self._graphs is None else self._graphs.kernels

    def warm_up(self) -> None:
        """The digest's kernel is compiled, which takes a second; the copy engine needs nothing."""
        digest(torch.zeros(8, dtype=torch.int64, device=self.store.device))

    def executor(self, model: Model, cache: KvCache, local: LocalExperts) -> Executor:
        fill(model.weights)
        graphs, table = self._parts(model, cache)
        beside = torch.cuda.stream(self._side)
        return GpuExecutor(self._make_buffer, graphs, table, model.tile, beside)

    def _make_buffer(self) -> NixlExpertBuffer:
        return NixlExpertBuffer(self._shape, self._seat)

    def _parts(self, model: Model, cache: KvCache) -> tuple[StepGraphs, Tensor]:
        if self._graphs is None or self._table is None:
            rows = model.tile.batch_tokens
            self._table = empty_table(rows, model.shape.num_experts, self.store.device)
            stacks = stack_experts(model.weights)
            sizes = tile_sizes(rows)
            self._graphs = StepGraphs(model, cache, stacks, self._table, sizes)
        return self._graphs, self._table


def fill(weights: Weights) -> None:
    """Small numbers everywhere: memory that was just mapped may hold anything."""
    end = max(r.offset + r.size_bytes for r in weights.arena.regions)
    whole = weights.arena.tensor(Region("all", 0, end), torch.uint8, (end,))
    numbers = whole[: end // 2 * 2].view(weights.store.dtype)
    pattern = ((torch.arange(_PATTERN, device=whole.device) % 127 - 63) / 1024).to(numbers.dtype)
    count = len(numbers) // _PATTERN * _PATTERN
    numbers[:count].view(-1, _PATTERN).copy_(pattern)
    numbers[count:].copy_(pattern[: len(numbers) - count])
