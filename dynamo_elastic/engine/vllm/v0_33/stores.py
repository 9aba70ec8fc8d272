"""Clients of groups' stores in the API process of a rank, whose loop must not wait for them.

torch looks the name of an address up whenever it connects, and its store does of whoever comes: a
name server that loses a packet costs seconds, of every stream that this process serves.
"""

from __future__ import annotations

import asyncio
import functools
from typing import Any

from vllm.distributed import utils

_STORES = 2
"""That of the group in force and that of an operation."""
_connected = utils.get_cached_tcp_store_client.__wrapped__


@functools.lru_cache(maxsize=_STORES)
def store_at(host: str, port: int) -> Any:
    """The client of the store at that address. vLLM keeps one alone, and so connects anew whenever
    it looks at the other store. Raises RuntimeError if nobody listens there."""
    return _connected(host, port)


def store_in_force(parallel: Any) -> Any:
    """store_at() of the group that a rank of this ParallelConfig is in."""
    return store_at(parallel.data_parallel_master_ip, parallel._coord_store_port)


async def connect(host: str, port: int) -> None:
    """Beside the loop; store_at() answers at once after that. Raises RuntimeError."""
    await asyncio.to_thread(store_at, host, port)


async def made_at(host: str) -> Any:
    """A new store, beside the loop."""
    return await asyncio.to_thread(
        utils.create_tcp_store, host, 0, is_master=True, world_size=-1, wait_for_workers=False
    )


def install() -> None:
    """vLLM's coordinators use these clients from now on."""
    utils.get_cached_tcp_store_client = store_at
