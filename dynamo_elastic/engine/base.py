"""The seam to a serving engine: what a worker shell and the agent need of it, and no more.

An engine is one process. It boots detached: no topology, no sockets, no NIXL agent. Warm and
quiescent it writes `detached.json` into its control directory and polls for `attach.json`. That
file is its way into life, after a boot and after a restore alike: it takes its new identity from
it, makes its agent, proves itself with one step, and serves calls on `engine.sock`. Told to
detach(), it goes back to where it was after the boot, and can be attached again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from dynamo_elastic.topology import ExpertMove, Topology
from dynamo_elastic.types import Epoch, Incarnation, Rank, WorkerId

DETACHED_FILE = "detached.json"
ATTACH_FILE = "attach.json"
SOCKET_FILE = "engine.sock"
KERNELS_VARIABLE = "DYNAMO_ELASTIC_KERNELS_DIR"
"""Names the directory in which engines of one kind agree on what they chose by its time."""


class EngineState(StrEnum):
    ATTACHED = "attached"
    """Alive with an identity, member of no group."""
    JOINING = "joining"
    """Group of the next epoch open, weights on their way."""
    SERVING = "serving"
    LEFT = "left"
    """Was a member; the epoch in force does not have it."""


@dataclass(frozen=True, slots=True)
class Attach:
    """The identity that the agent gives an engine, in `attach.json`."""

    incarnation: Incarnation
    worker_id: WorkerId
    seed: int
    log_path: str
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What an engine says of itself. `epoch` is that of the group in force, 0 if none.

    `lost_experts` have no replica on a rank that lives: the engine refuses requests."""

    state: EngineState
    incarnation: Incarnation
    epoch: Epoch
    rank: Rank
    world_size: int
    step: int
    running: int
    waiting: int
    masked: tuple[Rank, ...]
    frozen: bool
    pid: int
    kv_blocks_used: int
    kv_blocks_total: int
    lost_experts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """One generation. Tokens depend on `prompt`, `seed` and position alone, never on the rank.

    `prompt` may end with tokens generated elsewhere before: sampling is keyed by absolute position.
    """

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int = 0
    temperature: float = 1.0
    stop_tokens: tuple[int, ...] = ()


class Finish(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    MOVED = "moved"
    """The rank leaves: go on elsewhere with prompt + tokens so far. Not an error."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Output:
    """Tokens of one request from one step, and why it ended if it did."""

    request_id: str
    tokens: tuple[int, ...]
    finish: Finish | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PushReport:
    """What a source wrote. `digests` are of its own copy: worker -> region -> digest. `probe` is
    what check() of a rank with the same dense weights returns; '' if they were not pushed. `links`
    is how many of the bytes went to which worker."""

    size_bytes: int
    elapsed_s: float
    digests: dict[WorkerId, dict[str, str]] = field(default_factory=dict)
    probe: str = ""
    links: dict[WorkerId, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SwitchReport:
    """One rank's switch. `gap_s`: last step of the old group to the first right one of the new."""

    epoch: Epoch
    gap_s: float
    decided_to_first_step_s: float


class Engine(Protocol):
    """One attached engine, seen from its shell. Every call may raise EngineError or EngineGone.

    Epoch calls (open, connect, push, install, decide) are refused for an epoch below one already
    open, aborted or in force. All are idempotent by epoch.
    """

    async def status(self) -> EngineStatus: ...

    async def open_epoch(self, epoch: Epoch, rank: Rank, world_size: int) -> dict[str, Any]:
        """Open the group of `epoch`; returns the endpoint that peers need. Serving goes on.

        It supersedes older epochs that are not in force, as abort_epoch() would, decided ones too;
        one whose switch had been announced to the other ranks is in force when this returns."""
        ...

    async def connect_epoch(
        self, topology: Topology, endpoints: dict[WorkerId, dict[str, Any]], *, timeout_s: float
    ) -> None:
        """Connect masked to every other member of `topology`, transfer agents included. The
        placement of `topology` is what the group will route by. Serving goes on."""
        ...

    async def load_weights(self, experts: Sequence[int]) -> PushReport:
        """Read `experts` (by slot, EMPTY skipped) from the model directory, and the dense weights,
        unless the rank serves with them already."""
        ...

    async def push_dense(
        self, epoch: Epoch, sources: Sequence[WorkerId], joiners: Sequence[WorkerId]
    ) -> PushReport:
        """Write this source's share of the dense regions to every joiner, digests returned."""
        ...

    async def push_experts(
        self, epoch: Epoch, worker_id: WorkerId, moves: Sequence[ExpertMove]
    ) -> PushReport:
        """Write the experts of those `moves` that name `worker_id` as source."""
        ...

    async def check(self, digests: dict[str, str]) -> dict[str, Any]:
        """Compare own regions with `digests` (all dense ones must be there, unless the rank serves
        already and is the reference); then run the masked probe. Returns {'probe': digest of the
        logits}. Raises EngineError naming what differs."""
        ...

    async def install(self, topology: Topology, digests: dict[str, str]) -> None:
        """Check `digests` of own regions, then route by `topology` (its epoch must be the one in
        force or pending) from the next step on."""
        ...

    async def decide(self, epoch: Epoch) -> None:
        """The decision for `epoch` is durable: switch when all ranks have seen it."""
        ...

    async def wait_switched(self, epoch: Epoch, *, timeout_s: float) -> SwitchReport:
        """Return once a first step of `epoch`'s group was right. Raises EngineError on timeout."""
        ...

    async def canary(self) -> tuple[int, ...]:
        """Generate the fixed probe through the group in force; its tokens. Raises EngineError at
        once while experts are lost."""
        ...

    async def freeze(self, frozen: bool) -> None:
        """Freeze (or thaw) expert moves of the engine's own making, if it makes any."""
        ...

    async def drain(self, *, short_tokens: int, timeout_s: float) -> int:
        """Admit nothing more; let requests with at most `short_tokens` to go finish, end the
        others as MOVED; returns how many moved. The rank goes on stepping."""
        ...

    async def readmit(self) -> None:
        """Undo drain() after an abort."""
        ...

    async def disconnect(self, epoch: Epoch) -> None:
        """Close every group and remote agent older than `epoch`."""
        ...

    async def abort_epoch(self, epoch: Epoch) -> None:
        """Close the groups of `epoch` and older that are not in force, and forget their peers.

        All ranks still step on the old group after this, though the epoch was decided; but once
        the switch was announced to the other ranks it is made: raises EngineError, as for any
        epoch in force."""
        ...

    async def detach(self) -> None:
        """Give the identity up. The engine answers; then it ends its groups, agents, threads and
        socket, drops weights and keys, and takes back the environment it had. When nothing of this
        life is left it writes `detached.json` anew and polls for `attach.json`. Raises EngineError,
        and changes nothing, unless the engine is ATTACHED or LEFT."""
        ...

    async def submit(self, request: Request) -> None:
        """Queue a generation. Raises EngineError if the rank drains or the prompt is too long."""
        ...

    async def cancel(self, request_id: str) -> None:
        """Stop a generation; it ends as CANCELLED. Unknown ids are fine."""
        ...

    def outputs(self) -> AsyncIterator[Output]:
        """Outputs of every request of this rank, as steps end. One reader. Raises EngineGone."""
        ...

    async def close(self) -> None:
        """Close the connection; the engine lives on. Idempotent."""
        ...
