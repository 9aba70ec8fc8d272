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

from dynamo_elastic.coordinator.records import CommandRecord, Keys, decode, encode
from dynamo_elastic.coordinator.store import Store
from dynamo_elastic.errors import StaleCommand, StoreUnavailable

log = logging.getLogger(__name__)

_RETRY_S = 0.1


def named(common: Mapping[str, Any]) -> tuple[str, bytes]:
    """The name of a payload, '' for an empty one, and its bytes."""
    raw = encode(dict(common))
    return (xxhash.xxh3_128_hexdigest(raw) if common else ""), raw


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
