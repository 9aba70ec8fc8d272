"""Writes a history down while it happens: one etcd watch without gaps, and engines asked in rounds.

The watch goes through etcd's JSON gateway, because it must begin at the first revision and go on
after a break at the revision where it broke, which our Store does not offer.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.engine.base import SOCKET_FILE, EngineState
from dynamo_elastic.engine.client import EngineClient
from dynamo_elastic.errors import ElasticError
from dynamo_elastic.testing.chaos.history import Seen, Write
from dynamo_elastic.types import WorkerId

_PAUSE_S = 0.2
_ROUND_S = 0.25
_ANSWER_S = 0.5
_LINE_BYTES = 1 << 24


class Recorder:
    """`writes` and `seen` grow while it runs; take() empties them."""

    def __init__(self, urls: Sequence[str], config: DeploymentConfig, prefix: str) -> None:
        self.writes: list[Write] = []
        self.seen: list[Seen] = []
        self.revision = 0
        self._urls = tuple(urls)
        self._prefix = prefix
        self._config = config
        self._round = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Record while in the context."""
        slots = range(self._config.scale.max_ranks)
        tasks = [asyncio.create_task(self._watch()), asyncio.create_task(self._rounds(slots))]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def take(self) -> tuple[list[Write], list[Seen]]:
        """What was recorded since the last call."""
        taken = self.writes, self.seen
        self.writes, self.seen = [], []
        return taken

    async def revoke_lease_of(self, key: str) -> bool:
        """End the lease that `key` is on, as if it had run out; False if there is none."""
        async with aiohttp.ClientSession() as session:
            stored = await self._call(session, "kv/range", {"key": _encoded(key)})
            lease = next((kv.get("lease", "0") for kv in stored.get("kvs", ())), "0")
            if lease == "0":
                return False
            await self._call(session, "lease/revoke", {"ID": lease})
        return True

    async def _call(
        self, session: aiohttp.ClientSession, path: str, body: dict[str, Any]
    ) -> dict[str, Any]:
        """One call of etcd's gateway. Raises aiohttp.ClientError, TimeoutError."""
        timeout = aiohttp.ClientTimeout(total=5)
        async with session.post(f"{self._urls[0]}/v3/{path}", json=body, timeout=timeout) as reply:
            said: dict[str, Any] = await reply.json(content_type=None)
            return said

    async def _watch(self) -> None:
        number = 0
        while True:
            url = self._urls[number % len(self._urls)]
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError, ValueError):
                await self._watch_at(url)
            number += 1
            await asyncio.sleep(_PAUSE_S)

    async def _watch_at(self, url: str) -> None:
        create = {
            "key": _encoded(self._prefix),
            "range_end": _encoded(self._prefix[:-1] + chr(ord(self._prefix[-1]) + 1)),
            "start_revision": self.revision + 1,
            "progress_notify": True,
        }
        # A member that is cut off says nothing; with progress asked for, silence ends the watch.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=2, sock_read=60)
        async with (
            aiohttp.ClientSession(read_bufsize=_LINE_BYTES) as session,
            session.post(
                f"{url}/v3/watch", json={"create_request": create}, timeout=timeout
            ) as reply,
        ):
            async for line in reply.content:
                self._take_in(json.loads(line).get("result", {}).get("events", ()))

    def _take_in(self, events: Sequence[dict[str, Any]]) -> None:
        now_s = time.monotonic()
        for event in events:
            kv = event["kv"]
            revision = int(kv["mod_revision"])
            value = None if event.get("type") == "DELETE" else base64.b64decode(kv.get("value", ""))
            key = base64.b64decode(kv["key"]).decode()
            self.writes.append(Write(now_s, revision, key, value))
            self.revision = revision

    async def _rounds(self, slots: Sequence[int]) -> None:
        while True:
            self._round += 1
            asked = (self._ask(slot, self._round) for slot in slots)
            said = await asyncio.gather(*asked)
            self.seen += [s for s in said if s is not None]
            await asyncio.sleep(_ROUND_S)

    async def _ask(self, slot: int, round_: int) -> Seen | None:
        """What the engine of `slot` says; None if there is none that answers."""
        path: Path = self._config.control_dir(slot) / SOCKET_FILE
        if not path.exists():
            return None
        engine = EngineClient(path)
        try:
            async with asyncio.timeout(_ANSWER_S):
                said = await engine.status()
        except (ElasticError, TimeoutError, OSError):
            return None
        finally:
            await engine.close()
        serving = said.state is EngineState.SERVING
        worker = WorkerId(f"slot{slot}")
        return Seen(time.monotonic(), round_, worker, said.incarnation, serving, said.epoch)


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
