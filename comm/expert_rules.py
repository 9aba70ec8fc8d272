"""The rules of an expert buffer, kept in one place: the adapter on NIXL EP and the fake obey both.

They are NIXL EP's own (sizes, one initialisation, symmetric connects) and those that runs on GPUs
taught (docs/findings.md 1, 2, 6): a peer that the device timed out is never unmasked, and a buffer
goes only after all its peers have unmapped it.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch

from dynamo_elastic.errors import BufferMisused, ConfigError
from dynamo_elastic.types import Rank

HIDDEN_SIZES = (2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192)
"""Those that NIXL EP's kernels are compiled for."""
MAX_TOP_K = 11
RANKS_PER_NODE = 8
IPC_CACHE_VARIABLE = "UCX_CUDA_IPC_CACHE"
"""Must be `n` in the environment of every engine: with UCX's cache of IPC mappings a process that
has served can be parked, but never comes back, and one restored twice loses its peers' tokens."""
_TOKEN_ROWS_MULTIPLE = 4


@dataclass(frozen=True, slots=True)
class BufferShape:
    """What a buffer is built for; equal on all ranks of a group.

    `capacity` is the number of ranks that the group can ever have: it can't grow later, and every
    step pays for its padding. A rank dispatches at most `max_tokens` at once. A peer that is
    silent for `timeout_ms` in a step is masked; that is also how long it stalls the others.
    """

    capacity: int
    experts_per_rank: int
    hidden: int
    top_k: int
    max_tokens: int
    timeout_ms: int = 500

    @property
    def experts(self) -> int:
        """Number of experts in every dispatch, whoever is there: expert e is on rank
        e // experts_per_rank."""
        return self.capacity * self.experts_per_rank


def check_shape(shape: BufferShape, rank: Rank) -> None:
    """Return if a buffer of `shape` can be built for `rank`. Raises ConfigError with all faults."""
    faults: list[str] = []

    def require(holds: bool, field: str, value: int, rule: str) -> None:
        if not holds:
            faults.append(f"{field} is {value}: {rule}")

    capacity = shape.capacity
    fits = 0 < capacity < RANKS_PER_NODE or (capacity > 0 and capacity % RANKS_PER_NODE == 0)
    rule = f"take less than {RANKS_PER_NODE}, or a multiple of {RANKS_PER_NODE}"
    require(fits, "capacity", capacity, rule)
    require(0 <= rank < max(capacity, 1), "rank", rank, f"take one below the capacity, {capacity}")
    require(
        shape.experts_per_rank > 0, "experts_per_rank", shape.experts_per_rank, "take 1 or more"
    )
    sizes = ", ".join(map(str, HIDDEN_SIZES))
    require(shape.hidden in HIDDEN_SIZES, "hidden", shape.hidden, f"take one of {sizes}")
    top_k_fits = 0 < shape.top_k <= min(MAX_TOP_K, max(shape.experts, 1))
    rule = f"take 1 to {MAX_TOP_K}, and no more than there are experts, {shape.experts}"
    require(top_k_fits, "top_k", shape.top_k, rule)
    rows = capacity * shape.max_tokens
    rows_fit = shape.max_tokens > 0 and rows % _TOKEN_ROWS_MULTIPLE == 0
    rule = f"take a positive number that makes {_TOKEN_ROWS_MULTIPLE} divide capacity * max_tokens"
    require(rows_fit, "max_tokens", shape.max_tokens, rule)
    require(shape.timeout_ms > 0, "timeout_ms", shape.timeout_ms, "take a positive number")
    if faults:
        raise ConfigError(faults)


class PeerState(StrEnum):
    """Where another rank stands in this rank's buffer."""

    ABSENT = "absent"
    CONNECTING = "connecting"
    CONNECTED = "connected"
    """Mapped and masked: no token goes to it."""
    ACTIVE = "active"
    """It takes part in every dispatch and combine."""
    TIMED_OUT = "timed-out"
    """The device masked it in a step, whose tokens are lost."""
    BROKEN = "broken"
    """Connecting it failed half-way."""


_S = PeerState
MOVES: Mapping[PeerState, frozenset[PeerState]] = {
    _S.ABSENT: frozenset({_S.CONNECTING}),
    _S.CONNECTING: frozenset({_S.CONNECTED, _S.BROKEN}),
    _S.CONNECTED: frozenset({_S.ACTIVE, _S.ABSENT}),
    _S.ACTIVE: frozenset({_S.CONNECTED, _S.TIMED_OUT}),
    _S.TIMED_OUT: frozenset({_S.ABSENT}),
    _S.BROKEN: frozenset({_S.ABSENT}),
}
"""Which states a peer may go to from which."""

_REMEDIES: Mapping[PeerState, str] = {
    _S.ABSENT: "connect it first",
    _S.CONNECTING: "wait until connect() has returned",
    _S.CONNECTED: "activate or disconnect it",
    _S.ACTIVE: "deactivate it first",
    _S.TIMED_OUT: "disconnect it, let it build a fresh buffer, and connect that",
    _S.BROKEN: "disconnect it, and connect it to a fresh buffer",
}


