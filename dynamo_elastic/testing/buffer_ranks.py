"""Ranks of the GPU engine without a GPU: its steps over FakeExpertBuffers, tiles without graphs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from dynamo_elastic.comm.base import ExpertBuffer
from dynamo_elastic.engine.base import Finish, Output
from dynamo_elastic.engine.launch import EngineSettings
from dynamo_elastic.engine.reference.checkpoint import load_weights
from dynamo_elastic.engine.reference.gpu_experts import BufferExperts, stack_experts
from dynamo_elastic.engine.reference.gpu_group import BufferGroup
from dynamo_elastic.engine.reference.gpu_kernels import PLAIN, Choices, check
from dynamo_elastic.engine.reference.gpu_shape import buffer_shape
from dynamo_elastic.engine.reference.gpu_steps import GpuExecutor, empty_table, tile_sizes
from dynamo_elastic.engine.reference.kv import KvCache
from dynamo_elastic.engine.reference.loop import StepLoop
from dynamo_elastic.engine.reference.membership import Membership
from dynamo_elastic.engine.reference.model import Model, TileSize, Weights
from dynamo_elastic.engine.reference.scheduler import Scheduler
from dynamo_elastic.engine.reference.store import HostStore
from dynamo_elastic.errors import EngineError
from dynamo_elastic.testing.engine_process import SMALL_SHAPE
from dynamo_elastic.testing.expert_buffer import FakeExpertWorld
from dynamo_elastic.topology import Member, Topology
from dynamo_elastic.types import Epoch, Incarnation, Rank, WorkerId

T = TypeVar("T")

BUFFER_MODEL = replace(SMALL_SHAPE, hidden_size=2048, num_hidden_layers=2)
"""The smallest hidden size that NIXL EP has kernels for."""
TILE = TileSize(batch_tokens=16, max_context=32)
_BLOCKS = 16
_TIMEOUT_S = 60.0


class Bf16HostStore(HostStore):
    """Host memory with the numbers of a GPU engine."""

    dtype = torch.bfloat16


class EagerTiles:
    """Tiles (see gpu_steps) that run as they come."""

    def __init__(self, model: Model, cache: KvCache, table: Tensor) -> None:
        self.sizes = tile_sizes(model.tile.batch_tokens)
        self.kernels: Choices = PLAIN
        self.used: list[ExpertBuffer] = []
        """Buffers that they ran over, the last one now."""
        self._model = model
        self._cache = cache
        self._table = table
        self._stacks = stack_experts(model.weights)

    def adopt(self, kernels: Choices) -> None:
        check(kernels)
        self.kernels = kernels

    def use(self, buffer: ExpertBuffer) -> None:
        self.used.append(buffer)

    def run(self, tile: Tensor) -> Tensor:
        buffer = self.used[-1]
        experts = BufferExperts(buffer, self._stacks, self._table, tile, self.kernels)
        return self._model.compute(tile, len(tile), self._cache, experts)


class BufferRank:
    """The engine of one slot, without its process."""

    def __init__(
        self, world: FakeExpertWorld, model_dir: Path, slot: int, held: Sequence[int], slots: int
    ) -> None:
        settings = EngineSettings(
            model_dir, model_dir, slots, TILE.batch_tokens, TILE.max_context, _BLOCKS, 0.2
        )
        settings = replace(settings, slot=slot, capacity=4)
        self.worker_id = WorkerId(f"slot{slot}")
        self.held = (*held, *[-1] * (slots - len(held)))
        self.weights = Weights(BUFFER_MODEL, slots, Bf16HostStore())
        load_weights(model_dir, self.weights, self.held)
        self.outputs: list[Output] = []
        model = Model(self.weights, TILE)
        cache = KvCache(BUFFER_MODEL, _BLOCKS, Bf16HostStore())
        table = empty_table(TILE.batch_tokens, BUFFER_MODEL.num_experts, torch.device("cpu"))
        self.tiles = EagerTiles(model, cache, table)
        shape = buffer_shape(settings, BUFFER_MODEL)
        make = partial(world.make, shape, Rank(slot))
        self.executor = GpuExecutor(make, self.tiles, table, TILE, nullcontext())
        scheduler = Scheduler(TILE, _BLOCKS, BUFFER_MODEL.vocab_size)
        self.loop = StepLoop(self.executor, scheduler, self._emit, peer_timeout_s=_TIMEOUT_S)
        self._said = threading.Condition()
        self._thread = threading.Thread(target=self.loop.run, daemon=True)

    @property
    def member(self) -> Member:
        return Member(self.worker_id, Incarnation(""), self.held)

    @property
    def buffer(self) -> ExpertBuffer:
        """That of its steps."""
        return self.tiles.used[-1]

    def start(self) -> None:
        self._thread.start()

    def do(self, function: Callable[[], T]) -> T:
        """Run `function` between two of this rank's rounds."""
        return self.loop.calls.put(function).result(_TIMEOUT_S)

    def _emit(self, outputs: list[Output]) -> None:
        with self._said:
            self.outputs += outputs
            self._said.notify_all()

    def wait_ended(self, request_id: str) -> Finish | None:
        """Why the request ended, once it has; None at the deadline."""
        with self._said:
            self._said.wait_for(lambda: self._end_of(request_id), _TIMEOUT_S)
            return self._end_of(request_id)

    def wait_tokens(self, request_id: str, count: int) -> None:
        """Return once so many tokens of the request are there, or at the deadline."""
        with self._said:
            self._said.wait_for(lambda: len(self.tokens(request_id)) >= count, _TIMEOUT_S)

    def tokens(self, request_id: str) -> tuple[int, ...]:
        return tuple(t for o in self.outputs if o.request_id == request_id for t in o.tokens)

    def _end_of(self, request_id: str) -> Finish | None:
        ends = [o.finish for o in self.outputs if o.request_id == request_id and o.finish]
        return ends[0] if ends else None

    def let_go(self) -> None:
        """As Epochs does after an operation: of every peer that is in no group any more."""
        memberships = [m for m in (self.loop.current, self.loop.pending) if m is not None]
        self.executor.keep_only([m.group for m in memberships])

    def end(self) -> None:
        """The thread is over; the groups were closed before, which its next round finds out."""
        while self._thread.is_alive():
            with suppress(EngineError):
                self.do(self.loop.detach)
                self._thread.join(_TIMEOUT_S)


