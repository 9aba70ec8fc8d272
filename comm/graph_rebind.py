"""CUDA graphs outlive the buffer that they were captured with.

    keep_graphs_patchable()                       # before the engine captures (cuda_graphs)
    ... capture with the first buffer ...
    rebinder = GraphRebinder(driver, graphs, driver.probe(step, buffer.memory, buffer.parity))
    ... snapshot; another process life, another buffer, perhaps another rank ...
    rebinder.rebind(driver.probe(step, fresh.memory, fresh.parity))
    verify(replay, eager, tolerance=0.01)

The constructor reads all nodes, which takes a while, and belongs before the snapshot; rebind()
takes milliseconds. Whatever it raises, the remedy is to capture again. How it finds out what to
change is told in `graph_values`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from dynamo_elastic.comm.base import Span
from dynamo_elastic.comm.graph_index import Changes, GraphIndex
from dynamo_elastic.comm.graph_values import Node, NodeKind, Probe, derive
from dynamo_elastic.errors import RebindFailed, RebindRefused
from dynamo_elastic.failpoints import failpoint

G = TypeVar("G", contravariant=True)


class PatchableGraph(Protocol):
    """One executable graph whose template is still there."""

    @property
    def nodes(self) -> Sequence[Node]:
        """As captured, in an order of its own that never changes."""
        ...

    def write(self, index: int, values: Mapping[int, bytes]) -> None:
        """Give node `index` of the executable graph new `values` by parameter; the others stay.
        Raises RebindFailed."""
        ...


class GraphDriver(Protocol[G]):
    """What a rebind needs of CUDA."""

    def open(self, graph: G) -> PatchableGraph:
        """Read a captured graph, and instantiate it if it is not. Raises RebindRefused if its
        template is gone, or the graph was written to before: a write changes what is launched, not
        the template that is read here."""
        ...

    def probe(self, step: Callable[[], None], buffer: Span, parity: int) -> Probe:
        """Run `step` once, then capture it. It launches whole layers: every kernel that the graphs
        launch on the buffer, at every parity at which they do. Raises RebindRefused."""
        ...


@dataclass(frozen=True, slots=True)
class Rebound:
    """What a rebind did."""

    written: Mapping[NodeKind, int]
    """Nodes, by kind."""
    values: int
    """Different old values that were replaced by others, outside the buffer's own memory."""
    moved: bool
    """Whether the buffer has another address."""


class GraphRebinder:
    """Keeps `graphs` usable from buffer to buffer. `probe` was captured like them.

    The graphs must have no peer in use, and nothing in flight, when they are rebound. One rebinder
    serves them from buffer to buffer: another one that comes later could not read them.
    """

    def __init__(self, driver: GraphDriver[G], graphs: Sequence[G], probe: Probe) -> None:
        self._graphs = [driver.open(graph) for graph in graphs]
        self._index = GraphIndex([graph.nodes for graph in self._graphs], probe.owned)
        self._probe = probe
        self._broken = False

    @property
    def node_count(self) -> int:
        return sum(len(graph.nodes) for graph in self._graphs)

    def check(self, other: Probe) -> None:
        """Return if the graphs could be rebound to what `other` was captured with, say a second
        buffer of another rank; changes nothing. Raises RebindRefused: don't snapshot these graphs.
        """
        self._index.plan(derive(self._probe, other))

    def rebind(self, probe: Probe) -> Rebound:
        """The graphs use the buffer that `probe` was captured with. Raises RebindRefused with the
        graphs as they were, or RebindFailed with graphs that must not be replayed."""
        if self._broken:
            raise RebindRefused("an earlier rebind of these graphs failed half-way")
        substitution = derive(self._probe, probe)
        changes = self._index.plan(substitution)
        failpoint("rebind.planned")
        self._broken = True
        self._write(changes)
        self._broken = False
        self._index.settle(changes, substitution)
        self._probe = probe
        return Rebound(
            Counter(self._graphs[graph].nodes[index].kind for graph, index in changes),
            sum(
                was != now
                for values in substitution.renamed.values()
                for was, now in values.items()
            ),
            substitution.old.buffer.address != substitution.new.buffer.address,
        )

    def _write(self, changes: Changes) -> None:
        for (graph, index), values in changes.items():
            failpoint("rebind.before_node")
            self._graphs[graph].write(index, values)


def verify(
    replay: Callable[[], torch.Tensor], eager: Callable[[], torch.Tensor], *, tolerance: float
) -> float:
    """The relative error (norm of the difference by norm) of a replay against the same step run
    without a graph; each call returns the step's result. Raises RebindFailed above `tolerance`, or
    if it is not a number."""
    expected = eager().float().clone()
    actual = replay().float()
    error = float((actual - expected).norm() / expected.norm().clamp_min(1e-12))
    if not error <= tolerance:
        raise RebindFailed(f"a replay differs from eager by {error:.4f}, more than {tolerance}")
    return error
