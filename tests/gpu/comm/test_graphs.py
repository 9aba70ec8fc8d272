"""Graphs of a real NIXL EP buffer, taken to another buffer of another rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from dynamo_elastic.testing.expert_buffer_group import (
    RankFailed,
    RankProcess,
    activate,
    call_all,
    connect,
)

LAYERS = 4
SHAPE = {
    "capacity": 4,
    "experts_per_rank": 2,
    "hidden": 2048,
    "top_k": 2,
    "max_tokens": 16,
    "timeout_ms": 2000,
}
EVERYONE = [0, 1, 2, 3]
pytestmark = pytest.mark.gpu(1)


def start(number: int, gpu: int) -> RankProcess:
    rank = RankProcess(number, gpu, program=("-m", "dynamo_elastic.testing.graphs_rank"))
    rank.call("open", rank=number, **SHAPE)
    return rank


@pytest.fixture
def rank() -> Iterator[RankProcess]:
    started = start(0, 0)
    yield started
    started.close()


def renew(rank: RankProcess, number: int) -> None:
    size_bytes = rank.call("memory_bytes")
    rank.call("destroy", released_by=EVERYONE)
    rank.call("occupy", sizes=[32 << 20, 2 << 20, size_bytes])
    rank.call("open", rank=number, **SHAPE)
    rank.number = number


def test_graphs_follow_the_buffer_and_the_rank(rank: RankProcess) -> None:
    rank.call("keep")
    rank.call("capture_all", graphs=3, layers=LAYERS)
    assert rank.call("record")["nodes"] >= 3 * 3 * LAYERS
    renew(rank, 2)
    rank.call("check_other")
    for number in (1, 3):
        renew(rank, number)
        rebound = rank.call("rebind")
        assert rebound["written"]["kernel"] >= 3 * 2 * LAYERS
        assert rebound["values"] > 0
        assert rank.call("verify_all", layers=LAYERS) < 0.01
    with pytest.raises(RankFailed, match="rebound before"):
        rank.call("record")


def test_without_the_hook_there_is_nothing_to_patch(rank: RankProcess) -> None:
    rank.call("capture_all", graphs=1, layers=1)
    with pytest.raises(RankFailed) as caught:
        rank.call("record")
    assert caught.value.kind == "RebindRefused"
    assert "keep_graphs_patchable" in caught.value.message


def test_a_written_node_is_what_a_replay_runs() -> None:
    import torch

    from dynamo_elastic.comm.cuda_graphs import CudaGraphDriver
    from dynamo_elastic.comm.graph_values import NodeKind

    x = torch.arange(1024.0, device="cuda")
    y, other = torch.zeros_like(x), torch.zeros_like(x)
    at_y, at_other = (t.data_ptr().to_bytes(8, "little") for t in (y, other))
    steps: list[tuple[NodeKind, Callable[[], object], torch.Tensor]] = [
        (NodeKind.MEMCPY, lambda: y.copy_(x), x),
        (NodeKind.KERNEL, lambda: torch.mul(x, 3, out=y), 3 * x),
    ]
    for kind, step, expected in steps:
        step()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            step()
        opened = CudaGraphDriver().open(graph)
        ((index, node),) = ((i, n) for i, n in enumerate(opened.nodes) if n.kind is kind)
        moved = {i: v.replace(at_y, at_other) for i, v in enumerate(node.values) if at_y in v}
        opened.write(index, moved)
        y.zero_()
        other.zero_()
        graph.replay()
        assert torch.equal(other, expected)
        assert not y.any()


@pytest.mark.gpu(2)
def test_rebound_graphs_in_a_joint_step() -> None:
    ranks = [start(0, 0), start(0, 1)]
    try:
        for rank in ranks:
            rank.call("keep")
            rank.call("capture_all", graphs=1, layers=LAYERS)
        ranks[1].call("record")
        renew(ranks[1], 1)
        ranks[1].call("rebind")
        connect(ranks[1:], ranks[:1])
        activate(ranks)
        call_all(ranks, "route", world=[0, 1])
        call_all(ranks, "replay_graph", index=0, count=3)
        assert call_all(ranks, "masked") == [[], []]
        checks = call_all(ranks, "check", world=[0, 1])
        assert [check["bad_tokens"] for check in checks] == [0, 0]
    finally:
        for rank in ranks:
            rank.close()
