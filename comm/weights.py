"""Weights on their way: a source writes its share of a plan into its peers' arenas."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import xxhash

from dynamo_elastic.comm.base import MemoryKind, Span, Transfer, TransferAgent, TransferState
from dynamo_elastic.comm.transfer_plan import Chunk
from dynamo_elastic.errors import (
    DigestMismatch,
    TransferError,
    TransferTimeout,
    TransferTooSlow,
)
from dynamo_elastic.failpoints import failpoint
from dynamo_elastic.types import WorkerId

_POLL_INTERVAL_S = 0.0005
_BATCHES_IN_FLIGHT = 4
_FLOOR_GRACE_S = 0.1
"""First use of a path, and a busy host, are no reason to end a push."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a push may take: bytes in flight, seconds for one transfer, and seconds in all. With a
    floor, a push that falls below it is ended: inside a host it has left NVLink, and would take a
    hundred times as long with every byte right."""

    window_bytes: int
    transfer_timeout_s: float
    timeout_s: float
    floor_gbps: float = 0


@dataclass(frozen=True, slots=True)
class Destination:
    """A peer that we have added, and its arena."""

    agent_name: str
    arena: Span


@dataclass(frozen=True, slots=True)
class _Batch:
    """Chunks that go to one peer as one transfer."""

    remote: str
    local: tuple[Span, ...]
    target: tuple[Span, ...]

    @property
    def size_bytes(self) -> int:
        return sum(span.size_bytes for span in self.local)


def push(
    agent: TransferAgent,
    chunks: Sequence[Chunk],
    arena: Span,
    destinations: Mapping[WorkerId, Destination],
    kind: MemoryKind,
    limits: Limits,
) -> int:
    """Write `chunks` from our `arena` into their targets' arenas; the number of bytes written.

    All of it has landed when this returns. Raises TransferTimeout if one transfer, or all of it,
    took too long, TransferTooSlow below the floor, and TransferError if one failed, with the bytes
    known to have landed at that remote; more may still land until the remote closes its agent.
    Blocks, sleeping between looks.
    """
    sender = _Sender(agent, kind, limits)
    batch_bytes = limits.window_bytes // _BATCHES_IN_FLIGHT
    try:
        for batch in _batches(chunks, arena, destinations, batch_bytes):
            failpoint("weights.before_chunk")
            sender.post(batch)
        sender.finish()
        failpoint("weights.landed")
    finally:
        sender.release()
    return sum(c.size_bytes for c in chunks)


class _Sender:
    """Transfers in flight, oldest first; never more bytes than the window, but always one."""

    def __init__(self, agent: TransferAgent, kind: MemoryKind, limits: Limits) -> None:
        self._agent = agent
        self._kind = kind
        self._limits = limits
        self._begun = time.monotonic()
        self._deadline = self._begun + limits.timeout_s
        self._flying: deque[tuple[_Batch, Transfer, float]] = deque()
        self._flying_bytes = 0
        self._done_bytes: Counter[str] = Counter()

    def post(self, batch: _Batch) -> None:
        while self._flying and self._flying_bytes + batch.size_bytes > self._limits.window_bytes:
            self._finish_oldest()
        if time.monotonic() >= self._deadline:
            raise self._timeout(batch.remote)
        posted_bytes = self._done_bytes.total() + self._flying_bytes
        if posted_bytes:
            # A transport may copy before write() returns: then it is here that it shows.
            self._check_floor(batch.remote, posted_bytes)
        else:
            self._begun = time.monotonic()
        until = time.monotonic() + self._limits.transfer_timeout_s
        try:
            transfer = self._agent.write(batch.remote, batch.local, batch.target, self._kind)
        except TransferError as exc:
            raise self._failure(batch.remote) from exc
        self._flying.append((batch, transfer, min(until, self._deadline)))
        self._flying_bytes += batch.size_bytes

    def finish(self) -> None:
        while self._flying:
            self._finish_oldest()

    def release(self) -> None:
        for _, transfer, _ in self._flying:
            transfer.release()
        self._flying.clear()

    def _finish_oldest(self) -> None:
        batch, transfer, until = self._flying[0]
        try:
            while transfer.poll() is TransferState.RUNNING:
                if time.monotonic() >= until:
                    raise self._timeout(batch.remote)
                # The oldest transfer is not done: had the floor been kept, it would be.
                self._check_floor(batch.remote, self._done_bytes.total() + batch.size_bytes)
                time.sleep(_POLL_INTERVAL_S)
        except (TransferTimeout, TransferTooSlow):
            raise
        except TransferError as exc:
            raise self._failure(batch.remote) from exc
        self._flying.popleft()
        transfer.release()
        self._flying_bytes -= batch.size_bytes
        self._done_bytes[batch.remote] += batch.size_bytes

    def _check_floor(self, remote: str, most_bytes: int) -> None:
        """Raises TransferTooSlow unless `most_bytes` by now are enough."""
        elapsed_s = time.monotonic() - self._begun
        if most_bytes < self._limits.floor_gbps * 1e9 * (elapsed_s - _FLOOR_GRACE_S):
            raise TransferTooSlow(
                f"a push left NVLink, below {self._limits.floor_gbps} GB/s",
                remote=remote,
                bytes_done=self._done_bytes[remote],
                gbps=most_bytes / elapsed_s / 1e9,
            )

    def _timeout(self, remote: str) -> TransferTimeout:
        done = self._done_bytes[remote]
        return TransferTimeout("a push ran out of time", remote=remote, bytes_done=done)

    def _failure(self, remote: str) -> TransferError:
        done = self._done_bytes[remote]
        return TransferError("a push failed", remote=remote, bytes_done=done)


def _batches(
    chunks: Iterable[Chunk],
    arena: Span,
    destinations: Mapping[WorkerId, Destination],
    batch_bytes: int,
) -> Iterator[_Batch]:
    """Neighbouring chunks to one target together, up to `batch_bytes`, or one if it is larger."""
    group: list[Chunk] = []
    for chunk in chunks:
        grouped_bytes = sum(c.size_bytes for c in group)
        fits = grouped_bytes + chunk.size_bytes <= batch_bytes
        if group and not (fits and chunk.target == group[0].target):
            yield _batch(group, arena, destinations)
            group = []
        group.append(chunk)
    if group:
        yield _batch(group, arena, destinations)


def _batch(
    group: Sequence[Chunk], arena: Span, destinations: Mapping[WorkerId, Destination]
) -> _Batch:
    there = destinations[group[0].target]
    return _Batch(
        there.agent_name,
        tuple(_part(arena, c.from_offset, c.size_bytes) for c in group),
        tuple(_part(there.arena, c.to_offset, c.size_bytes) for c in group),
    )


def _part(arena: Span, offset: int, size_bytes: int) -> Span:
    return Span(arena.address + offset, size_bytes, arena.device)


def digest(data: bytes | bytearray | memoryview) -> str:
    """The xxh3_128 of `data`, in hex."""
    return str(xxhash.xxh3_128(data).hexdigest())


def compare(expected: Mapping[str, str], actual: Mapping[str, str], *, remote: str) -> None:
    """Return if every region of `expected` has the same digest in `actual`.

    Raises DigestMismatch with the regions that differ or are missing; `remote` sent them.
    """
    wrong = [name for name, value in expected.items() if actual.get(name) != value]
    if wrong:
        raise DigestMismatch(remote=remote, regions=sorted(wrong))
