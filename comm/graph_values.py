"""What has to change in captured CUDA graphs when a buffer is replaced. Pure: bytes in, bytes out.

A graph's nodes carry their parameters by value: addresses of the buffer and of its device-side
context, and the rank. Nobody documents which parameter is what, so it is found out: the same step,
the *probe*, is captured with the old buffer and with the new one, and compared.

1. A parameter of a kernel that differs between the probes is replaced in every graph, by the old
   value that it has there. A value that no probe showed is a reason to refuse. Pointers into memory
   that torch owned when the old probe was captured differ for torch's own reasons and stay.
2. Any word of any node that points into the old buffer's memory moves to the same offset in the
   new one: this reaches kernels of the engine, copies and fills.
3. Any other word that holds an address which rule 1 replaces is replaced too if it is part of a
   struct; if it is a parameter of its own, a kernel that the probe did not launch depends on the
   old buffer, and the graphs are refused.

Padding inside of a parameter of eight bytes would look like rule 1's business. It is known of one
kind of kernel, torch's copies from type to type, by their names, and does not count there.

The halves of a double buffer have addresses of their own, so the parity of every node is part of
what rule 1 goes by; both probes must start at the same parity, or halves would be swapped.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from dynamo_elastic.comm.base import Span
from dynamo_elastic.errors import RebindRefused

WORD_BYTES = 8
_HALF_WORD_BYTES = 4
_CASTS = ("LoadWithCastILi1E", "StoreWithCastILi1E")
"""In the names of torch's kernels with parameters that are a type of one byte, three bytes that
nobody initialises, and a size."""
LEAST_POINTER = 1 << 32
"""Device addresses are far above it; by-value numbers and flags are below."""


class NodeKind(StrEnum):
    KERNEL = "kernel"
    MEMCPY = "memcpy"
    MEMSET = "memset"
    OTHER = "other"
    """Without parameters of interest: events, empty nodes."""
    OPAQUE = "opaque"
    """Holds work that can't be looked into: a child graph, a conditional."""


@dataclass(frozen=True, slots=True)
class Node:
    """One node: a kernel's name, launch geometry and parameters, each in its own bytes; of a copy
    or fill the device addresses (8 bytes each) and, as `launch`, its extent."""

    kind: NodeKind
    name: str
    values: tuple[bytes, ...] = ()
    launch: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Probe:
    """One captured step of whole layers, and the world that it was captured in."""

    nodes: tuple[Node, ...]
    owned: tuple[Span, ...]
    """Memory that torch's allocator held then."""
    buffer: Span
    parity: int
    """Of the buffer, before the step."""


Word = tuple[int, int, int]
"""Parameter, offset in it, size: 8 bytes, or 4."""
Slot = tuple[str, int, int]
"""Kernel, parameter, offset."""


class Owned:
    """Which addresses lie in any of some spans."""

    def __init__(self, spans: Iterable[Span]) -> None:
        in_order = sorted((s.address, s.address + s.size_bytes) for s in spans)
        self._starts = [start for start, _ in in_order]
        self._ends = [end for _, end in in_order]

    def __contains__(self, address: int) -> bool:
        index = bisect_right(self._starts, address) - 1
        return index >= 0 and address < self._ends[index]


@dataclass(frozen=True, slots=True)
class Substitution:
    """What differs between two probes."""

    renamed: Mapping[Slot, Mapping[bytes, bytes]]
    """Of each slot that differs anywhere: every value seen there, old to new."""
    pointers: Mapping[int, int]
    """Addresses outside the buffer that were replaced."""
    old: Probe
    new: Probe


def derive(old: Probe, new: Probe) -> Substitution:
    """What to replace so that what was captured like `old` acts like `new`. Raises RebindRefused if
    the probes differ in more than values, or contradict each other."""
    _check_comparable(old, new)
    comparison = _Comparison(old, new)
    for before, after in zip(old.nodes, new.nodes, strict=True):
        if before.kind is NodeKind.KERNEL:
            comparison.add(before, after)
    renamed = comparison.renamed()
    return Substitution(renamed, _replaced_pointers(renamed), old, new)


