"""The nodes of captured graphs, ordered by what a rebind looks for. Pure, like graph_values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from dynamo_elastic.comm.base import Span
from dynamo_elastic.comm.graph_values import (
    LEAST_POINTER,
    WORD_BYTES,
    Node,
    NodeKind,
    Owned,
    Slot,
    Substitution,
    number,
    offset_in,
    short,
    words,
)
from dynamo_elastic.errors import RebindRefused

Place = tuple[int, int, int, int]
"""Graph, node, parameter, offset in it."""
Changes = dict[tuple[int, int], dict[int, bytes]]
"""(graph, node) -> parameter -> its new bytes."""


class GraphIndex:
    """All nodes of some graphs, ordered by what a rebind looks for; built before the snapshot.

    `owned` is what torch owned when the graphs had been captured. Raises RebindRefused for a graph
    that can't be looked into.
    """

    def __init__(self, graphs: Sequence[Sequence[Node]], owned: Sequence[Span]) -> None:
        self._nodes = [list(nodes) for nodes in graphs]
        self._owned = Owned(owned)
        self._by_kernel: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self._by_pointer: dict[int, list[Place]] = defaultdict(list)
        for graph, nodes in enumerate(graphs):
            for index, node in enumerate(nodes):
                if node.kind is NodeKind.OPAQUE:
                    raise RebindRefused(f"graph {graph} holds a {node.name}")
                if node.kind is NodeKind.KERNEL:
                    self._by_kernel[node.name].append((graph, index))
                self._index_pointers(graph, index, node)

    def _index_pointers(self, graph: int, index: int, node: Node) -> None:
        for parameter, offset, size in words(node.values):
            if size != WORD_BYTES:
                continue
            address = number(node.values[parameter][offset : offset + size])
            if address >= LEAST_POINTER and address not in self._owned:
                self._by_pointer[address].append((graph, index, parameter, offset))

    def plan(self, substitution: Substitution) -> Changes:
        """Every parameter to write; this writes none. Raises RebindRefused."""
        work = _Work(self._nodes)
        for slot, values in substitution.renamed.items():
            self._rename(work, slot, values)
        for address, places in self._by_pointer.items():
            offset = offset_in(address, substitution.old.buffer)
            if offset is not None:
                moved = substitution.new.buffer.address + offset
                for place in places:
                    work.put(place, moved)
        for address, replacement in substitution.pointers.items():
            for place in self._by_pointer.get(address, ()):
                if not work.has(place):
                    self._check_in_struct(place)
                    work.put(place, replacement)
        return work.changes()

    def _rename(self, work: _Work, slot: Slot, values: Mapping[bytes, bytes]) -> None:
        kernel, parameter, offset = slot
        size = len(next(iter(values)))
        for graph, index in self._by_kernel[kernel]:
            was = self._nodes[graph][index].values[parameter][offset : offset + size]
            if size == WORD_BYTES and number(was) in self._owned:
                continue
            now = values.get(was)
            if now is None:
                raise RebindRefused(
                    f"parameter {parameter} of {short(kernel)} in graph {graph} is none that the "
                    "probe showed"
                )
            work.put((graph, index, parameter, offset), now)

    def _check_in_struct(self, place: Place) -> None:
        graph, index, parameter, _ = place
        node = self._nodes[graph][index]
        if len(node.values[parameter]) <= WORD_BYTES:
            raise RebindRefused(
                f"{short(node.name)} in graph {graph} depends on the old buffer, and the probe "
                "did not show how"
            )

    def settle(self, changes: Changes, substitution: Substitution) -> None:
        """`changes` have been written: they are what the next plan starts from."""
        for (graph, index), values in changes.items():
            node = self._nodes[graph][index]
            merged = tuple(values.get(i, value) for i, value in enumerate(node.values))
            self._nodes[graph][index] = Node(node.kind, node.name, merged, node.launch)
        shift = substitution.new.buffer.address - substitution.old.buffer.address
        moved: dict[int, list[Place]] = defaultdict(list)
        for address, places in self._by_pointer.items():
            # Either rule, never both: a new buffer may lie where the old one's context was.
            inside = offset_in(address, substitution.old.buffer) is not None
            after = address + shift if inside else substitution.pointers.get(address, address)
            moved[after] += places
        self._by_pointer = moved
        # Torch's memory as it is now: what it owned earlier may be another buffer's tomorrow.
        self._owned = Owned(substitution.new.owned)


class _Work:
    """New bytes of parameters, put together word by word."""

    def __init__(self, nodes: Sequence[Sequence[Node]]) -> None:
        self._nodes = nodes
        self._drafts: dict[tuple[int, int, int], bytearray] = {}
        self._done: set[Place] = set()

    def put(self, place: Place, value: bytes | int) -> None:
        graph, index, parameter, offset = place
        draft = self._drafts.get(place[:3])
        if draft is None:
            draft = bytearray(self._nodes[graph][index].values[parameter])
            self._drafts[graph, index, parameter] = draft
        raw = value.to_bytes(WORD_BYTES, "little") if isinstance(value, int) else value
        draft[offset : offset + len(raw)] = raw
        self._done.add(place)

    def has(self, place: Place) -> bool:
        return place in self._done

    def changes(self) -> Changes:
        changes: Changes = defaultdict(dict)
        for (graph, index, parameter), draft in self._drafts.items():
            if draft != self._nodes[graph][index].values[parameter]:
                changes[graph, index][parameter] = bytes(draft)
        return dict(changes)
