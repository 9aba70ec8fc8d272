"""One end of a push over NIXL, as a process of its own: `nixl_process.py receive|send`.

Speaks JSON lines. receive: prints its metadata and address; answers "digest" with that of its
memory; at the first other line it closes its agent, clears its memory, waits a moment and prints
how many bytes landed meanwhile. send: reads the receiver's line and its limits, prints a line
before each chunk, and at last how the push ended.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np

from dynamo_elastic.comm.base import MemoryKind, Span
from dynamo_elastic.comm.nixl_agent import NixlAgent
from dynamo_elastic.comm.transfer_plan import plan_dense
from dynamo_elastic.comm.weights import Destination, Limits, digest, push
from dynamo_elastic.errors import TransferError
from dynamo_elastic.failpoints import set_hook
from dynamo_elastic.types import Region, WorkerId

SIZE_BYTES = 32 << 20
CHUNK_BYTES = 1 << 20
FILL = 7


def say(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def hear() -> Any:
    return json.loads(sys.stdin.readline())


def make() -> tuple[np.ndarray[Any, np.dtype[np.uint8]], Span, NixlAgent]:
    """Memory, without torch, which takes a second to import; where it is; an agent for it."""
    memory = np.zeros(SIZE_BYTES, dtype=np.uint8)
    span = Span(memory.ctypes.data, SIZE_BYTES)
    agent = NixlAgent(f"agent-{os.getpid()}")
    agent.register(span)
    return memory, span, agent


def receive() -> None:
    memory, span, agent = make()
    say({"metadata": agent.metadata().hex(), "address": span.address, "name": agent.name})
    while hear() == "digest":
        say(digest(memory.data))
    agent.close()
    memory[:] = 0
    time.sleep(0.5)
    say(int(np.count_nonzero(memory)))


def send() -> None:
    memory, here, agent = make()
    memory[:] = FILL
    peer, limits = hear(), Limits(**hear())

    def pace(name: str) -> None:
        say(name)
        time.sleep(0.01)

    set_hook(pace)
    me, other = WorkerId("me"), WorkerId("other")
    plan = plan_dense([Region("all", 0, SIZE_BYTES)], [me], [other], chunk_bytes=CHUNK_BYTES)
    there = {other: Destination(peer["name"], Span(peer["address"], SIZE_BYTES))}
    begun = time.monotonic()
    try:
        agent.add_remote(bytes.fromhex(peer["metadata"]))
        push(agent, plan, here, there, MemoryKind.DRAM, limits)
        end, done = "done", SIZE_BYTES
    except TransferError as exc:
        end, done = type(exc).__name__, exc.bytes_done
    agent.close()
    say({"end": end, "bytes_done": done, "elapsed_s": time.monotonic() - begun})


if __name__ == "__main__":
    {"receive": receive, "send": send}[sys.argv[1]]()