class _Comparison:
    """What rule 1 learns from pairs of kernels."""

    def __init__(self, old: Probe, new: Probe) -> None:
        self._old, self._new = old.buffer, new.buffer
        self._old_owned, self._new_owned = Owned(old.owned), Owned(new.owned)
        self._seen: dict[Slot, dict[bytes, bytes]] = defaultdict(dict)
        self._conflicts: set[Slot] = set()
        self._dependent: set[str] = set()
        """Kernels in which a parameter of its own differs. In the others, words of structs may
        differ: that is padding, which nobody initialises."""

    def add(self, before: Node, after: Node) -> None:
        for parameter, offset, size in words(before.values):
            was = before.values[parameter][offset : offset + size]
            now = after.values[parameter][offset : offset + size]
            alone = len(before.values[parameter]) <= WORD_BYTES
            if alone and _differ_in_padding(before.name, was, now):
                continue
            if size == WORD_BYTES and self._stays(before.name, number(was), number(now), alone):
                continue
            slot = (before.name, parameter, offset)
            if self._seen[slot].setdefault(was, now) != now:
                self._conflicts.add(slot)
            if alone and was != now:
                self._dependent.add(before.name)

    def _stays(self, kernel: str, was: int, now: int, alone: bool) -> bool:
        """Whether the address is torch's, or in the buffer and so up to rule 2."""
        if was in self._old_owned:
            return True
        offset = offset_in(was, self._old)
        if offset is not None:
            if alone and offset != offset_in(now, self._new):
                raise RebindRefused(f"{short(kernel)} uses another part of the new buffer")
            return True
        if alone and now in self._new_owned and now != was:
            raise RebindRefused(f"{short(kernel)} got memory of torch where it had other memory")
        return False

    def renamed(self) -> dict[Slot, dict[bytes, bytes]]:
        for kernel, parameter, _ in self._conflicts:
            if kernel in self._dependent:
                raise RebindRefused(f"parameter {parameter} of {short(kernel)} has two new values")
        return {
            slot: values
            for slot, values in self._seen.items()
            if slot[0] in self._dependent and any(was != now for was, now in values.items())
        }


def _differ_in_padding(kernel: str, was: bytes, now: bytes) -> bool:
    """Whether they are one type and size of a kernel that converts, but for what lies between."""
    converts = len(was) == WORD_BYTES and any(cast in kernel for cast in _CASTS)
    return converts and was != now and (was[0], was[4:]) == (now[0], now[4:])


def _check_comparable(old: Probe, new: Probe) -> None:
    if old.parity != new.parity:
        raise RebindRefused("the probes start at different halves of the double buffer")
    if old.buffer.size_bytes != new.buffer.size_bytes:
        raise RebindRefused("the buffers differ in size, so in layout")
    if len(old.nodes) != len(new.nodes):
        raise RebindRefused(f"the probes have {len(old.nodes)} and {len(new.nodes)} nodes")
    for before, after in zip(old.nodes, new.nodes, strict=True):
        if (before.kind, before.name) != (after.kind, after.name):
            raise RebindRefused(f"{short(before.name)} became {short(after.name)} in the probe")
        if before.launch != after.launch or _sizes(before) != _sizes(after):
            raise RebindRefused(f"{short(before.name)} is launched in another way")


def _replaced_pointers(renamed: Mapping[Slot, Mapping[bytes, bytes]]) -> dict[int, int]:
    pointers: dict[int, int] = {}
    for (kernel, _, _), values in renamed.items():
        for was, now in values.items():
            if len(was) != WORD_BYTES or was == now or number(was) < LEAST_POINTER:
                continue
            if pointers.setdefault(number(was), number(now)) != number(now):
                raise RebindRefused(f"an address in {short(kernel)} has two new values")
    return pointers


def words(values: Sequence[bytes]) -> Iterator[Word]:
    """The words that can hold an address or a rank. Parameters of one or two bytes are flags, or
    functors without content, whose bytes mean nothing."""
    for parameter, value in enumerate(values):
        whole = len(value) // WORD_BYTES * WORD_BYTES
        for offset in range(0, whole, WORD_BYTES):
            yield parameter, offset, WORD_BYTES
        if len(value) - whole >= _HALF_WORD_BYTES:
            yield parameter, whole, _HALF_WORD_BYTES


def number(raw: bytes) -> int:
    return int.from_bytes(raw, "little")


def offset_in(address: int, span: Span) -> int | None:
    inside = 0 <= address - span.address < span.size_bytes
    return address - span.address if inside else None


def _sizes(node: Node) -> list[int]:
    return [len(value) for value in node.values]


def short(name: str) -> str:
    return name if len(name) <= 60 else name[:57] + "..."
