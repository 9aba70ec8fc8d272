"""What the commands of a step have in common is stored once, by its content, not in each of them.

The topology alone has a line for every rank: in every command of every step it would be bytes by
the square of the ranks, and more than etcd takes in one request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import xxhash

from dynamo_elastic.coordinator.records import (
    CommandRecord,
    EndpointRecord,
    Keys,
    RecordError,
    decode,
    encode,
)
from dynamo_elastic.coordinator.store import MOST_BYTES, Store
from dynamo_elastic.errors import StaleCommand, StoreUnavailable
from dynamo_elastic.topology import Topology
from dynamo_elastic.types import WorkerId

log = logging.getLogger(__name__)

_RETRY_S = 0.1
_MOST_ENDPOINTS_BYTES = MOST_BYTES // 2
"""As stored: the topology goes with them."""


def named(common: Mapping[str, Any]) -> tuple[str, bytes]:
    """The name of a payload, '' for an empty one, and its bytes."""
    raw = encode(dict(common))
    return (xxhash.xxh3_128_hexdigest(raw) if common else ""), raw


async def endpoints_of(store: Store, keys: Keys, topology: Topology) -> dict[WorkerId, Any]:
    """How to reach each engine of `topology`, read once for all who connect: n ranks that each read
    n endpoints are what a control plane breaks of first. {} if one can't be read, or all are too
    many for one request: then each rank reads for itself, and waits."""
    named_in = {m.worker_id: m.incarnation for m in topology.members}
    try:
        stored = await store.get_prefix(keys.endpoints(topology.epoch))
        records = [decode(EndpointRecord, v.value) for v in stored]
    except (StoreUnavailable, RecordError) as exc:
        log.warning("endpoints of epoch %d are left to each rank: %s", topology.epoch, exc)
        return {}
    found = {r.worker_id: r.endpoint for r in records if named_in.get(r.worker_id) == r.incarnation}
    whole = found.keys() == named_in.keys() and len(encode(found)) <= _MOST_ENDPOINTS_BYTES
    return found if whole else {}


class CommonPayloads:
    """Completes the commands of one participant. The newest common payload is kept: most steps of
    an operation have the same."""

    def __init__(self, store: Store, keys: Keys) -> None:
        self._store = store
        self._keys = keys
        self._name = ""
        self._held: dict[str, Any] = {}

    async def completed(self, command: CommandRecord) -> CommandRecord:
        """`command` with all of its payload. Waits for a store that is away: give it a deadline.

        Raises StaleCommand if its operation is over, and RecordError.
        """
        if not command.common:
            return command
        if command.common != self._name:
            self._held = await self._read(command)
            self._name = command.common
        return replace(command, payload=self._held | command.payload)

    async def _read(self, command: CommandRecord) -> dict[str, Any]:
        while True:
            try:
                stored = await self._store.get(self._keys.payload(command.common))
            except StoreUnavailable as exc:
                log.warning("payload of %s was not read: %s", command.step, exc)
                await asyncio.sleep(_RETRY_S)
                continue
            if stored is None:
                raise StaleCommand(f"{command.step}: {command.operation_id} is over")
            return decode(dict, stored.value)
