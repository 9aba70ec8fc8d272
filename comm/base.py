"""The seams to memory transfers, expert-parallel groups on the host, and expert buffers on GPUs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from dynamo_elastic.comm.expert_rules import BufferShape, PeerState
from dynamo_elastic.types import Epoch, Rank

if TYPE_CHECKING:
    import torch


class MemoryKind(StrEnum):
    DRAM = "DRAM"
    VRAM = "VRAM"


class TransferState(StrEnum):
    RUNNING = "running"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Span:
    """`size_bytes` at `address` of one process; `device` is the CUDA ordinal (0 for DRAM)."""

    address: int
    size_bytes: int
    device: int = 0


class Transfer(Protocol):
    """One posted write. Release it whether it is done or not; idempotent."""

    def poll(self) -> TransferState:
        """Where it stands. Raises TransferError if it failed (the remote died, say)."""
        ...

    def release(self) -> None:
        """Give its resources back. Not a fence: late bytes may land until the remote closes."""
        ...


class TransferAgent(Protocol):
    """One NIXL agent. Its name is an incarnation and is never used twice. Not thread-safe."""

    @property
    def name(self) -> str: ...

    def register(self, span: Span, kind: MemoryKind = MemoryKind.DRAM) -> None:
        """Make `span` readable and writable by remotes until close(). It must outlive the agent."""
        ...

    def metadata(self) -> bytes:
        """What a peer's add_remote() needs, registrations included."""
        ...

    def add_remote(self, metadata: bytes) -> str:
        """Load a peer; returns its name. Raises TransferError. Adding it again is fine."""
        ...

    def remove_remote(self, name: str) -> None:
        """Forget a peer; unknown names are fine. Transfers to it must have been released."""
        ...

    def write(
        self, remote: str, local: Sequence[Span], target: Sequence[Span], kind: MemoryKind
    ) -> Transfer:
        """Post one write of `local[i]` to `target[i]` of `remote`. Raises TransferError."""
        ...

    def close(self) -> None:
        """Destroy the agent: after this no byte lands in our memory any more, and nothing leaves
        it. Idempotent."""
        ...


class ExpertGroup(Protocol):
    """The expert-parallel group of ONE epoch on one rank: connect masked, step in lockstep.

    Life: open (constructor) -> connect() -> control()/dispatch()/combine() ... -> close(). A rank
    that is lost is masked for good: it is skipped in every later exchange and shows in `masked`.
    Used by one thread at a time, except `close()` and `arrived()`. What a peer sent before it was
    lost is still delivered, so look at `masked` after each step.
    """

    @property
    def epoch(self) -> Epoch: ...

    @property
    def rank(self) -> Rank: ...

    @property
    def world_size(self) -> int: ...

    @property
    def address(self) -> str:
        """What a peer's connect() needs to reach this rank."""
        ...

    @property
    def masked(self) -> frozenset[Rank]:
        """Ranks that were lost."""
        ...

    def connect(self, addresses: Mapping[Rank, str], *, timeout_s: float) -> None:
        """Connect to all other ranks. Serves nobody yet. Raises PeerLost with who never came; the
        group can then only be closed. A peer that never comes delays nobody but this call."""
        ...

    def arrived(self, ranks: Sequence[Rank]) -> bool:
        """True if the next control record of each of `ranks` is here, so that control() will not
        wait for them. Never blocks."""
        ...

    def control(self, record: bytes, *, timeout_s: float) -> Mapping[Rank, bytes]:
        """All-gather a small record: the barrier that opens every step. Own record included.
        Ranks lost meanwhile are masked and missing from the result."""
        ...

    def exchange(self, payloads: Mapping[Rank, bytes], *, timeout_s: float) -> Mapping[Rank, bytes]:
        """Send each rank its payload and return what each sent us. Every rank calls this the same
        number of times in a step. Ranks lost meanwhile are masked and missing from the result."""
        ...

    def close(self) -> None:
        """Let go of every peer. Idempotent; an exchange that is blocked then raises PeerLost."""
        ...


