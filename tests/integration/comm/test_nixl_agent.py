"""What an engine relies on in NIXL beyond the contract: silence, rest, and leaving no trace."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dynamo_elastic.comm.base import MemoryKind, Span
from dynamo_elastic.errors import TransferError
from dynamo_elastic.memory.arena import HostArena, layout

pytestmark = pytest.mark.nixl

QUIET = """
from dynamo_elastic.comm.nixl_agent import NixlAgent
from dynamo_elastic.errors import TransferError
agent = NixlAgent("quiet")
try:
    agent.add_remote(b"garbage")
except TransferError:
    pass
agent.close()
"""


def descriptors() -> set[str]:
    """What this process has open; sockets and pipes by their number, so that a new one shows."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.add(str(entry.readlink()))
        except FileNotFoundError:
            continue  # The descriptor that listed the directory.
    return {name for name in found if not name.startswith("/proc/")}


def threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def test_close_leaves_no_thread_and_no_descriptor_behind() -> None:
    from dynamo_elastic.comm.nixl_agent import NixlAgent

    # What NIXL's libraries open once, when they are loaded, is not the agent's.
    NixlAgent("first").close()
    before = descriptors(), threads()
    arena = HostArena(layout([("w", 1 << 20)]))
    span = Span(arena.address, arena.size_bytes)
    sender, receiver = NixlAgent("sender"), NixlAgent("receiver")
    for agent in (sender, receiver):
        agent.register(span)
    sender.add_remote(receiver.metadata())
    half = Span(span.address, span.size_bytes // 2)
    unreleased = sender.write("receiver", [half], [half], MemoryKind.DRAM)
    assert (descriptors(), threads()) != before

    sender.close()
    receiver.close()

    assert (descriptors(), threads()) == before
    unreleased.release()


def test_an_idle_agent_takes_no_processor_time() -> None:
    from dynamo_elastic.comm.nixl_agent import NixlAgent

    agent = NixlAgent("idle")
    used = time.process_time()
    time.sleep(0.5)
    used = time.process_time() - used
    agent.close()
    assert used < 0.2  # A progress thread that spins would take all of the 0.5 s.


def test_who_could_not_be_loaded_has_used_up_its_name() -> None:
    """Why an expert buffer connects nobody any more once a connect has failed: NIXL EP names its
    agents by rank. Should this fail one day, a newer NIXL forgets them, and the rule may go."""
    from dynamo_elastic.comm.nixl_agent import NixlAgent

    serving, peer = NixlAgent("serving"), NixlAgent("4")
    arena = HostArena(layout([("w", 1 << 20)]))
    peer.register(Span(arena.address, arena.size_bytes))
    metadata = peer.metadata()
    with pytest.raises(TransferError):  # as of a process that died: its memory can't be opened
        serving.add_remote(metadata[:-1])
    for _ in range(2):
        with pytest.raises(TransferError, match="an argument is invalid"):
            serving.add_remote(metadata)
        serving.remove_remote("4")
    serving.close()
    peer.close()


def test_neither_nixl_nor_ucx_writes_to_our_output() -> None:
    done = subprocess.run([sys.executable, "-c", QUIET], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
