"""Pushes into mapped arenas between real processes, with memfds in place of a GPU's chunks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from dynamo_elastic.testing.expert_buffer_group import RankFailed, RankProcess, call_all, gather

SIZE_BYTES, CHUNK_BYTES = 8 << 20, 1 << 20
LIMITS = {"window_bytes": 2 << 20, "transfer_timeout_s": 10.0, "timeout_s": 30.0}


class Ends:
    """Sources 0.. and one sink, each with an arena and an agent; the sources have mapped it."""

    def __init__(self, stack: ExitStack, folder: Path, count: int) -> None:
        program = ("-m", "dynamo_elastic.testing.peer_push_rank")
        ranks = []
        for number in range(count + 1):
            rank = RankProcess(number, 0, program=program, arguments=["cpu"])
            stack.callback(rank.close)
            ranks.append(rank)
        call_all(ranks, "arena", size_bytes=SIZE_BYTES, chunk_bytes=CHUNK_BYTES)
        blobs = [r.call("peer_agent", name=name(r), folder=str(folder)) for r in ranks]
        self.sources, self.sink = ranks[:-1], ranks[-1]
        for source in self.sources:
            source.call("add", agent="peer", metadata=blobs[-1])
            source.call("fill", seed=3)
        self.sink.call("poison")
        self.address = self.sink.call("address")

    def post(self, source: RankProcess, sources: Sequence[RankProcess], **limits: Any) -> Any:
        return source.post(
            "push",
            agent="peer",
            me=name(source),
            sources=[name(s) for s in sources],
            targets={name(self.sink): self.address},
            limits={**LIMITS, **limits},
            chunk_bytes=CHUNK_BYTES // 2,
        )


def name(rank: RankProcess) -> str:
    return f"end-{rank.number}"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def test_two_sources_fill_one_arena(stack: ExitStack, tmp_path: Path) -> None:
    ends = Ends(stack, tmp_path, 2)
    assert ends.sink.call("mapped_by") == ["end-0", "end-1"]
    moved = gather([ends.post(source, ends.sources) for source in ends.sources])
    assert sum(done["bytes"] for done in moved) == SIZE_BYTES
    assert ends.sink.call("wrong_bytes", seed=3) == 0
    digests = [rank.call("digest")["digest"] for rank in (*ends.sources, ends.sink)]
    assert len(set(digests)) == 1
    ends.sources[0].call("remove", agent="peer", name="end-2")
    assert ends.sink.call("mapped_by") == ["end-1"]


def test_a_source_that_dies_is_replaced(stack: ExitStack, tmp_path: Path) -> None:
    ends = Ends(stack, tmp_path, 2)
    ends.sources[1].close()
    deadline = time.monotonic() + 10
    while ends.sink.call("mapped_by") != ["end-0"]:
        assert time.monotonic() < deadline
    survivor = ends.sources[0]
    ends.post(survivor, ends.sources)()
    assert ends.sink.call("wrong_bytes", seed=3) > 0
    assert ends.post(survivor, [survivor])()["bytes"] == SIZE_BYTES
    assert ends.sink.call("wrong_bytes", seed=3) == 0


def test_a_sink_that_dies_is_an_error_for_the_source(stack: ExitStack, tmp_path: Path) -> None:
    ends = Ends(stack, tmp_path, 1)
    ends.sink.close()
    with pytest.raises(RankFailed) as caught:
        ends.post(ends.sources[0], ends.sources)()
    assert caught.value.kind == "TransferError"


def test_a_stopped_sink_hinders_no_copy(stack: ExitStack, tmp_path: Path) -> None:
    ends = Ends(stack, tmp_path, 1)
    ends.sink.stop()
    try:
        ends.post(ends.sources[0], ends.sources)()
    finally:
        ends.sink.go_on()
    assert ends.sink.call("wrong_bytes", seed=3) == 0