@dataclass(frozen=True, slots=True)
class Dispatched:
    """What a dispatch brought to this rank's experts.

    `tokens` is bf16 [experts_per_rank, capacity * max_tokens, hidden], of which the first
    `counts[e]` rows (int32 [experts_per_rank]) of expert e are tokens and the rest is garbage. Both
    lie in the buffer's own memory: they hold until the next but one dispatch or combine.
    """

    tokens: torch.Tensor
    counts: torch.Tensor
    handle: object
    """For combine()."""


class ExpertBuffer(Protocol):
    """Dispatch and combine of one rank over the ranks that it is connected to, on the GPU.

    Built for a capacity and a rank, for good. A fresh buffer has no peers and serves alone. Peers
    are connected while it serves, masked; activated at a step boundary, all ranks at the same one;
    deactivated, disconnected. `expert_rules` has the states and the rules; a call that breaks one
    raises BufferMisused with nothing changed.

    One thread serves and does all the rest; connect() alone may run beside it, in one other thread,
    but not while a CUDA graph is captured.
    """

    @property
    def rank(self) -> Rank: ...

    @property
    def shape(self) -> BufferShape: ...

    @property
    def states(self) -> Mapping[Rank, PeerState]:
        """Of every other rank of the capacity."""
        ...

    @property
    def can_connect(self) -> bool:
        """False once a connect has failed: only a fresh buffer can be connected then."""
        ...

    @property
    def can_disconnect(self) -> bool:
        """False once a connect was not answered in time: its peers stay as long as it does."""
        ...

    @property
    def parity(self) -> int:
        """Which half of the double buffer the next dispatch or combine uses: 0 or 1."""
        ...

    @property
    def memory(self) -> Span:
        """The memory that peers write into."""
        ...

    def metadata(self) -> bytes:
        """What a peer's connect() needs. The caller carries it, under keys of one epoch."""
        ...

    def connect(self, peers: Mapping[Rank, bytes], *, timeout_s: float) -> None:
        """Map `peers`, given by their metadata, and leave them masked. Both sides must call it at
        about the same time. Serving goes on meanwhile.

        Raises PeerUnreachable: the peers are broken, and this buffer can't connect any others, but
        serves on with those that it has. If it took all of `timeout_s`, it can't disconnect either.
        """
        ...

    def activate(self, ranks: Collection[Rank]) -> None:
        """Let connected peers take part from the next layer on; they must do the same."""
        ...

    def deactivate(self, ranks: Collection[Rank]) -> None:
        """Leave active peers out from the next layer on; they must do the same."""
        ...

    def disconnect(self, ranks: Collection[Rank]) -> None:
        """Unmap peers that are masked, in a few milliseconds. Waits for the device."""
        ...

    def masked(self) -> frozenset[Rank]:
        """Peers that the device has timed out so far. Waits for the steps launched so far; read it
        after every step, and throw away the tokens of a step after which it grew. Other ranks may
        see another set."""
        ...

    def dispatch(self, x: torch.Tensor, topk_ids: torch.Tensor) -> Dispatched:
        """Send bf16 tokens `x` [n, hidden], n <= max_tokens, to the ranks of their experts
        `topk_ids` [n, top_k] (ids of `topk_dtype`; -1 is none), and take what the peers sent."""
        ...

    def staging(self, dispatched: Dispatched) -> torch.Tensor:
        """Where the next combine() can take its input from without copying it; of the shape of
        `dispatched.tokens`, but not contiguous."""
        ...

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
        """Send each token's `results`, contiguous, back to its rank, which writes their sum,
        weighted with the float32 `topk_weights` [n, top_k], into `out` [n, hidden]. `staged`: they
        are in staging() already, and `results` is not read."""
        ...

    @property
    def topk_dtype(self) -> torch.dtype: ...

    def destroy(self, *, released_by: Collection[Rank]) -> None:
        """Give everything back. `released_by` names the ranks that have disconnected this one, or
        are dead: every rank that was ever connected must be among them. Idempotent."""
        ...
