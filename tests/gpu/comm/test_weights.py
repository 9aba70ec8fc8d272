"""Digests and pushes on GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from dynamo_elastic.testing.expert_buffer_group import RankFailed, RankProcess, call_all

SIZE_BYTES, CHUNK_BYTES = 1 << 30, 256 << 20
LIMITS = {"window_bytes": 512 << 20, "transfer_timeout_s": 10.0, "timeout_s": 30.0}
PROGRAM = ("-m", "dynamo_elastic.testing.peer_push_rank")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def start(stack: ExitStack, number: int) -> RankProcess:
    rank = RankProcess(number, number, program=PROGRAM, arguments=["cuda"])
    stack.callback(rank.close)
    return rank


@pytest.mark.gpu(1)
@pytest.mark.parametrize("size_bytes", [1, 7, 8, 1000, (1 << 20) + 3, 5 << 20])
def test_a_digest_on_the_gpu_is_that_on_the_host(size_bytes: int) -> None:
    import torch

    from dynamo_elastic.comm.tensor_digest import digest

    data = torch.randint(0, 256, (size_bytes,), dtype=torch.uint8)
    there = data.cuda()
    assert digest(there) == digest(data)
    there[size_bytes // 2] ^= 4
    assert digest(there) != digest(data)


@pytest.mark.gpu(1)
def test_digests_of_many_tensors_are_those_of_each() -> None:
    import torch

    from dynamo_elastic.comm.tensor_digest import digest, digest_all

    sizes = [0, 1, 8, 9, 524_288, 524_296, (3 << 20) + 5, 64, 0, 1 << 22]
    data = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    assert digest_all([piece.cuda() for piece in data]) == [digest(piece) for piece in data]


@pytest.mark.gpu(1)
def test_a_digest_needs_whole_words() -> None:
    import torch

    from dynamo_elastic.comm.tensor_digest import digest

    with pytest.raises(ValueError, match="align"):
        digest(torch.zeros(64, dtype=torch.uint8, device="cuda")[1:33])


def pair(stack: ExitStack, folder: Path) -> tuple[RankProcess, RankProcess, dict[str, Any]]:
    source, sink = start(stack, 0), start(stack, 1)
    call_all([source, sink], "arena", size_bytes=SIZE_BYTES, chunk_bytes=CHUNK_BYTES)
    source.call("peer_agent", name="source", folder=str(folder))
    source.call(
        "add", agent="peer", metadata=sink.call("peer_agent", name="sink", folder=str(folder))
    )
    source.call("fill", seed=5)
    sink.call("poison")
    arguments = {
        "agent": "peer",
        "me": "source",
        "sources": ["source"],
        "targets": {"sink": sink.call("address")},
        "chunk_bytes": 64 << 20,
    }
    return source, sink, arguments


@pytest.mark.gpu(2)
def test_a_push_into_a_mapped_arena_lands_whole(stack: ExitStack, tmp_path: Path) -> None:
    source, sink, arguments = pair(stack, tmp_path)
    limits = {**LIMITS, "floor_gbps": 50.0}
    assert source.call("push", **arguments, limits=limits)["bytes"] == SIZE_BYTES
    assert sink.call("wrong_bytes", seed=5) == 0
    assert sink.call("digest")["digest"] == source.call("digest")["digest"]
    sink.call("flip", offset=SIZE_BYTES // 3)
    assert sink.call("digest")["digest"] != source.call("digest")["digest"]


@pytest.mark.gpu(2)
def test_a_push_that_leaves_nvlink_is_ended(stack: ExitStack) -> None:
    """NIXL into an arena's chunks goes over the host, with every byte right, at 0.4 GB/s."""
    source, sink = start(stack, 0), start(stack, 1)
    source.call("malloc", size_bytes=SIZE_BYTES)
    sink.call("arena", size_bytes=SIZE_BYTES, chunk_bytes=CHUNK_BYTES)
    source.call("nixl_agent", name="source")
    source.call("add", agent="nixl", metadata=sink.call("nixl_agent", name="sink"))
    with pytest.raises(RankFailed) as caught:
        source.call(
            "push",
            agent="nixl",
            me="source",
            sources=["source"],
            targets={"sink": sink.call("address")},
            chunk_bytes=64 << 20,
            limits={**LIMITS, "floor_gbps": 50.0},
        )
    assert caught.value.kind == "TransferTooSlow"


@pytest.mark.gpu(2)
def test_a_sink_that_dies_is_an_error(stack: ExitStack, tmp_path: Path) -> None:
    source, sink, arguments = pair(stack, tmp_path)
    sink.close()
    with pytest.raises(RankFailed) as caught:
        source.call("push", **arguments, limits=LIMITS)
    assert caught.value.kind == "TransferError"