class PeerBook:
    """Where every peer of one buffer stands, and what may be done next.

    Its methods raise BufferMisused, with nothing changed, for what breaks a rule. connect() runs
    beside the serving thread, so calls may come from two threads.
    """

    def __init__(self, shape: BufferShape, rank: Rank) -> None:
        check_shape(shape, rank)
        self._shape = shape
        self._rank = rank
        self._states = {Rank(r): _S.ABSENT for r in range(shape.capacity) if r != rank}
        self._metadata: dict[Rank, bytes] = {}
        self._stale: dict[Rank, bytes] = {}
        """Metadata of buffers that timed out: not to be connected again."""
        self._mapped_by: set[Rank] = set()
        """Peers that have mapped this rank's memory, as far as we know."""
        self._half_steps = 0
        self._open_layers = 0
        self._sealed = self._spent = ""
        """Why no peer can be connected any more, and why none can be let go of."""
        self._destroyed = False
        self._lock = threading.Lock()

    @property
    def states(self) -> Mapping[Rank, PeerState]:
        with self._lock:
            return dict(self._states)

    @property
    def parity(self) -> int:
        """Which half of the double buffer comes next; 0 in a fresh buffer and between layers."""
        return self._half_steps % 2

    def ranks(self, *states: PeerState) -> frozenset[Rank]:
        """Peers in one of `states`."""
        with self._lock:
            return frozenset(r for r, state in self._states.items() if state in states)

    def check_tokens(self, x: torch.Tensor, topk_ids: torch.Tensor, dtype: torch.dtype) -> None:
        """Raises BufferMisused unless `x` and `topk_ids` (of `dtype`) fit the shape."""
        count, hidden, top_k = x.shape[0], self._shape.hidden, self._shape.top_k
        if x.dtype != torch.bfloat16 or x.shape[1:] != (hidden,) or not x.is_contiguous():
            given, wanted = f"x is {x.dtype} {tuple(x.shape)}", f"contiguous bfloat16 [n, {hidden}]"
        elif count > self._shape.max_tokens:
            given, wanted = f"x has {count} tokens", f"at most max_tokens, {self._shape.max_tokens}"
        elif topk_ids.dtype != dtype or topk_ids.shape != (count, top_k):
            given = f"topk_ids is {topk_ids.dtype} {tuple(topk_ids.shape)}"
            wanted = f"{dtype} [{count}, {top_k}]"
        else:
            return
        raise BufferMisused(f"can't dispatch, as {given}", remedy=f"pass {wanted}")

    def dispatching(self) -> None:
        """A dispatch is about to be launched, or captured."""
        self.require_usable()
        self._half_steps += 1
        self._open_layers += 1

    def combining(self) -> None:
        """The combine that belongs to a dispatch is about to be launched, or captured."""
        self.require_usable()
        if not self._open_layers:
            raise BufferMisused("combine without a dispatch", remedy="dispatch first")
        self._half_steps += 1
        self._open_layers -= 1

    def connecting(self, peers: Mapping[Rank, bytes]) -> None:
        """`peers` are about to be connected by their metadata, masked, so beside the steps."""
        self._require_changeable("connect", self._sealed)
        for rank, metadata in peers.items():
            if self._stale.get(rank) == metadata:
                raise BufferMisused(
                    f"rank {rank} was masked by a timeout and offers the same buffer",
                    remedy=_REMEDIES[_S.TIMED_OUT],
                )
        self.move(peers, _S.CONNECTING)
        self._metadata.update(peers)
        self._mapped_by.update(peers)

    def switching(self, ranks: Iterable[Rank], after: PeerState, act: str) -> None:
        """`ranks` are masked, unmasked or unmapped: only between whole layers, where the halves of
        all ranks' double buffers agree."""
        self.require_usable()
        if after is _S.ABSENT:
            self._require_changeable(act, self._spent)
        if self._open_layers:
            raise BufferMisused(
                f"can't {act} between dispatch and combine",
                remedy="finish the layer: ranks must agree which half of the buffers is next",
            )
        self.move(ranks, after)

    def timed_out(self, ranks: Iterable[Rank]) -> None:
        """The device has masked `ranks`, which were active."""
        ranks = list(ranks)
        self.move(ranks, _S.TIMED_OUT)
        for rank in ranks:
            self._stale[rank] = self._metadata[rank]

    def move(self, ranks: Iterable[Rank], after: PeerState) -> None:
        """All of `ranks` go to `after`, or none."""
        ranks = list(ranks)
        with self._lock:
            for rank in ranks:
                before = self._states.get(rank)
                if before is None:
                    raise BufferMisused(
                        f"rank {rank} is no peer of rank {self._rank}",
                        remedy=f"take another one of 0 to {len(self._states)}",
                    )
                if after not in MOVES[before]:
                    raise BufferMisused(
                        f"rank {rank} is {before} and can't become {after}",
                        remedy=_REMEDIES[before],
                    )
            self._states.update(dict.fromkeys(ranks, after))

    @property
    def sealed(self) -> bool:
        return bool(self._sealed)

    @property
    def spent(self) -> bool:
        return bool(self._spent)

    def seal(self, why: str) -> None:
        """No peer can be connected any more; those that it has may stay, or be let go of."""
        self._sealed = why

    def spend(self, why: str) -> None:
        """No connection of this buffer can be made or ended any more; the peers it has stay."""
        self._sealed = self._spent = why

    def destroying(self, released_by: Collection[Rank]) -> None:
        """The buffer is about to go. `released_by`: ranks that have unmapped it, or are dead."""
        if held := self._mapped_by - set(released_by):
            raise BufferMisused(
                f"ranks {sorted(held)} may still have this buffer mapped",
                remedy="let each of them disconnect this rank first, or end it",
            )
        self._destroyed = True

    def require_usable(self) -> None:
        """Raises BufferMisused once the buffer is destroyed."""
        if self._destroyed:
            raise BufferMisused("the buffer was destroyed", remedy="build a fresh one")

    def _require_changeable(self, act: str, obstacle: str) -> None:
        self.require_usable()
        if obstacle:
            raise BufferMisused(f"can't {act}: {obstacle}", remedy="build a fresh buffer")
