from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_elastic.comm.base import Span
from dynamo_elastic.comm.graph_index import GraphIndex
from dynamo_elastic.comm.graph_rebind import GraphRebinder, verify
from dynamo_elastic.comm.graph_values import Node, NodeKind, Probe, derive
from dynamo_elastic.errors import RebindFailed, RebindRefused
from dynamo_elastic.testing.graphs import (
    BUFFER_BYTES,
    HALF_BYTES,
    FakeBuffer,
    FakeGraph,
    FakeGraphDriver,
    FakeWorld,
    capture,
    integer,
    pointer,
    probe,
)


class World:
    """A process with a buffer of rank 0, graphs captured with it, and their rebinder."""

    def __init__(self, layers: tuple[int, ...] = (1, 3)) -> None:
        self.memory = FakeWorld()
        self.driver = FakeGraphDriver(self.memory)
        self.buffer = self.memory.buffer(rank=0)
        self.graphs = [capture(self.buffer, count) for count in layers]
        self.first = probe(self.driver, self.buffer)
        self.rebinder = GraphRebinder(self.driver, self.graphs, self.first)


def expected(graph: FakeGraph, old: FakeBuffer, new: FakeBuffer) -> list[Node]:
    """`graph` as it would have been captured with `new`, torch's pointers as they are."""
    shift = new.memory.address - old.memory.address
    outside = {
        pointer(old.context): pointer(new.context),
        pointer(old.workspace): pointer(new.workspace),
    }

    def word(raw: bytes) -> bytes:
        address = int.from_bytes(raw, "little")
        if 0 <= address - old.memory.address < BUFFER_BYTES:
            return pointer(address + shift)
        return outside.get(raw, raw)

    nodes = []
    for node in graph.nodes:
        values = []
        for index, value in enumerate(node.values):
            if node.kind is NodeKind.KERNEL and node.name != "expert" and index == 5:
                value = integer(new.rank)
            elif len(value) >= 8:
                value = b"".join(word(value[i : i + 8]) for i in range(0, len(value), 8))
            values.append(value)
        nodes.append(replace(node, values=tuple(values)))
    return nodes


