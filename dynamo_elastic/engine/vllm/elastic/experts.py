"""Experts from rank to rank over NIXL, all ranks at once, by way of a staging buffer on each.

vLLM has NIXL read every expert in place, one by one, at 0.5 GB/s (docs/findings.md, section 15).
Here what goes to a peer goes in one write for each region full.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dynamo_elastic.comm.base import MemoryKind, Span, Transfer, TransferAgent
from dynamo_elastic.engine.vllm.elastic.stream import finish, size_of

REGION_BYTES = 128 << 20
"""Of what a rank sends at once, and again of what it receives."""
_ALIGNED_BYTES = 256

Expert = Sequence[Tensor]
"""All weights of one expert in one layer; shaped alike on all ranks."""


class Everyone(Protocol):
    """The ranks that move experts together. All make the same calls in the same order."""

    @property
    def rank(self) -> int: ...

    def gather(self, said: Any) -> list[Any]:
        """What every rank says, by rank. Raises RuntimeError if one does not in time."""
        ...


@dataclass(frozen=True, slots=True)
class Wanted:
    """`into` is to become expert `expert` as rank `source` holds it."""

    source: int
    expert: int
    into: Expert


@dataclass(frozen=True, slots=True)
class Placed:
    """An expert that rank `source` is to write to `at` of a rank's receiving region."""

    source: int
    expert: int
    at: int


@dataclass(frozen=True, slots=True)
class Piece:
    """`size_bytes` from `here` of the sending region to `there` of a receiving one."""

    here: int
    there: int
    size_bytes: int


class ExpertExchange:
    """One rank's end. It owns `agent`, and two regions of `region_bytes` on `device` until close().

    Made by all ranks at once. Raises TransferError or RuntimeError if a peer can't be reached.
    """

    def __init__(
        self,
        everyone: Everyone,
        agent: TransferAgent,
        device: torch.device,
        *,
        timeout_s: float,
        region_bytes: int = REGION_BYTES,
    ) -> None:
        self._everyone, self._agent = everyone, agent
        self._timeout_s = timeout_s
        self._region_bytes = region_bytes
        regions = torch.empty(2, region_bytes, dtype=torch.uint8, device=device)
        self._out, self._in = regions[0], regions[1]
        self._kind = MemoryKind.VRAM if device.type == "cuda" else MemoryKind.DRAM
        self._device = regions.device.index or 0
        agent.register(Span(regions.data_ptr(), 2 * region_bytes, self._device), self._kind)
        offers = everyone.gather((agent.metadata(), self._in.data_ptr(), self._device))
        self._peers = {
            rank: (agent.add_remote(metadata), Span(address, region_bytes, index))
            for rank, (metadata, address, index) in enumerate(offers)
            if rank != everyone.rank
        }

    @torch.no_grad()
    def move(self, held: Mapping[int, Expert], wanted: Iterable[Wanted]) -> None:
        """All of `wanted` is here, on every rank; `held` are the experts that this one can send.
        Copies are made on the current stream, and are done on return. Raises TransferError, or
        what gather() raises; then `into` of what was wanted holds an unknown mix."""
        loads = list(loads_of(wanted, self._region_bytes))
        while True:
            load = loads.pop(0) if loads else []
            said = self._everyone.gather((len(loads), [place for place, _ in load]))
            asked = [places for _, places in said]
            if not any(asked):
                return
            self._send(held, asked)
            self._everyone.gather(None)  # All of it has landed.
            for place, one in load:
                for tensor, part in _parts(one.into, self._in, place.at):
                    tensor.copy_(part)
            self._settle()
            if not any(left for left, _ in said):
                return

    def _send(self, held: Mapping[int, Expert], asked: list[list[Placed]]) -> None:
        mine = [
            (asker, place)
            for asker, places in enumerate(asked)
            for place in places
            if place.source == self._everyone.rank
        ]
        while mine:
            pieces: dict[int, list[Piece]] = {}
            filled = 0
            while mine and filled + row_bytes(held[mine[0][1].expert]) <= self._region_bytes:
                asker, place = mine.pop(0)
                expert = held[place.expert]
                for tensor, part in _parts(expert, self._out, filled):
                    part.copy_(tensor)
                piece = Piece(filled, place.at, row_bytes(expert))
                pieces.setdefault(asker, []).append(piece)
                filled += piece.size_bytes
            self._settle()
            self._write(pieces)

    def _write(self, pieces: Mapping[int, list[Piece]]) -> None:
        """To all peers at once."""
        under_way: list[tuple[str, Transfer]] = []
        try:
            for rank, of_one in pieces.items():
                remote, there = self._peers[rank]
                whole = merged(of_one)
                here = self._out.data_ptr()
                ours = [Span(here + p.here, p.size_bytes, self._device) for p in whole]
                theirs = [Span(there.address + p.there, p.size_bytes, there.device) for p in whole]
                under_way.append((remote, self._agent.write(remote, ours, theirs, self._kind)))
            for remote, transfer in under_way:
                finish(transfer, remote, self._timeout_s)
        finally:
            for _, transfer in under_way:
                transfer.release()

    def _settle(self) -> None:
        """What was copied is there, for a peer's eyes too."""
        if self._kind is MemoryKind.VRAM:
            torch.accelerator.current_stream().synchronize()

    def close(self) -> None:
        """Nothing lands here any more, and the regions are given back. Idempotent."""
        self._agent.close()
        self._out = self._in = torch.empty(0)


