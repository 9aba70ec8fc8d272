"""The seams to NIXL (memory transfers) and NIXL EP (expert-parallel groups)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from dynamo_elastic.types import Epoch, Rank


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
