"""A whole deployment of fakes for tests of the coordinator: a store, worker shells, leaders."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from dynamo_elastic.config_sections import ScaleConfig
from dynamo_elastic.coordinator.election import Election
from dynamo_elastic.coordinator.fenced import FencedStore
from dynamo_elastic.coordinator.records import Keys, OperationRecord
from dynamo_elastic.coordinator.scale import Scaler, ScaleRequest
from dynamo_elastic.coordinator.session import Session
from dynamo_elastic.coordinator.status import Status, read_status
from dynamo_elastic.coordinator.store import Store
from dynamo_elastic.coordinator.timeline import Timeline
from dynamo_elastic.testing.participants import FakeShell, running
from dynamo_elastic.testing.virtual_time import wall_clock
from dynamo_elastic.topology import EngineShape, PlanInput, Topology, plan_scale
from dynamo_elastic.types import Epoch, WorkerId

SHAPE = EngineShape(num_experts=4, slots_per_rank=2)
CONFIG = ScaleConfig(
    initial_ranks=2,
    max_ranks=4,
    step_timeout_s=10,
    restore_timeout_s=20,
    drain_timeout_s=2,
    lease_ttl_s=3,
)


class Crash(BaseException):
    """The process died here. Not an Exception: no handler runs."""


class World:
    """One deployment: `shells` are running, leaders are made with lead()."""

    def __init__(self, store: Store, shells: Sequence[FakeShell], keys: Keys) -> None:
        self.store = store
        self.keys = keys
        self.shells = {shell.worker_id: shell for shell in shells}
        self.sessions: list[Session] = []

    def __getitem__(self, slot: int) -> FakeShell:
        return self.shells[WorkerId(f"slot{slot}")]

    async def lead(self, store: Store | None = None) -> Scaler:
        """A new leader, on its own view of the store; waits for the one before to go."""
        own = store or self.store
        session = await Session.open(own, CONFIG.lease_ttl_s)
        self.sessions.append(session)
        leadership = await Election(own, self.keys.leader, session, "leader").campaign()
        fenced = FencedStore(own, leadership)
        return Scaler(fenced, self.keys, CONFIG, Timeline(None), wall_clock)

    async def depose(self) -> None:
        """End every leader so far as a crash does, but at once: their leases run out."""
        for session in self.sessions:
            await session.close()

    async def status(self) -> Status:
        return await read_status(self.store, self.keys)

    async def request(self, ranks: int) -> tuple[ScaleRequest, Status]:
        """The move to `ranks` ranks from what is stored now."""
        status = await self.status()
        before = status.topology or Topology(Epoch(0))
        lost = status.lost_reasons()
        given = PlanInput(
            before, ranks, Epoch(status.epoch + 1), SHAPE, status.standby(), frozenset(lost)
        )
        return ScaleRequest(plan_scale(given), "test", lost=tuple(lost)), status

    async def until(self, width: int, *, timeout_s: float) -> Status:
        """Wait until `width` ranks are in force, nothing is under way and nobody is lost."""
        async with asyncio.timeout(timeout_s):
            while True:
                status = await self.status()
                if status.width == width and not status.operation and not status.lost_reasons():
                    return status
                await asyncio.sleep(0.05)

    async def scale(self, scaler: Scaler, ranks: int) -> OperationRecord:
        request, status = await self.request(ranks)
        return await scaler.scale(request, status)

    async def faults(self) -> list[str]:
        """What is not as it must be between two operations; [] if all is well."""
        status = await self.status()
        found = [f"{name} is left" for name in ("operation",) if status.operation]
        if await self.store.get_prefix(self.keys.commands):
            found.append("commands are left")
        topology = status.topology
        epoch = topology.epoch if topology else Epoch(0)
        for stored in await self.store.get_prefix(self.keys.all_endpoints):
            if not stored.key.startswith(self.keys.endpoints(epoch)):
                found.append(f"endpoint of another epoch: {stored.key}")
        lost = status.lost_reasons()
        for worker, shell in self.shells.items():
            if shell.alive and worker not in lost and not status.members[worker].lost_reason:
                found += _shell_faults(shell, topology)
        return found


def _shell_faults(shell: FakeShell, topology: Topology | None) -> list[str]:
    """How a living shell disagrees with the topology in force."""
    member = topology is not None and shell.worker_id in topology.worker_ids
    expected = topology.epoch if topology and member else None
    in_force = shell.in_force.epoch if shell.in_force else None
    found = []
    if in_force != expected:
        found.append(f"{shell.worker_id} serves epoch {in_force}, not {expected}")
    if shell.pending is not None:
        found.append(f"{shell.worker_id} has a group pending")
    if shell.drained or shell.frozen:
        found.append(f"{shell.worker_id} is drained or frozen")
    if not member and shell.incarnation:
        found.append(f"{shell.worker_id} has an engine and no rank")
    return found


@asynccontextmanager
async def world(store: Store, shells: int = 4, deployment: str = "test") -> AsyncIterator[World]:
    """A deployment with `shells` worker shells on standby, and nobody to lead it."""
    keys = Keys(deployment)
    made = None
    try:
        async with running(FakeShell(store, keys, slot) for slot in range(shells)) as listed:
            made = World(store, listed, keys)
            yield made
    finally:
        for session in made.sessions if made else ():
            await session.close()