def row_bytes(expert: Expert) -> int:
    """What a region takes up for it."""
    return sum(_aligned(size_of(tensor)) for tensor in expert)


def loads_of(wanted: Iterable[Wanted], region_bytes: int) -> Iterator[list[tuple[Placed, Wanted]]]:
    """What is received at once, and where. Takes of all sources in turn, so that no rank is asked
    by all at the same time; what comes of one source lies together. Pure. Raises ValueError for an
    expert that is larger than a region."""
    turns: Counter[int] = Counter()
    in_turn: list[tuple[int, Wanted]] = []
    for one in wanted:
        in_turn.append((turns[one.source], one))
        turns[one.source] += 1
    load: list[Wanted] = []
    filled = 0
    for _, one in sorted(in_turn, key=lambda t: (t[0], t[1].source)):
        size_bytes = row_bytes(one.into)
        if size_bytes > region_bytes:
            raise ValueError(f"expert {one.expert} has {size_bytes} bytes, a region {region_bytes}")
        if filled + size_bytes > region_bytes:
            yield _placed(load)
            load, filled = [], 0
        load.append(one)
        filled += size_bytes
    if load:
        yield _placed(load)


def _placed(load: list[Wanted]) -> list[tuple[Placed, Wanted]]:
    placed, at = [], 0
    for one in sorted(load, key=lambda w: w.source):
        placed.append((Placed(one.source, one.expert, at), one))
        at += row_bytes(one.into)
    return placed


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """Pieces that lie together at both ends are one. Pure.

    >>> merged([Piece(0, 8, 4), Piece(4, 12, 4), Piece(8, 0, 4)])
    [Piece(here=0, there=8, size_bytes=8), Piece(here=8, there=0, size_bytes=4)]
    """
    whole: list[Piece] = []
    for piece in pieces:
        last = whole[-1] if whole else Piece(-1, -1, 0)
        if piece.here - last.here == piece.there - last.there == last.size_bytes:
            whole[-1] = Piece(last.here, last.there, last.size_bytes + piece.size_bytes)
        else:
            whole.append(piece)
    return whole


def _parts(expert: Expert, region: Tensor, at: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Each tensor of the expert, and where it lies in the region from `at` on."""
    for tensor in expert:
        size_bytes = size_of(tensor)
        if size_bytes:
            part = region[at : at + size_bytes].view(tensor.dtype).view(tensor.shape)
            yield tensor, part
        at += _aligned(size_bytes)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
