"""What kubelet and scheduler do to pods, on a real API server: bind, run, report, end. What runs in
a pod is a worker shell without an engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import Any

import aiohttp

from dynamo_elastic.coordinator.records import Keys
from dynamo_elastic.coordinator.store import Store
from dynamo_elastic.kubernetes.pods import SLOT
from dynamo_elastic.testing.participants import FakeShell

_MERGE = "application/merge-patch+json"


class Api:
    """Plain calls to an API server as one user: the test's own, not the adapter under test."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url

    async def call(
        self, method: str, path: str, body: Any = None, *, kind: str = "application/json"
    ) -> tuple[int, Any]:
        """Status of the answer and its JSON, None if it has none."""
        headers = {"Content-Type": kind}
        async with self._http.request(
            method, self._url + path, json=body, headers=headers
        ) as answer:
            text = await answer.text()
            is_json = "json" in answer.content_type
            return answer.status, json.loads(text) if is_json else None

    async def must(
        self, method: str, path: str, body: Any = None, *, kind: str = "application/json"
    ) -> Any:
        """The answer to a call that must succeed."""
        status, answer = await self.call(method, path, body, kind=kind)
        if status >= 300:
            raise RuntimeError(f"{method} {path}: {status} {answer}")
        return answer

    @asynccontextmanager
    async def stream(self, path: str) -> AsyncIterator[AsyncIterator[bytes]]:
        """The lines of a watch."""
        async with self._http.get(self._url + path) as answer:
            yield aiter(answer.content)


class Kubelet:
    """Runs a FakeShell in each pod of a namespace, slots in `broken` excepted: their image never
    comes."""

    def __init__(self, api: Api, namespace: str, store: Store, keys: Keys) -> None:
        self.broken: set[int] = set()
        self.shells: dict[str, FakeShell] = {}
        """By pod uid."""
        self.deleted: list[tuple[int, bool]] = []
        """Slot of each pod that was ended, and whether its worker had an engine."""
        self._api = api
        self._pods = f"/api/v1/namespaces/{namespace}/pods"
        self._store = store
        self._keys = keys
        self._running: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Follow the pods until cancelled."""
        try:
            while True:
                listed = await self._api.must("GET", self._pods)
                for pod in listed["items"]:
                    await self._follow(pod)
                await asyncio.sleep(0.1)
        finally:
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _follow(self, pod: Any) -> None:
        metadata = pod["metadata"]
        name, uid = metadata["name"], metadata["uid"]
        if "nodeName" not in pod["spec"]:
            target = {"apiVersion": "v1", "kind": "Node", "name": "node"}
            binding = {"metadata": {"name": name}, "target": target}
            await self._api.call("POST", f"{self._pods}/{name}/binding", binding)
        elif "deletionTimestamp" in metadata:
            await self._end(name, uid)
        elif uid not in self._running:
            slot = int(metadata["labels"][SLOT])
            if slot in self.broken:
                await self._report(name, ready=False)
                return
            self._start(uid, slot)
            await self._report(name, ready=True)

    def _start(self, uid: str, slot: int) -> None:
        self.shells[uid] = FakeShell(self._store, self._keys, slot, ttl_s=3)
        self._running[uid] = asyncio.create_task(self.shells[uid].run())

    async def _end(self, name: str, uid: str) -> None:
        shell = self.shells.pop(uid, None)
        if shell is not None:
            self.deleted.append(
                (int(shell.worker_id.removeprefix("slot")), bool(shell.incarnation))
            )
            self._running[uid].cancel()
            with suppress(asyncio.CancelledError):
                await self._running.pop(uid)
        now = {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}}
        await self._api.call("DELETE", f"{self._pods}/{name}", now)

    async def _report(self, name: str, *, ready: bool) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        condition = {"type": "Ready", "status": str(ready), "lastTransitionTime": now}
        waiting = {"reason": "ImagePullBackOff", "message": "no such image"}
        state = {"running": {"startedAt": now}} if ready else {"waiting": waiting}
        container = {
            "name": "main",
            "image": "i",
            "imageID": "",
            "ready": ready,
            "restartCount": 0,
            "state": state,
        }
        status = {
            "phase": "Running" if ready else "Pending",
            "conditions": [condition] if ready else [],
            "containerStatuses": [container],
        }
        path = f"{self._pods}/{name}/status"
        await self._api.call("PATCH", path, {"status": status}, kind=_MERGE)

    async def crash(self, slot: int) -> None:
        """The worker shell of `slot` dies, its pod with it (phase Failed)."""
        for uid, shell in list(self.shells.items()):
            if shell.worker_id == f"slot{slot}":
                await shell.die()
                name = await self._name(uid)
                body = {"status": {"phase": "Failed", "reason": "Evicted"}}
                await self._api.must("PATCH", f"{self._pods}/{name}/status", body, kind=_MERGE)

    async def _name(self, uid: str) -> str:
        listed = await self._api.must("GET", self._pods)
        names = {p["metadata"]["uid"]: str(p["metadata"]["name"]) for p in listed["items"]}
        return names[uid]
