"""NIXL EP behind ExpertBuffer: the only importer of nixl_ep. Its errors become ours here.

Import it in an engine that has a GPU only: the package needs the driver's library.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

import nixl_ep_cu13 as nixl_ep
import torch

from dynamo_elastic.comm.base import Dispatched, Span
from dynamo_elastic.comm.expert_rules import (
    IPC_CACHE_VARIABLE,
    BufferShape,
    PeerBook,
    PeerState,
)
from dynamo_elastic.comm.fresh_blocks import DriverHeap, fresh_blocks
from dynamo_elastic.comm.ucx_namespaces import correct_namespaces
from dynamo_elastic.errors import PeerUnreachable, ResourceMissing
from dynamo_elastic.failpoints import failpoint
from dynamo_elastic.types import Rank

log = logging.getLogger(__name__)

_OFF = frozenset({"n", "no", "off", "0"})
_abandoned: list[Any] = []
"""Native buffers in which a connect never returned: to destroy them would pull their memory from
under it. They go with the process."""


def abandoned() -> int:
    """Buffers of this process that can't be given back any more: it can't be saved with them."""
    return len(_abandoned)


class NixlExpertBuffer:
    """An ExpertBuffer (see comm.base) of `rank` on the current CUDA device; every peer has its own.

    Takes about 15 ms, a second in a process that has made none before. Raises ConfigError if the
    shape can't be had, and ResourceMissing if UCX's cache of IPC mappings is on, or if UCX can't be
    told where a restored process is.
    """

    def __init__(self, shape: BufferShape, rank: Rank) -> None:
        self._book = PeerBook(shape, rank)
        if os.environ.get(IPC_CACHE_VARIABLE, "y").lower() not in _OFF:
            raise ResourceMissing(
                "UCX's cache of CUDA IPC mappings is on",
                remedy=f"set {IPC_CACHE_VARIABLE}=n before the engine starts",
            )
        correct_namespaces()
        self._shape = shape
        self._rank = rank
        self._device = torch.cuda.current_device()
        self._connecting: threading.Thread | None = None
        size_bytes = nixl_ep.Buffer.get_low_latency_buffer_size_hint(
            shape.max_tokens, shape.hidden, shape.capacity, shape.experts
        )
        with fresh_blocks(DriverHeap(self._device)):
            self._native: Any = nixl_ep.Buffer(
                rank=rank, explicitly_destroy=True, timeout_ms=shape.timeout_ms
            )
            self._native.update_memory_buffers(shape.capacity, shape.experts_per_rank, size_bytes)
        base = self._native.get_local_buffer_tensor(torch.uint8, use_rdma_buffer=True)
        self._memory = Span(base.data_ptr(), size_bytes, self._device)
        self._mask = torch.zeros(shape.capacity, dtype=torch.int32, device="cuda")
        failpoint("buffer.made")

    @property
    def rank(self) -> Rank:
        return self._rank

    @property
    def shape(self) -> BufferShape:
        return self._shape

    @property
    def states(self) -> Mapping[Rank, PeerState]:
        return self._book.states

    @property
    def can_connect(self) -> bool:
        return not self._book.sealed

    @property
    def can_disconnect(self) -> bool:
        return not self._book.spent

    @property
    def parity(self) -> int:
        return self._book.parity

    @property
    def memory(self) -> Span:
        return self._memory

    @property
    def topk_dtype(self) -> torch.dtype:
        dtype: torch.dtype = nixl_ep.topk_idx_t
        return dtype

    def metadata(self) -> bytes:
        self._book.require_usable()
        return bytes(self._native.runtime.get_local_metadata())

    def connect(self, peers: Mapping[Rank, bytes], *, timeout_s: float) -> None:
        """As in ExpertBuffer. NIXL EP waits for a peer without end, but lets other threads run
        meanwhile (from 1.5.1 on), so it waits in one that is left behind at the deadline."""
        if not peers:
            return
        self._book.connecting(peers)
        failpoint("buffer.before_connect")
        failure = self._beside(lambda: self._connect(peers), timeout_s)
        if failure is None:
            self._book.move(peers, PeerState.CONNECTED)
            failpoint("buffer.connected")
            return
        self._book.move(peers, PeerState.BROKEN)
        if isinstance(failure, TimeoutError):
            self._book.spend("a connect never returned")
        else:
            # NIXL keeps half of what it has loaded, and then refuses whoever has the same rank
            # (docs/findings.md, section 17).
            self._book.seal("a connect failed")
        raise PeerUnreachable(sorted(peers), str(failure)) from failure

    def _connect(self, peers: Mapping[Rank, bytes]) -> None:
        self._native.runtime.connect_ranks(list(peers), list(peers.values()), activate=False)

    def _beside(self, act: Callable[[], None], timeout_s: float) -> Exception | None:
        """Run `act` in a thread; what it raised, or TimeoutError if it has not ended in time."""
        failure: list[Exception] = []

        def run() -> None:
            try:
                torch.cuda.set_device(self._device)
                act()
            except RuntimeError as exc:  # what the bindings make of every NIXL and UCX error
                failure.append(exc)

        self._connecting = threading.Thread(target=run, name="expert-connect", daemon=True)
        self._connecting.start()
        self._connecting.join(timeout_s)
        if self._connecting.is_alive():
            return TimeoutError(f"no answer in {timeout_s} s")
        self._connecting = None
        return failure[0] if failure else None

    def activate(self, ranks: Collection[Rank]) -> None:
        failpoint("buffer.before_activate")
        self._book.switching(ranks, PeerState.ACTIVE, "activate")
        for rank in ranks:
            self._native.update_mask_buffer(rank, False)

    def deactivate(self, ranks: Collection[Rank]) -> None:
        failpoint("buffer.before_deactivate")
        self._book.switching(ranks, PeerState.CONNECTED, "deactivate")
        for rank in ranks:
            self._native.update_mask_buffer(rank, True)

    def disconnect(self, ranks: Collection[Rank]) -> None:
        failpoint("buffer.before_disconnect")
        broken = self._book.ranks(PeerState.BROKEN).intersection(ranks)
        self._book.switching(ranks, PeerState.ABSENT, "disconnect")
        if whole := [rank for rank in ranks if rank not in broken]:
            self._native.disconnect_ranks(whole)
        for rank in broken:
            # How much of it is connected depends on where its connect failed; if nothing, NIXL EP
            # refuses.
            with suppress(RuntimeError):
                self._native.disconnect_ranks([rank])

    def masked(self) -> frozenset[Rank]:
        self._book.require_usable()
        # NIXL EP marks a rank that is out with 1, and with -1 one that never was connected.
        self._native.query_mask_buffer(self._mask)
        out = {Rank(rank) for rank, mark in enumerate(self._mask.tolist()) if mark}
        self._book.timed_out(out & self._book.ranks(PeerState.ACTIVE))
        return self._book.ranks(PeerState.TIMED_OUT)

    def dispatch(self, x: torch.Tensor, topk_ids: torch.Tensor) -> Dispatched:
        self._book.check_tokens(x, topk_ids, self.topk_dtype)
        self._book.dispatching()
        # Without a fixed number of experts the layout would follow the ranks that are active, and
        # graphs, and ranks that switch at different moments, would disagree about it.
        tokens, counts, handle, _, _ = self._native.low_latency_dispatch(
            x, topk_ids, self._shape.max_tokens, self._shape.experts, use_fp8=False
        )
        return Dispatched(tokens, counts, handle)

    def staging(self, dispatched: Dispatched) -> torch.Tensor:
        self._book.require_usable()
        memory: torch.Tensor = self._native.get_next_combine_buffer(dispatched.handle)
        return memory

    def combine(
        self,
        results: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        dispatched: Dispatched,
        *,
        out: torch.Tensor,
        staged: bool = False,
    ) -> None:
        self._book.combining()
        # Of staged results it wants the shape alone, of a tensor without the gaps of staging().
        given = dispatched.tokens if staged else results
        self._native.low_latency_combine(
            given, topk_ids, topk_weights, dispatched.handle, zero_copy=staged, out=out
        )

    def destroy(self, *, released_by: Collection[Rank]) -> None:
        if self._native is None:
            return
        failpoint("buffer.before_destroy")
        self._book.destroying(released_by)
        native, self._native = self._native, None
        if self._connecting is not None and self._connecting.is_alive():
            _abandoned.append(native)
            log.warning("an expert buffer is left behind: a connect of it never returned")
            return
        native.destroy()
        torch.cuda.synchronize()
