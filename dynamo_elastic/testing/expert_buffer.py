"""An ExpertBuffer without a GPU: ranks are threads of one process, and the rules are the same."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch

from dynamo_elastic.comm.base import Dispatched, Span
from dynamo_elastic.comm.expert_rules import BufferShape, PeerBook, PeerState
from dynamo_elastic.errors import PeerUnreachable
from dynamo_elastic.types import Rank

_FIRST_ADDRESS = 0x7F00_0000_0000
_SPACING = 1 << 32
_HEADER = 8


@dataclass
class FakeExpertWorld:
    """What connects the FakeExpertBuffers of one test. Buffers are told apart by a serial number,
    which is their metadata."""

    buffers: dict[int, FakeExpertBuffer] = field(default_factory=dict)
    """Those that are alive."""
    changed: threading.Condition = field(default_factory=threading.Condition)
    calls: set[tuple[int, int]] = field(default_factory=set)
    """(caller, callee) of connects that the callee has not answered by one of its own."""
    mail: dict[tuple[int, int], deque[tuple[str, int, Any]]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    """(sender, receiver) -> what it sent: dispatch or combine, half of the buffer, content."""
    silent: set[tuple[int, int]] = field(default_factory=set)
    """(buffer, caller) of connects that are never answered, for tests that can't wait so long."""
    serials: count[int] = field(default_factory=lambda: count(1))

    def make(self, shape: BufferShape, rank: Rank) -> FakeExpertBuffer:
        return FakeExpertBuffer(shape, rank, self)

    def kill(self, rank: Rank) -> None:
        """The process with this rank's buffers is killed."""
        for buffer in [b for b in self.buffers.values() if b.rank == rank]:
            buffer.die()

    def wait(self, condition: Any, timeout_s: float) -> bool:
        """True once `condition()` holds; False at the deadline. `changed` must be held."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0 or not self.changed.wait(remaining_s):
                return bool(condition())
        return True


class FakeExpertBuffer:
    """See comm.base.ExpertBuffer. What would be memory corruption or a fault on GPUs (ranks out of
    step, memory pulled from under a peer) is a RuntimeError here."""

    topk_dtype = torch.int32

    def __init__(self, shape: BufferShape, rank: Rank, world: FakeExpertWorld) -> None:
        self._book = PeerBook(shape, rank)
        self._shape = shape
        self._rank = rank
        self._world = world
        self._serial = next(world.serials)
        self._peers: dict[Rank, int] = {}
        self._staging: torch.Tensor | None = None
        world.buffers[self._serial] = self

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
        return Span(_FIRST_ADDRESS + self._serial * _SPACING, _SPACING // 2)

    def metadata(self) -> bytes:
        self._book.require_usable()
        return str(self._serial).encode()

    def connect(self, peers: Mapping[Rank, bytes], *, timeout_s: float) -> None:
        if not peers:
            return
        self._book.connecting(peers)
        serials = {rank: int(metadata) for rank, metadata in peers.items()}
        world = self._world
        with world.changed:
            gone = [rank for rank, serial in serials.items() if serial not in world.buffers]
            if gone:
                self._book.move(peers, PeerState.BROKEN)
                self._book.seal("a connect failed")
                raise PeerUnreachable(sorted(peers), f"the buffers of {gone} are gone")
            calls = {(self._serial, serial) for serial in serials.values()}
            world.calls |= calls
            world.changed.notify_all()
            answered = {(serial, self._serial) for serial in serials.values()}
            silent = not world.silent.isdisjoint(answered)
            if silent or not world.wait(lambda: answered <= world.calls, timeout_s):
                self._book.move(peers, PeerState.BROKEN)
                self._book.spend("a connect never returned")
                world.calls -= calls
                raise PeerUnreachable(sorted(peers), f"no answer in {timeout_s} s")
            world.calls -= answered
            for rank, serial in serials.items():
                world.mail[serial, self._serial].clear()
                self._peers[rank] = serial
        self._book.move(peers, PeerState.CONNECTED)

    def activate(self, ranks: Collection[Rank]) -> None:
        self._book.switching(ranks, PeerState.ACTIVE, "activate")

    def deactivate(self, ranks: Collection[Rank]) -> None:
        self._book.switching(ranks, PeerState.CONNECTED, "deactivate")

    def disconnect(self, ranks: Collection[Rank]) -> None:
        if not ranks:
            return
        self._book.switching(ranks, PeerState.ABSENT, "disconnect")
        with self._world.changed:
            for rank in ranks:
                self._peers.pop(rank, None)

    def masked(self) -> frozenset[Rank]:
        self._book.require_usable()
        return self._book.ranks(PeerState.TIMED_OUT)

    def dispatch(self, x: torch.Tensor, topk_ids: torch.Tensor) -> Dispatched:
        self._book.check_tokens(x, topk_ids, self.topk_dtype)
        half = self._book.parity
        self._book.dispatching()
        sent = self._exchange("dispatch", half, {None: (x.clone(), topk_ids.clone())})
        shape, first = self._shape, self._rank * self._shape.experts_per_rank
        tokens = torch.zeros(
            shape.experts_per_rank, shape.capacity * shape.max_tokens, shape.hidden
        ).to(torch.bfloat16)
        counts = torch.zeros(shape.experts_per_rank, dtype=torch.int32)
        places: list[tuple[Rank, int, int, int]] = []
        for source, (theirs, ids) in sorted(sent.items()):
            for token, row in enumerate(ids.tolist()):
                for expert in row:
                    local = expert - first
                    if 0 <= local < shape.experts_per_rank:
                        index = int(counts[local])
                        tokens[local, index] = theirs[token]
                        counts[local] += 1
                        places.append((source, token, local, index))
        return Dispatched(tokens, counts, places)

    def staging(self, dispatched: Dispatched) -> torch.Tensor:
        self._book.require_usable()
        if self._staging is None:
            # As NIXL EP's, with a gap for headers behind each row.
            whole = torch.zeros(*dispatched.tokens.shape[:2], self._shape.hidden + _HEADER)
            self._staging = whole.to(torch.bfloat16)[..., : self._shape.hidden]
        return self._staging

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
        half = self._book.parity
        self._book.combining()
        if staged and self._staging is not None:
            results = self._staging
        elif not results.is_contiguous():
            raise RuntimeError("results that are not staged must be contiguous")
        first = self._rank * self._shape.experts_per_rank
        answers: dict[Rank | None, Any] = defaultdict(dict)
        places: Any = dispatched.handle
        for source, token, local, index in places:
            answers[source][token, first + local] = results[local, index].float()
        arrived: dict[tuple[int, int], torch.Tensor] = {}
        for part in self._exchange("combine", half, answers).values():
            arrived |= part
        out.zero_()
        total = torch.zeros(out.shape)
        for token, row in enumerate(topk_ids.tolist()):
            for k, expert in enumerate(row):
                if (token, expert) in arrived:
                    total[token] += topk_weights[token, k] * arrived[token, expert]
        out.copy_(total)

    def _exchange(
        self, kind: str, half: int, contents: Mapping[Rank | None, Any]
    ) -> dict[Rank, Any]:
        """Send each active peer its content (or that of None) and take theirs; own included."""
        active = sorted(self._book.ranks(PeerState.ACTIVE))
        world, timeout_s = self._world, self._shape.timeout_ms / 1000
        everything = contents.get(None)
        received = {self._rank: contents.get(self._rank, everything) or {}}
        with world.changed:
            for rank in active:
                content = contents.get(rank, everything) or {}
                world.mail[self._serial, self._peers[rank]].append((kind, half, content))
            world.changed.notify_all()
            for rank in active:
                inbox = world.mail[self._peers[rank], self._serial]
                if not world.wait(lambda inbox=inbox: inbox, timeout_s):
                    self._book.timed_out([rank])
                    continue
                theirs, their_half, content = inbox.popleft()
                if (theirs, their_half) != (kind, half):
                    raise RuntimeError(
                        f"rank {self._rank} is in {kind} of half {half}, rank {rank} in {theirs} "
                        f"of half {their_half}"
                    )
                received[rank] = content
        return received

    def destroy(self, *, released_by: Collection[Rank]) -> None:
        if self._serial not in self._world.buffers:
            return
        self._book.destroying(released_by)
        with self._world.changed:
            for other in self._world.buffers.values():
                if self._serial in other.mapped_serials and not other.has_given_up(self._rank):
                    raise RuntimeError(
                        f"rank {other.rank} still has the memory of rank {self._rank} mapped"
                    )
            del self._world.buffers[self._serial]

    @property
    def mapped_serials(self) -> frozenset[int]:
        """Buffers of others that this one has mapped."""
        return frozenset(self._peers.values())

    def has_given_up(self, rank: Rank) -> bool:
        """It can't unmap `rank` any more, being spent, and does not step with it."""
        return not self.can_disconnect and self.states[rank] is not PeerState.ACTIVE

    def die(self) -> None:
        """As if the process were killed: gone without a word."""
        with self._world.changed:
            self._world.buffers.pop(self._serial, None)
