"""What every TransferAgent keeps: on the fake, on NIXL, and by mapped chunks, over host memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dynamo_elastic.comm.base import MemoryKind, Span, Transfer, TransferAgent, TransferState
from dynamo_elastic.comm.peer_push import PeerAgent
from dynamo_elastic.comm.weights import digest
from dynamo_elastic.errors import TransferError
from dynamo_elastic.memory.arena import HostArena, layout
from dynamo_elastic.testing.peer_push import HostCopyEngine, HostSharedArena
from dynamo_elastic.testing.transfer import FakeFabric, FakeTransferAgent

SIZE_BYTES = 1 << 16
HALF = SIZE_BYTES // 2
CHUNK_BYTES = SIZE_BYTES // 4


class End(NamedTuple):
    agent: TransferAgent
    address: int
    memory: memoryview
    keep: object
    """What holds the memory."""

    def span(self, start: int = 0, size_bytes: int = SIZE_BYTES) -> Span:
        return Span(self.address + start, size_bytes)


Make = Callable[[str], End]


def on_private_memory(agent: TransferAgent) -> End:
    arena = HostArena(layout([("all", SIZE_BYTES)]))
    agent.register(Span(arena.address, arena.size_bytes))
    return End(agent, arena.address, arena.view(arena.regions[0]), arena)


def on_shared_memory(agent: PeerAgent) -> End:
    arena = HostSharedArena(SIZE_BYTES, CHUNK_BYTES)
    agent.register(arena.span)
    agent.offer(arena.span, arena.export_chunks())
    return End(agent, arena.span.address, arena.view(), arena)


@pytest.fixture(params=["fake", pytest.param("nixl", marks=pytest.mark.nixl), "peer"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    if request.param == "fake":
        fabric = FakeFabric()
        return lambda name: on_private_memory(FakeTransferAgent(name, fabric))
    if request.param == "peer":
        return lambda name: on_shared_memory(PeerAgent(name, HostCopyEngine(), tmp_path))
    from dynamo_elastic.comm.nixl_agent import NixlAgent

    return lambda name: on_private_memory(NixlAgent(name))


@pytest.fixture
def ends(make: Make) -> Iterator[tuple[End, End]]:
    """A sender, its memory full of sevens, and a receiver that it knows, its memory zero."""
    pair = (make("tx"), make("rx"))
    sender, receiver = pair
    sender.memory[:] = b"\x07" * SIZE_BYTES
    sender.agent.add_remote(receiver.agent.metadata())
    yield sender, receiver
    for end in pair:
        end.agent.close()


def write(sender: End, local: list[Span], target: list[Span]) -> None:
    transfer = sender.agent.write("rx", local, target, MemoryKind.DRAM)
    finish(transfer)
    transfer.release()


def finish(transfer: Transfer) -> None:
    deadline = time.monotonic() + 10
    while transfer.poll() is not TransferState.DONE:
        assert time.monotonic() < deadline, "the write never ended"
        time.sleep(0.001)


def test_write_lands_where_it_should_and_nowhere_else(ends: tuple[End, End]) -> None:
    sender, receiver = ends
    write(
        sender,
        [sender.span(0, 100), sender.span(HALF, 200)],
        [receiver.span(HALF, 100), receiver.span(64, 200)],
    )
    expected = bytearray(SIZE_BYTES)
    expected[HALF : HALF + 100] = b"\x07" * 100
    expected[64:264] = b"\x07" * 200
    assert bytes(receiver.memory) == bytes(expected)


def test_add_remote_returns_the_name_and_may_be_repeated(ends: tuple[End, End]) -> None:
    sender, receiver = ends
    metadata = receiver.agent.metadata()
    assert [sender.agent.add_remote(metadata) for _ in range(2)] == ["rx", "rx"]
    write(sender, [sender.span()], [receiver.span()])
    assert bytes(receiver.memory) == b"\x07" * SIZE_BYTES


def test_a_removed_remote_is_unknown_until_added_again(ends: tuple[End, End]) -> None:
    sender, receiver = ends
    sender.agent.remove_remote("rx")
    sender.agent.remove_remote("rx")
    with pytest.raises(TransferError):
        sender.agent.write("rx", [sender.span()], [receiver.span()], MemoryKind.DRAM)
    sender.agent.add_remote(receiver.agent.metadata())
    write(sender, [sender.span()], [receiver.span()])


def test_garbage_is_no_remote(ends: tuple[End, End]) -> None:
    with pytest.raises(TransferError):
        ends[0].agent.add_remote(b"garbage")


def test_memory_must_be_registered_and_sizes_equal(ends: tuple[End, End]) -> None:
    sender, receiver = ends
    stranger = HostArena(layout([("all", SIZE_BYTES)]))
    outside = Span(stranger.address, SIZE_BYTES)
    for local, target in [
        (outside, receiver.span()),
        (sender.span(), outside),
        (sender.span(0, HALF), receiver.span()),
    ]:
        with pytest.raises(TransferError):
            sender.agent.write("rx", [local], [target], MemoryKind.DRAM)
    assert bytes(receiver.memory) == bytes(SIZE_BYTES)


def test_release_may_be_repeated_and_ends_the_transfer(ends: tuple[End, End]) -> None:
    sender, receiver = ends
    transfer = sender.agent.write("rx", [sender.span()], [receiver.span()], MemoryKind.DRAM)
    finish(transfer)
    transfer.release()
    transfer.release()


def test_a_closed_agent_does_nothing_more(ends: tuple[End, End]) -> None:
    sender, receiver = ends
    unreleased = sender.agent.write("rx", [sender.span()], [receiver.span()], MemoryKind.DRAM)
    sender.agent.close()
    sender.agent.close()
    unreleased.release()
    with pytest.raises(TransferError):
        sender.agent.write("rx", [sender.span()], [receiver.span()], MemoryKind.DRAM)
    with pytest.raises(TransferError):
        sender.agent.metadata()


def test_a_closed_remote_ends_in_an_error(ends: tuple[End, End]) -> None:
    sender, receiver = ends
    receiver.agent.close()
    with pytest.raises(TransferError):
        write(sender, [sender.span()], [receiver.span()])


# What only real processes can show.

SCRIPT = Path(__file__).with_name("nixl_process.py")
LIMITS = {"window_bytes": 4 << 20, "transfer_timeout_s": 1.0, "timeout_s": 10.0}


@contextmanager
def process(role: str, transports: str) -> Iterator[subprocess.Popen[str]]:
    env = dict(os.environ, UCX_TLS=transports)
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), role], stdin=pipe, stdout=pipe, text=True, env=env
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def say(child: subprocess.Popen[str], value: object) -> None:
    assert child.stdin is not None
    child.stdin.write(json.dumps(value) + "\n")
    child.stdin.flush()


def hear(child: subprocess.Popen[str]) -> Any:
    assert child.stdout is not None
    return json.loads(child.stdout.readline())


def outcome(sender: subprocess.Popen[str]) -> dict[str, Any]:
    """How the push ended; everything that the sender says must be a line of ours."""
    while not isinstance(line := hear(sender), dict):
        pass
    assert sender.wait(timeout=10) == 0
    return line


transports = pytest.mark.parametrize("transports", ["cma,tcp", "tcp"])


@pytest.mark.nixl
@transports
def test_a_push_between_processes_lands_whole(transports: str) -> None:
    with process("receive", transports) as receiver, process("send", transports) as sender:
        say(sender, hear(receiver))
        say(sender, LIMITS)
        assert outcome(sender)["end"] == "done"
        say(receiver, "digest")
        assert hear(receiver) == digest(b"\x07" * (32 << 20))


@pytest.mark.nixl
@transports
@pytest.mark.parametrize("when", ["before", "during"])
def test_a_killed_receiver_is_an_error(transports: str, when: str) -> None:
    with process("receive", transports) as receiver, process("send", transports) as sender:
        say(sender, hear(receiver))
        if when == "before":
            receiver.kill()
            receiver.wait()
        say(sender, LIMITS)
        if when == "during":
            for _ in range(3):
                assert hear(sender) == "weights.before_chunk"
            receiver.kill()
        end = outcome(sender)
        assert end["end"] == "TransferError"
        assert end["bytes_done"] < 32 << 20
        assert end["elapsed_s"] < LIMITS["timeout_s"]


@pytest.mark.nixl
@transports
def test_a_stopped_receiver_is_a_timeout_and_its_close_a_fence(transports: str) -> None:
    with process("receive", transports) as receiver, process("send", transports) as sender:
        say(sender, hear(receiver))
        receiver.send_signal(signal.SIGSTOP)
        try:
            say(sender, LIMITS)
            end = outcome(sender)
        finally:
            receiver.send_signal(signal.SIGCONT)
        assert end["end"] == "TransferTimeout"
        assert end["elapsed_s"] < LIMITS["timeout_s"]
        say(receiver, "close")
        assert hear(receiver) == 0


@pytest.mark.nixl
@transports
def test_a_receiver_stopped_in_the_middle_never_hangs_the_push(transports: str) -> None:
    with process("receive", transports) as receiver, process("send", transports) as sender:
        say(sender, hear(receiver))
        say(sender, LIMITS)
        for _ in range(3):
            assert hear(sender) == "weights.before_chunk"
        receiver.send_signal(signal.SIGSTOP)
        try:
            end = outcome(sender)
        finally:
            receiver.send_signal(signal.SIGCONT)
        # Once connected, CMA writes into a stopped process's memory all the same.
        allowed = {"TransferTimeout"} if transports == "tcp" else {"TransferTimeout", "done"}
        assert end["end"] in allowed
        assert end["elapsed_s"] < LIMITS["timeout_s"]
        say(receiver, "close")
        assert hear(receiver) == 0


@pytest.mark.nixl
@transports
def test_a_killed_sender_leaves_the_receiver_fit_for_another(transports: str) -> None:
    with process("receive", transports) as receiver:
        peer = hear(receiver)
        with process("send", transports) as doomed:
            say(doomed, peer)
            say(doomed, LIMITS)
            for _ in range(3):
                assert hear(doomed) == "weights.before_chunk"
            doomed.kill()
        with process("send", transports) as sender:
            say(sender, peer)
            say(sender, LIMITS)
            assert outcome(sender)["end"] == "done"
        say(receiver, "digest")
        assert hear(receiver) == digest(b"\x07" * (32 << 20))