class BufferRanks:
    """Ranks that go from epoch to epoch together, each in a thread of its own."""

    def __init__(self) -> None:
        self.epoch = Epoch(0)
        self._ranks: list[BufferRank] = []
        self._groups: list[BufferGroup] = []

    def add(self, rank: BufferRank) -> BufferRank:
        """`rank` runs from now on, until close()."""
        self._ranks.append(rank)
        rank.start()
        return rank

    def switch(self, ranks: Sequence[BufferRank]) -> None:
        """The next epoch has `ranks`, in that order; return once its first step was right."""
        self.prepare(ranks)
        for rank in ranks:
            rank.do(partial(rank.loop.decide, self.epoch))
        for rank in ranks:
            rank.loop.switched(self.epoch).result(_TIMEOUT_S)

    def prepare(self, ranks: Sequence[BufferRank]) -> None:
        """Groups of the next epoch, connected and pending."""
        groups = self._open(ranks)
        for rank, group, future in self._connect(ranks, groups, _TIMEOUT_S):
            future.result(_TIMEOUT_S)
            topology = Topology(self.epoch, tuple(r.member for r in ranks))
            membership = Membership(group, topology, BUFFER_MODEL.num_experts)
            rank.do(partial(rank.loop.set_pending, membership))

    def abort(
        self,
        ranks: Sequence[BufferRank],
        spoil: Callable[[Sequence[BufferGroup]], object],
        *,
        timeout_s: float = _TIMEOUT_S,
    ) -> list[BaseException | None]:
        """The next epoch of `ranks`, whose groups `spoil` was let at before they connect, is
        aborted. Returns what each rank's connect raised."""
        groups = self._open(ranks)
        spoil(groups)
        failures = [
            f.exception(2 * _TIMEOUT_S) for _, _, f in self._connect(ranks, groups, timeout_s)
        ]
        for rank, group in zip(ranks, groups, strict=True):
            group.close()
            rank.do(rank.let_go)
        return failures

    def _open(self, ranks: Sequence[BufferRank]) -> list[BufferGroup]:
        self.epoch = Epoch(self.epoch + 1)
        for rank in ranks:
            rank.do(rank.let_go)  # as every epoch begins
        groups = [
            rank.executor.group(self.epoch, Rank(i), len(ranks)) for i, rank in enumerate(ranks)
        ]
        self._groups += groups
        return groups

    def _connect(
        self, ranks: Sequence[BufferRank], groups: Sequence[BufferGroup], timeout_s: float
    ) -> list[tuple[BufferRank, BufferGroup, Future[None]]]:
        addresses = {group.rank: group.address for group in groups}
        # Between two rounds: unlike a GPU's, the fake's steps count as layers that are open.
        return [
            (rank, group, rank.loop.calls.put(partial(_connect, group, addresses, timeout_s)))
            for rank, group in zip(ranks, groups, strict=True)
        ]

    def close(self) -> None:
        for group in self._groups:
            group.close()
        for rank in self._ranks:
            rank.end()


def _connect(group: BufferGroup, addresses: Mapping[Rank, str], timeout_s: float) -> None:
    others = {rank: address for rank, address in addresses.items() if rank != group.rank}
    group.connect(others, timeout_s=timeout_s)
