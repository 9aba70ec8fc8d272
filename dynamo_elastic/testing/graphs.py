"""A GraphDriver without CUDA: graphs are lists of kernels that a made-up buffer has launched.

The kernels of the buffer hold what NIXL EP's hold: addresses of the buffer's halves, of a context
and of a workspace outside it, the rank by value, and pointers to torch's memory, which differ from
capture to capture. `live` nodes say which buffer and rank a replay would use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from dynamo_elastic.comm.base import Span
from dynamo_elastic.comm.graph_values import Node, NodeKind, Probe
from dynamo_elastic.errors import RebindFailed, RebindRefused

MIB = 1 << 20
BUFFER_BYTES = 8 * MIB
HALF_BYTES = BUFFER_BYTES // 2
_TORCH = Span(0x7E00_0000_0000, 64 * MIB)


def pointer(address: int) -> bytes:
    return address.to_bytes(8, "little")


def integer(value: int) -> bytes:
    return value.to_bytes(4, "little")


@dataclass
class FakeWorld:
    """Memory of one process: torch's, and that of buffers, at addresses that never come twice."""

    owned: list[Span] = field(default_factory=lambda: [_TORCH])
    _torch_next: count[int] = field(default_factory=lambda: count(_TORCH.address, 4096))
    _next: count[int] = field(default_factory=lambda: count(0x7F00_0000_0000, 64 * MIB))

    def torch_address(self) -> int:
        return next(self._torch_next)

    def buffer(self, rank: int, at: int | None = None, context_at: int | None = None) -> FakeBuffer:
        first = next(self._next) if at is None else at
        context = next(self._next) if context_at is None else context_at
        return FakeBuffer(self, rank, Span(first, BUFFER_BYTES), context, context + 2 * MIB)


@dataclass
class FakeBuffer:
    """What a step's kernels refer to."""

    world: FakeWorld
    rank: int
    memory: Span
    context: int
    workspace: int
    parity: int = 0

    def layer(self, layer: int = 0) -> list[Node]:
        """A dispatch, an expert that writes into the buffer, a fill, a copy, and a combine."""
        first = self._transport("dispatch", layer)
        staging = self.memory.address + self.parity * HALF_BYTES + 4096
        expert = Node(
            NodeKind.KERNEL,
            "expert",
            (
                integer(128),
                pointer(self.world.torch_address()) + pointer(staging) + pointer(layer),
            ),
            (4, 1, 1),
        )
        fill = Node(NodeKind.MEMSET, "memset", (pointer(staging),), (1, 64, 1))
        copy = Node(
            NodeKind.MEMCPY,
            "memcpy",
            (pointer(self.world.torch_address()), pointer(staging + 64)),
            (64, 1, 1),
        )
        return [first, expert, fill, copy, self._transport("combine", layer)]

    def _transport(self, kind: str, layer: int) -> Node:
        half = self.memory.address + self.parity * HALF_BYTES
        other = self.memory.address + (1 - self.parity) * HALF_BYTES
        self.parity = 1 - self.parity
        return Node(
            NodeKind.KERNEL,
            f"{kind}_kernel",
            (
                pointer(self.world.torch_address()),
                pointer(half),
                pointer(other + 128),
                pointer(self.context),
                integer(64),
                integer(self.rank),
                b"\x01",
                pointer(self.workspace),
                pointer(500_000_000),
            ),
            (132, 1, 1),
        )


class FakeGraph:
    """A PatchableGraph that a test can look at. Node `breaks_at` can't be written."""

    def __init__(self, nodes: Sequence[Node], breaks_at: int | None = None) -> None:
        self._nodes = tuple(nodes)
        self.live = list(nodes)
        """As a replay would see them."""
        self.written = False
        self.breaks_at = breaks_at

    @property
    def nodes(self) -> Sequence[Node]:
        return self._nodes

    def write(self, index: int, values: Mapping[int, bytes]) -> None:
        if index == self.breaks_at:
            raise RebindFailed("the driver refused")
        self.written = True
        node = self.live[index]
        for parameter, value in values.items():
            if len(value) != len(node.values[parameter]):
                raise RebindFailed("a parameter has another size")
        merged = tuple(values.get(i, value) for i, value in enumerate(node.values))
        self.live[index] = Node(node.kind, node.name, merged, node.launch)


class FakeGraphDriver:
    """A GraphDriver over FakeGraphs; a step appends its nodes to `capturing`."""

    def __init__(self, world: FakeWorld) -> None:
        self._world = world
        self.capturing: list[Node] | None = None

    def open(self, graph: FakeGraph) -> FakeGraph:
        if graph.written:
            raise RebindRefused("a graph was rebound before")
        return graph

    def probe(self, step: Callable[[], None], buffer: Span, parity: int) -> Probe:
        if self.capturing is not None:
            raise RebindRefused("a capture is under way")
        self.capturing = []
        try:
            step()
            return Probe(tuple(self.capturing), tuple(self._world.owned), buffer, parity)
        finally:
            self.capturing = None


def capture(buffer: FakeBuffer, layers: int) -> FakeGraph:
    """A graph of so many layers."""
    return FakeGraph([node for layer in range(layers) for node in buffer.layer(layer)])


def probe(driver: FakeGraphDriver, buffer: FakeBuffer, layers: int = 1) -> Probe:
    """As an engine probes its buffer."""

    def step() -> None:
        if driver.capturing is not None:
            for layer in range(layers):
                driver.capturing += buffer.layer(layer)

    return driver.probe(step, buffer.memory, buffer.parity)