@given(
    rank=st.integers(0, 15),
    layers=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    address=st.integers(0x7F80_0000_0000 // 4096, 0x7FFF_0000_0000 // 4096).map(lambda n: n * 4096),
)
@settings(max_examples=60, deadline=None)
def test_every_reference_to_the_buffer_follows_and_nothing_else(
    rank: int, layers: list[int], address: int
) -> None:
    world = World(tuple(layers))
    fresh = world.memory.buffer(rank, at=address)
    world.rebinder.rebind(probe(world.driver, fresh))
    for graph in world.graphs:
        assert graph.live == expected(graph, world.buffer, fresh)


@given(ranks=st.lists(st.integers(0, 7), min_size=2, max_size=5))
@settings(max_examples=30, deadline=None)
def test_from_buffer_to_buffer(ranks: list[int]) -> None:
    world = World()
    for rank in ranks:
        last = world.memory.buffer(rank)
        world.rebinder.rebind(probe(world.driver, last))
    for graph in world.graphs:
        assert graph.live == expected(graph, world.buffer, last)


@given(
    places=st.lists(
        st.lists(st.integers(0, 3), min_size=2, max_size=2, unique=True), min_size=1, max_size=8
    )
)
@settings(max_examples=80, deadline=None)
def test_memory_that_is_freed_is_used_again(places: list[list[int]]) -> None:
    """Buffers and their contexts come to lie wherever others have lain before, as a driver does
    it: seen on a GPU, where a later rebind took a new buffer's own address for an old context."""
    world = World()
    ground = [0x7F40_0000_0000 + slot * BUFFER_BYTES for slot in range(4)]
    for rank, (memory, context) in enumerate(places):
        last = world.memory.buffer(rank % 8, at=ground[memory], context_at=ground[context])
        world.rebinder.rebind(probe(world.driver, last))
        for graph in world.graphs:
            assert graph.live == expected(graph, world.buffer, last)


def test_the_report_counts_what_was_written() -> None:
    world = World(layers=(2,))
    rebound = world.rebinder.rebind(probe(world.driver, world.memory.buffer(rank=3)))
    assert dict(rebound.written) == {
        NodeKind.KERNEL: 6,
        NodeKind.MEMSET: 2,
        NodeKind.MEMCPY: 2,
    }
    assert rebound.moved
    # Context, workspace and rank, of dispatch and of combine.
    assert rebound.values == 6
    assert world.rebinder.node_count == 10


def test_the_same_buffer_again_writes_nothing() -> None:
    world = World()
    rebound = world.rebinder.rebind(probe(world.driver, world.buffer))
    assert not rebound.written
    assert not rebound.moved


def test_a_buffer_at_the_old_address_with_another_context() -> None:
    world = World()
    fresh = world.memory.buffer(rank=1, at=world.buffer.memory.address)
    rebound = world.rebinder.rebind(probe(world.driver, fresh))
    assert set(rebound.written) == {NodeKind.KERNEL}
    assert not rebound.moved
    for graph in world.graphs:
        assert graph.live == expected(graph, world.buffer, fresh)


def test_memory_that_torch_takes_over_later_does_not_hide_old_pointers() -> None:
    world = World()
    world.memory.owned.append(Span(world.buffer.context, 1 << 20))
    fresh = world.memory.buffer(rank=1)
    world.rebinder.rebind(probe(world.driver, fresh))
    for graph in world.graphs:
        assert graph.live == expected(graph, world.buffer, fresh)


def refused(world: World, changed: Probe, why: str) -> None:
    with pytest.raises(RebindRefused, match=why):
        world.rebinder.rebind(changed)
    for graph in world.graphs:
        assert graph.live == list(graph.nodes)


def edit(captured: Probe, index: int, **changes: object) -> Probe:
    nodes = list(captured.nodes)
    nodes[index] = replace(nodes[index], **changes)  # type: ignore[arg-type]
    return replace(captured, nodes=tuple(nodes))


def with_value(captured: Probe, index: int, parameter: int, value: bytes) -> Probe:
    values = list(captured.nodes[index].values)
    values[parameter] = value
    return edit(captured, index, values=tuple(values))


def test_probes_that_differ_in_more_than_values() -> None:
    world = World()
    fresh = world.memory.buffer(rank=1)
    good = probe(world.driver, fresh)
    refused(world, edit(good, 0, name="another_kernel"), "became another_kernel")
    refused(world, edit(good, 0, launch=(1, 1, 1)), "launched in another way")
    refused(world, with_value(good, 0, 4, b"\0" * 8), "launched in another way")
    refused(world, replace(good, nodes=good.nodes[:-1]), "5 and 4 nodes")
    refused(world, replace(good, buffer=Span(good.buffer.address, 4096)), "differ in size")
    refused(world, replace(good, parity=1), "different halves")
    world.rebinder.rebind(good)


def test_halves_of_the_buffer_that_changed_places() -> None:
    world = World()
    fresh = world.memory.buffer(rank=1)
    fresh.parity = 1
    captured = probe(world.driver, fresh)
    assert captured.parity == 1
    refused(world, replace(captured, parity=0), "another part of the new buffer")


def test_one_old_value_with_two_new_ones() -> None:
    world = World()
    fresh = world.memory.buffer(rank=1)
    two = probe(world.driver, fresh, layers=2)
    world.rebinder = GraphRebinder(
        world.driver, world.graphs, probe(world.driver, world.buffer, layers=2)
    )
    refused(world, with_value(two, 5, 3, pointer(fresh.context + 64)), "two new values")
    refused(world, with_value(two, 5, 5, integer(2)), "two new values")


def test_one_address_that_two_kernels_replace_differently() -> None:
    world = World()
    fresh = world.memory.buffer(rank=1)
    captured = probe(world.driver, fresh)
    refused(world, with_value(captured, 4, 3, pointer(fresh.context + 64)), "two new values")


def test_a_value_that_no_probe_showed() -> None:
    world = World()
    graph = world.graphs[0]
    strange = replace(
        graph.nodes[0], values=(*graph.nodes[0].values[:5], integer(9), *graph.nodes[0].values[6:])
    )
    world.graphs[0] = FakeGraph([strange, *graph.nodes[1:]])
    world.rebinder = GraphRebinder(world.driver, world.graphs, world.first)
    refused(world, probe(world.driver, world.memory.buffer(rank=1)), "none that the probe showed")


def test_a_kernel_outside_the_probe_that_depends_on_the_buffer() -> None:
    world = World()
    stranger = Node(NodeKind.KERNEL, "barrier", (pointer(world.buffer.context), integer(0)))
    world.graphs.append(FakeGraph([stranger]))
    world.rebinder = GraphRebinder(world.driver, world.graphs, world.first)
    refused(world, probe(world.driver, world.memory.buffer(rank=1)), "the probe did not show how")


def test_an_old_address_in_a_struct_is_replaced() -> None:
    world = World()
    packed = Node(NodeKind.KERNEL, "fused", (pointer(7) + pointer(world.buffer.context),))
    world.graphs.append(FakeGraph([packed]))
    world.rebinder = GraphRebinder(world.driver, world.graphs, world.first)
    for rank in (1, 2, 3):
        fresh = world.memory.buffer(rank)
        world.rebinder.rebind(probe(world.driver, fresh))
        assert world.graphs[-1].live[0].values == (pointer(7) + pointer(fresh.context),)


def test_memory_of_torch_in_the_place_of_an_old_address_stays() -> None:
    world = World()
    graph = world.graphs[0]
    values = list(graph.nodes[0].values)
    values[3] = pointer(world.memory.torch_address())
    world.graphs[0] = FakeGraph([replace(graph.nodes[0], values=tuple(values)), *graph.nodes[1:]])
    world.rebinder = GraphRebinder(world.driver, world.graphs, world.first)
    fresh = world.memory.buffer(rank=1)
    world.rebinder.rebind(probe(world.driver, fresh))
    assert world.graphs[0].live[0].values[3] == values[3]
    assert world.graphs[0].live[0].values[5] == integer(1)


def test_padding_in_structs_of_other_kernels_is_no_reason_to_refuse() -> None:
    world = World()
    noisy = Node(
        NodeKind.KERNEL, "elementwise", (integer(64), b"\x11" * 8 + pointer(1) + b"\x22" * 8)
    )
    again = replace(noisy, values=(integer(64), b"\x33" * 8 + pointer(1) + b"\x22" * 8))
    first = replace(world.first, nodes=(*world.first.nodes, noisy, noisy))
    other = replace(noisy, values=(integer(64), b"\x44" * 8 + pointer(1) + b"\x55" * 8))
    world.graphs.append(FakeGraph([noisy, other]))
    world.rebinder = GraphRebinder(world.driver, world.graphs, first)
    fresh = world.memory.buffer(rank=1)
    captured = probe(world.driver, fresh)
    world.rebinder.rebind(replace(captured, nodes=(*captured.nodes, again, noisy)))
    for graph in world.graphs:
        assert graph.live == expected(graph, world.buffer, fresh)


def cast_kernel(padding: bytes, type_number: int = 15) -> Node:
    """As torch 2.14 launches it; seen on a GPU."""
    name = "_ZN2at6native27unrolled_elementwise_kernelINS0_6memory12LoadWithCastILi1EEE"
    loader = bytes([type_number]) + padding + integer(2)
    return Node(NodeKind.KERNEL, name, (integer(64), b"\0", pointer(1) + pointer(2), loader))


@given(
    paddings=st.lists(st.binary(min_size=3, max_size=3), min_size=4, max_size=4),
    shown=st.booleans(),
)
def test_padding_in_casts_of_torch_is_no_reason_to_refuse(
    paddings: list[bytes], shown: bool
) -> None:
    world = World()
    before, after, *others = map(cast_kernel, paddings)
    world.graphs.append(FakeGraph([*others, before] if shown else others))
    first = replace(world.first, nodes=(*world.first.nodes, before))
    world.rebinder = GraphRebinder(world.driver, world.graphs, first)
    fresh = world.memory.buffer(rank=1)
    captured = probe(world.driver, fresh)
    world.rebinder.rebind(replace(captured, nodes=(*captured.nodes, after)))
    for graph in world.graphs:
        assert graph.live == expected(graph, world.buffer, fresh)


def test_another_type_in_a_cast_is_more_than_padding() -> None:
    world = World()
    first = replace(world.first, nodes=(*world.first.nodes, cast_kernel(b"\0\0\0")))
    graph = FakeGraph([cast_kernel(b"\1\2\3", type_number=7)])
    world.rebinder = GraphRebinder(world.driver, [graph], first)
    captured = probe(world.driver, world.memory.buffer(rank=1))
    changed = replace(captured, nodes=(*captured.nodes, cast_kernel(b"\0\0\0", type_number=6)))
    refused(world, changed, "none that the probe showed")


def test_memory_of_torch_where_there_was_other_memory() -> None:
    world = World()
    captured = probe(world.driver, world.memory.buffer(rank=1))
    taken = with_value(captured, 0, 3, pointer(world.memory.torch_address()))
    refused(world, taken, "memory of torch")


@given(where=st.integers(0, BUFFER_BYTES - 1), halves=st.booleans())
def test_any_address_of_the_buffer_moves_by_the_same_distance(where: int, halves: bool) -> None:
    memory = FakeWorld()
    old, new = memory.buffer(0), memory.buffer(0)
    offset = where % HALF_BYTES if halves else where
    graph = [Node(NodeKind.KERNEL, "any", (pointer(old.memory.address + offset),))]
    before = Probe((), (), old.memory, 0)
    after = Probe((), (), new.memory, 0)
    changes = GraphIndex([graph], ()).plan(derive(before, after))
    assert changes == {(0, 0): {0: pointer(new.memory.address + offset)}}


@given(raw=st.binary(min_size=8, max_size=64))
def test_words_that_refer_to_nothing_of_the_buffer_stay(raw: bytes) -> None:
    memory = FakeWorld()
    old, new = memory.buffer(0), memory.buffer(0)
    words = {int.from_bytes(raw[i : i + 8], "little") for i in range(0, len(raw) - 7, 8)}
    if any(0 <= word - old.memory.address < BUFFER_BYTES for word in words):
        return
    graph = [Node(NodeKind.KERNEL, "any", (raw,))]
    before, after = (Probe((), (), b.memory, 0) for b in (old, new))
    assert GraphIndex([graph], ()).plan(derive(before, after)) == {}


def test_a_graph_that_can_not_be_looked_into() -> None:
    world = World()
    with pytest.raises(RebindRefused, match="holds a CHILD"):
        GraphRebinder(world.driver, [FakeGraph([Node(NodeKind.OPAQUE, "CHILD")])], world.first)


def test_check_against_another_rank_changes_nothing() -> None:
    world = World()
    world.rebinder.check(probe(world.driver, world.memory.buffer(rank=2)))
    assert world.graphs[0].live == list(world.graphs[0].nodes)
    bad = edit(probe(world.driver, world.memory.buffer(rank=2)), 0, launch=(2, 2, 2))
    with pytest.raises(RebindRefused):
        world.rebinder.check(bad)


def test_a_write_that_fails_half_way_ends_the_graphs() -> None:
    world = World()
    world.graphs[1].breaks_at = 4
    fresh = world.memory.buffer(rank=1)
    with pytest.raises(RebindFailed):
        world.rebinder.rebind(probe(world.driver, fresh))
    with pytest.raises(RebindRefused, match="failed half-way"):
        world.rebinder.rebind(probe(world.driver, fresh))


def test_who_did_not_rebind_graphs_can_not_read_them() -> None:
    """What they were captured with is not what they launch, and would be taken for it."""
    world = World()
    fresh = world.memory.buffer(rank=1)
    world.rebinder.rebind(probe(world.driver, fresh))
    with pytest.raises(RebindRefused, match="rebound before"):
        GraphRebinder(world.driver, world.graphs, probe(world.driver, fresh))
    last = world.memory.buffer(rank=2)
    world.rebinder.rebind(probe(world.driver, last))
    for graph in world.graphs:
        assert graph.live == expected(graph, world.buffer, last)


def test_verify_compares_a_replay_with_eager() -> None:
    right = torch.arange(8, dtype=torch.bfloat16)
    assert verify(lambda: right, lambda: right, tolerance=0) == 0
    with pytest.raises(RebindFailed, match="differs from eager"):
        verify(lambda: right.flip(0), lambda: right, tolerance=0.1)
    with pytest.raises(RebindFailed):
        verify(lambda: right * float("nan"), lambda: right, tolerance=0.1)
