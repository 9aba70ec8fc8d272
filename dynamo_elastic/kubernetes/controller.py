"""The controller's loop: read pods and coordinator, decide, act, report; then wait for a change.

It keeps nothing in memory, so one that is killed anywhere is continued by the next. One of them
leads, by a key in etcd on a lease; what it sends to the API server is guarded by what it has read,
and thrown away when it has become old.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dynamo_elastic.coordinator.election import Election
from dynamo_elastic.coordinator.records import Keys
from dynamo_elastic.coordinator.session import Session
from dynamo_elastic.coordinator.status import read_status
from dynamo_elastic.coordinator.store import Store, Watch
from dynamo_elastic.coordinator.targets import request_scale
from dynamo_elastic.errors import LeadershipLost, SessionLost, StoreError
from dynamo_elastic.failpoints import failpoint
from dynamo_elastic.kubernetes.base import (
    Cluster,
    ClusterConflict,
    ClusterError,
    ClusterRefused,
    ClusterView,
)
from dynamo_elastic.kubernetes.decide import (
    SOURCE,
    Action,
    Correct,
    CreatePod,
    DeletePod,
    Limits,
    Request,
    SetRole,
    View,
    decide,
)
from dynamo_elastic.kubernetes.report import report_of

log = logging.getLogger(__name__)

_PAUSE_S = 1.0
_RESYNC_S = 5.0
_STALE_S = 2.0
"""A view older than that is not acted on: we may have been stopped since."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """What the controller needs to know of its deployment."""

    keys: Keys
    limits: Limits
    now: Callable[[], float] = time.time
    """Wall clock."""


class Controller:
    """One candidate; any number may run, the leader alone acts."""

    def __init__(self, store: Store, cluster: Cluster, deployment: Deployment, name: str) -> None:
        self._store = store
        self._cluster = cluster
        self._deployment = deployment
        self._name = name

    async def run(self) -> None:
        """Lead whenever we can, until cancelled."""
        while True:
            try:
                await self._serve_a_term()
            except (SessionLost, LeadershipLost, StoreError, ClusterError) as exc:
                log.warning("stopped leading: %s", exc)
                await asyncio.sleep(_PAUSE_S)

    async def _serve_a_term(self) -> None:
        keys, limits = self._deployment.keys, self._deployment.limits
        session = await Session.open(self._store, limits.scale.lease_ttl_s)
        try:
            await Election(self._store, keys.controller, session, self._name).campaign()
            log.info("leading")
            await session.run(self._lead(session))
        finally:
            await session.close()

    async def _lead(self, session: Session) -> None:
        while True:
            async with self._store.watch(self._deployment.keys.prefix) as watch:
                cluster, acted = await self._round(session)
                if not acted:
                    await self._next_change(watch, cluster)

    async def _round(self, session: Session) -> tuple[ClusterView, bool]:
        """Read, act and report once; also whether that has changed anything. If not, because others
        were faster or it was refused, there is nothing to do before the next change."""
        began_s = asyncio.get_running_loop().time()
        cluster = await self._cluster.read()
        status = await read_status(self._store, self._deployment.keys)
        view = View(cluster, status, self._deployment.limits, self._deployment.now())
        acted, refusals = False, []
        for action in decide(view):
            session.check()
            if asyncio.get_running_loop().time() - began_s > _STALE_S:
                return cluster, True
            try:
                acted = await self._unless_outdated(self._apply(action, cluster)) or acted
            except ClusterRefused as exc:
                log.error("refused: %s", exc)
                refusals.append(str(exc))
        report = report_of(view, refusals)
        if report != cluster.graph.report and not cluster.graph.deleting:
            write = self._cluster.write_report(cluster.graph, report)
            acted = await self._unless_outdated(write) or acted
        return cluster, acted

    async def _unless_outdated(self, act: Coroutine[Any, Any, None]) -> bool:
        try:
            await act
        except ClusterConflict as exc:
            log.info("to be decided anew: %s", exc)
            return False
        return True

    async def _apply(self, action: Action, cluster: ClusterView) -> None:
        _say(action)
        name = type(action).__name__.lower()
        failpoint(f"kubernetes.before_{name}")
        if isinstance(action, CreatePod):
            await self._cluster.create_pod(cluster.graph, action.slot)
        elif isinstance(action, SetRole):
            await self._cluster.set_role(action.pod, action.role)
        elif isinstance(action, DeletePod):
            await self._cluster.delete_pod(action.pod)
        elif isinstance(action, Request):
            await self._request(action)
        else:
            await self._cluster.set_replicas(cluster.graph, action.replicas)
        failpoint(f"kubernetes.after_{name}")

    async def _request(self, action: Request) -> None:
        await request_scale(
            self._store,
            self._deployment.keys,
            action.ranks,
            SOURCE,
            detail=action.detail,
            request_id=action.request_id,
        )

    async def _next_change(self, watch: Watch, cluster: ClusterView) -> None:
        """Return when pods, graph or what the coordinator stores has changed, or after a while:
        that a pod has had its time is no event."""
        waits = {
            asyncio.create_task(self._stored_change(watch)),
            asyncio.create_task(self._cluster.changed(cluster)),
        }
        try:
            done, _ = await asyncio.wait(
                waits, timeout=_RESYNC_S, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                task.result()
        finally:
            for task in waits:
                task.cancel()
            for task in waits:
                with suppress(asyncio.CancelledError, ClusterError, StoreError):
                    await task

    async def _stored_change(self, watch: Watch) -> None:
        keys = self._deployment.keys
        singles = {keys.target, keys.outcome, keys.topology, keys.operation, keys.last, keys.notice}
        async for event in watch:
            if event.key == keys.controller:
                raise LeadershipLost("the controller's key changed")
            if event.key in singles or event.key.startswith(keys.members):
                return


def _say(action: Action) -> None:
    if isinstance(action, CreatePod):
        log.info("slot %d: a pod is created", action.slot)
    elif isinstance(action, SetRole):
        log.info("pod %s is %s: %s", action.pod.name, action.role, action.why)
    elif isinstance(action, DeletePod):
        log.info("pod %s is deleted", action.pod.name)
    elif isinstance(action, Request):
        log.info("%d ranks are asked for (%s)", action.ranks, action.detail)
    elif isinstance(action, Correct):
        log.warning("the wish is set to %d ranks: %s", action.replicas, action.why)
