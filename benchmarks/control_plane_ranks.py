"""Some of the fake ranks of control_plane.py, in one process: each with its own connection to etcd,
lease, member record, watch of its commands and watch of the decision.

Registers when a line comes on stdin, runs until stdin ends, then prints when each rank heard of
each decision.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from control_plane_commits import probe_keys

from dynamo_elastic.coordinator.etcd import EtcdStore
from dynamo_elastic.coordinator.payloads import CommonPayloads
from dynamo_elastic.coordinator.records import CommandRecord, Keys, decode
from dynamo_elastic.errors import StaleCommand
from dynamo_elastic.testing.participants import FakeShell
from dynamo_elastic.topology import Topology
from dynamo_elastic.worker.shell import values_of

_decoded: dict[str, dict[str, Any]] = {}
"""What the ranks of this process have in common, decoded once for all: a real host has few."""

Heard = dict[int, list[float]]
"""Epoch -> when each rank heard that it is decided (wall clock, seconds)."""


class _Payloads(CommonPayloads):
    """Reads what every rank reads, for etcd's sake."""

    async def _read(self, command: CommandRecord) -> dict[str, Any]:
        stored = await self._store.get(self._keys.payload(command.common))
        if stored is None:
            raise StaleCommand(f"{command.operation_id} is over")
        if command.common not in _decoded:
            _decoded.clear()
            _decoded[command.common] = decode(dict, stored.value)
        return _decoded[command.common]


class LoadShell(FakeShell):
    """Reads and writes all that a shell does, and thinks nothing of it."""

    def __init__(self, store: EtcdStore, keys: Keys, slot: int, *, ttl_s: int) -> None:
        super().__init__(store, keys, slot, ttl_s=ttl_s)
        self._payloads = _Payloads(store, keys)

    async def _connect(self, command: CommandRecord) -> dict[str, Any]:
        if "endpoints" not in command.payload:
            await self._published(command.epoch)
        self.pending = Topology(command.epoch)
        return {}

    async def _install(self, command: CommandRecord) -> dict[str, Any]:
        return {}


async def listen(store: EtcdStore, key: str, heard: Heard) -> None:
    """Note each decision when it comes."""
    async for raw in values_of(store, key):
        if raw is not None:
            heard[decode(int, raw)].append(time.time())


async def stdin_line() -> str:
    return await asyncio.to_thread(sys.stdin.readline)


async def serve(url: str, keys: Keys, slots: Sequence[int], ttl_s: int) -> Heard:
    stores = [EtcdStore([url], timeout_s=30.0) for _ in slots]
    shells = [
        LoadShell(store, keys, slot, ttl_s=ttl_s) for store, slot in zip(stores, slots, strict=True)
    ]
    heard: Heard = defaultdict(list)
    print("here", flush=True)
    await stdin_line()
    tasks = [asyncio.create_task(shell.run()) for shell in shells]
    while not all(shell.alive for shell in shells):
        await asyncio.sleep(0.01)
    decided = (keys.decided, probe_keys(keys.deployment).decided)
    tasks += [asyncio.create_task(listen(s, key, heard)) for s in stores for key in decided]
    print("registered", flush=True)
    await stdin_line()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for store in stores:
        await store.close()
    return heard


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--etcd", required=True)
    parser.add_argument("--deployment", required=True)
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--ttl-s", type=int, required=True)
    args = parser.parse_args()
    slots = range(args.first, args.first + args.count)
    heard = asyncio.run(serve(args.etcd, Keys(args.deployment), slots, args.ttl_s))
    print(json.dumps(heard), flush=True)


if __name__ == "__main__":
    main()
