"""Tensors from one rank to another over NIXL, by way of a staging buffer on either side.

Staging is plain memory that lives as long as the call: no address of a tensor is registered or
outlives it, and it does not matter whose allocator the tensors come from. Its two halves take
turns, so that copies and writes overlap. Words between the ranks go over the operation's store:
each wait ends when the operation does.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dynamo_elastic.comm.base import MemoryKind, Span, Transfer, TransferAgent, TransferState
from dynamo_elastic.errors import TransferError, TransferTimeout

STAGING_BYTES = 512 << 20
_POLL_S = 0.0005


class Words(Protocol):
    """A store whose waits end with the operation; see elastic.meeting."""

    def set(self, key: str, value: Any) -> None: ...

    def get(self, key: str) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of one tensor, and where they are in a half of the staging buffer."""

    name: str
    start: int
    size_bytes: int
    at: int


def cut(sizes: Mapping[str, int], half_bytes: int) -> Iterator[list[Piece]]:
    """All bytes of all tensors, by name, in loads of up to `half_bytes`. Pure.

    >>> [[(p.name, p.start, p.size_bytes, p.at) for p in load] for load in cut({"a": 3, "b": 2}, 4)]
    [[('a', 0, 3, 0), ('b', 0, 1, 3)], [('b', 1, 1, 0)]]
    """
    load: list[Piece] = []
    filled = 0
    for name in sorted(sizes):
        start = 0
        while start < sizes[name]:
            size_bytes = min(sizes[name] - start, half_bytes - filled)
            load.append(Piece(name, start, size_bytes, filled))
            start, filled = start + size_bytes, filled + size_bytes
            if filled == half_bytes:
                yield load
                load, filled = [], 0
    if load:
        yield load


class Stream:
    """One rank's end of one transfer; `key` names it on the store. `agent` is this end's alone,
    and is closed with it."""

    def __init__(
        self,
        words: Words,
        key: str,
        agent: TransferAgent,
        device: torch.device,
        *,
        timeout_s: float,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        self._words, self._key, self._agent = words, key, agent
        self._timeout_s = timeout_s
        self._half_bytes = staging_bytes // 2
        self._staging = torch.empty(2 * self._half_bytes, dtype=torch.uint8, device=device)
        self._kind = MemoryKind.VRAM if device.type == "cuda" else MemoryKind.DRAM
        index = self._staging.device.index or 0
        self._span = Span(self._staging.data_ptr(), 2 * self._half_bytes, index)
        # Not the stream of the steps that are served meanwhile.
        self._cuda = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        agent.register(self._span, self._kind)

    def send(self, tensors: Mapping[str, Tensor]) -> int:
        """All of them, whatever their layout; the number of bytes. Raises TransferError, or what
        the store raises when the operation is over."""
        sizes = {name: size_of(tensor) for name, tensor in tensors.items()}
        try:
            self._say("total_bytes", str(sum(sizes.values())))
            offer = json.loads(self._hear("offer"))
            self._compare(offer["total_bytes"], sizes)
            remote = self._agent.add_remote(base64.b64decode(offer["agent"]))
            with self._aside():
                self._send(tensors, cut(sizes, self._half_bytes), remote, Span(*offer["staging"]))
        finally:
            self._agent.close()
        return sum(sizes.values())

    def _send(
        self,
        tensors: Mapping[str, Tensor],
        loads: Iterator[list[Piece]],
        remote: str,
        there: Span,
    ) -> None:
        flat, name = torch.empty(0), ""
        for number, load in enumerate(loads):
            half = number % 2 * self._half_bytes
            if number >= 2:
                self._hear(f"taken/{number - 2}")
            for piece in load:
                if piece.name != name:
                    name, flat = piece.name, _flat(tensors[piece.name].detach().contiguous())
                self._part(half, piece).copy_(flat[piece.start : piece.start + piece.size_bytes])
            self._settle()
            size_bytes = load[-1].at + load[-1].size_bytes
            ours = Span(self._span.address + half, size_bytes, self._span.device)
            theirs = Span(there.address + half, size_bytes, there.device)
            transfer = self._agent.write(remote, [ours], [theirs], self._kind)
            try:
                finish(transfer, self._key, self._timeout_s)
            finally:
                transfer.release()
            self._say(f"landed/{number}", "1")

    def receive(self, tensors: Mapping[str, Tensor]) -> int:
        """Fill `tensors`, which are named and shaped as the sender's; the number of bytes. Raises
        TransferError before a byte is on its way if they are not, or what the store raises when the
        operation is over; then they hold an unknown mix."""
        sizes = {name: size_of(tensor) for name, tensor in tensors.items()}
        offer = {
            "agent": base64.b64encode(self._agent.metadata()).decode(),
            "staging": [self._span.address, self._span.size_bytes, self._span.device],
            "total_bytes": sum(sizes.values()),
        }
        try:
            self._say("offer", json.dumps(offer))
            self._compare(int(self._hear("total_bytes")), sizes)
            with self._aside():
                self._receive(tensors, cut(sizes, self._half_bytes))
        finally:
            self._agent.close()
        return sum(sizes.values())

    @torch.no_grad()
    def _receive(self, tensors: Mapping[str, Tensor], loads: Iterator[list[Piece]]) -> None:
        aside: dict[str, Tensor] = {}
        for number, load in enumerate(loads):
            half = number % 2 * self._half_bytes
            self._hear(f"landed/{number}")
            for piece in load:
                tensor = tensors[piece.name]
                if not tensor.is_contiguous() and piece.name not in aside:
                    aside[piece.name] = torch.empty_like(
                        tensor, memory_format=torch.contiguous_format
                    )
                flat = _flat(aside.get(piece.name, tensor).detach())
                flat[piece.start : piece.start + piece.size_bytes].copy_(self._part(half, piece))
            self._settle()
            self._say(f"taken/{number}", "1")
        for name, whole in aside.items():
            tensors[name].copy_(whole)
        self._settle()

    def _compare(self, there: int, sizes: Mapping[str, int]) -> None:
        here = sum(sizes.values())
        if there != here:
            raise TransferError(
                f"weights differ: {there} bytes there, {here} here", remote=self._key
            )

    def _part(self, half: int, piece: Piece) -> Tensor:
        return self._staging[half + piece.at : half + piece.at + piece.size_bytes]

    def _settle(self) -> None:
        """What was copied is there, for a peer's eyes too."""
        if self._cuda is not None:
            self._cuda.synchronize()

    def _aside(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._cuda is None else torch.cuda.stream(self._cuda)

    def _say(self, word: str, value: str) -> None:
        self._words.set(f"{self._key}/{word}", value)

    def _hear(self, word: str) -> bytes:
        return self._words.get(f"{self._key}/{word}")


def finish(transfer: Transfer, remote: str, timeout_s: float) -> None:
    """Return once all of it has landed. Raises TransferError, TransferTimeout after `timeout_s`."""
    until_s = time.monotonic() + timeout_s
    while transfer.poll() is TransferState.RUNNING:
        if time.monotonic() > until_s:
            raise TransferTimeout("sending weights ran out of time", remote=remote)
        time.sleep(_POLL_S)


def size_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _flat(tensor: Tensor) -> Tensor:
    return tensor.flatten().view(torch.uint8)
