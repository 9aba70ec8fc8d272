"""What holds in every deployment at every moment, whatever goes wrong, checked as it happens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dynamo_elastic.coordinator.records import Keys, MemberState, OperationRecord, decode
from dynamo_elastic.coordinator.store import DeletePrefix, Guard, Op, Put
from dynamo_elastic.phases import Phase
from dynamo_elastic.testing.store import FakeStore
from dynamo_elastic.topology import Topology
from dynamo_elastic.types import WorkerId

if TYPE_CHECKING:
    from dynamo_elastic.testing.simulation import SimulatedDeployment

SWITCH_WINDOW_S = 30.0
"""An evicted rank whose shell hangs may serve its last streams for so long."""


class WatchedStore(FakeStore):
    """Tells the invariants of every transaction that took effect."""

    def __init__(self, keys: Keys, invariants: Invariants) -> None:
        super().__init__()
        self._keys = keys
        self._invariants = invariants
        self.replaced_revision = 0
        """Of the topology that was replaced last."""
        self._owned = {keys.operation, keys.topology, keys.epoch, keys.last, keys.outcome}

    def _apply(self, guards: Sequence[Guard], ops: Sequence[Op]) -> int:
        keys = self._keys
        before = self.data.get(keys.topology)
        epoch_before = self.data.get(keys.epoch)
        self.replaced_revision = before.mod_revision if before else 0
        revision = super()._apply(guards, ops)
        touched = {op.prefix if isinstance(op, DeletePrefix) else op.key for op in ops}
        commands = any(k.startswith(keys.commands) for k in touched)
        fenced = any(g.key == keys.leader and g.mod_revision for g in guards)
        if (commands or touched & self._owned) and not fenced:
            self._invariants.violated(f"a write without a fencing token: {sorted(touched)}")
        puts = {op.key: op.value for op in ops if isinstance(op, Put)}
        if keys.topology in puts:
            old = decode(Topology, before.value) if before else None
            operation = puts.get(keys.operation) or puts.get(keys.last)
            self._invariants.topology_written(old, decode(Topology, puts[keys.topology]), operation)
        if keys.epoch in puts:
            old_epoch = decode(int, epoch_before.value) if epoch_before else 0
            record = decode(OperationRecord, puts[keys.operation])
            self._invariants.epoch_used(old_epoch, decode(int, puts[keys.epoch]), record)
        return revision


class Invariants:
    """Collects what was violated in one schedule."""

    def __init__(self, deployment: SimulatedDeployment) -> None:
        self.violations: list[str] = []
        self.committed: list[tuple[str, int]] = []
        """Source and width of every operation that was decided, in order."""
        self._deployment = deployment
        self._groups: dict[int, tuple[str, ...]] = {}
        self._two_since_s: float | None = None

    def violated(self, what: str) -> None:
        self.violations.append(what)

    def epoch_used(self, before: int, after: int, record: OperationRecord) -> None:
        """Each operation has an epoch above all before; one that only moves experts stays."""
        stays = record.plan.before.epoch == record.plan.after.epoch
        rises = after > before and after == record.plan.after.epoch
        if not (after == before if stays else rises):
            self.violated(f"epoch {after} was used after {before}")

    def topology_written(self, old: Topology | None, new: Topology, raw: bytes | None) -> None:
        """Only by the decision of an operation, or, inside an epoch, by its experts' moves."""
        record = decode(OperationRecord, raw) if raw is not None else None
        if record is None:
            self.violated(f"topology {new.epoch} was written without an operation")
        elif old is not None and old.epoch == new.epoch:
            if old.worker_ids != new.worker_ids:
                self.violated(f"epoch {new.epoch} has other members than it had")
        elif old is not None and new.epoch < old.epoch:
            self.violated(f"topology went from epoch {old.epoch} to {new.epoch}")
        elif record.phase is not Phase.COMMIT or record.plan.after != new:
            self.violated(f"topology {new.epoch} was written in {record.phase}")
        elif record.topology_revision != self._planned_from(old):
            self.violated(f"epoch {new.epoch} was planned from another topology than it replaces")
        else:
            self.committed.append((record.source, new.world_size))

    def _planned_from(self, old: Topology | None) -> int:
        """The revision of the topology that was just replaced."""
        return self._deployment.store.replaced_revision if old is not None else 0

    def switched(self) -> None:
        """After a switch: each group agrees on its members, and one epoch is stepped in."""
        for engine in self._deployment.fabric.engines.values():
            topology = engine.topology
            if topology is None:
                continue
            members = tuple(f"{m.worker_id} {m.incarnation}" for m in topology.members)
            known = self._groups.setdefault(topology.epoch, members)
            if known != members:
                self.violated(f"epoch {topology.epoch} is stepped in by {members} and {known}")
            if engine.worker_id not in topology.worker_ids:
                self.violated(f"{engine.worker_id} steps in epoch {topology.epoch} without a rank")
            self._all_step(topology)
        self._one_served()

    def _all_step(self, topology: Topology) -> None:
        """Whoever lives of a group that is stepped in steps in it."""
        engines = self._deployment.fabric.engines
        living = [engines[m.incarnation] for m in topology.members if m.incarnation in engines]
        for engine in living:
            if engine.epoch not in (topology.epoch, 0):
                self.violated(
                    f"epoch {topology.epoch} is stepped in while {engine.worker_id} steps in "
                    f"{engine.epoch}"
                )

    def admitted(self, worker: WorkerId) -> None:
        self._one_served()

    def _one_served(self) -> None:
        """Registered ranks step in one epoch, a short window apart."""
        shells = self._deployment.shells
        epochs = {
            e.epoch
            for e in self._deployment.fabric.engines.values()
            if e.epoch
            and shells[e.worker_id].registrar.registered
            and not shells[e.worker_id].process.dead
        }
        now_s = asyncio.get_running_loop().time()
        if len(epochs) < 2:
            self._two_since_s = None
        elif self._two_since_s is None:
            self._two_since_s = now_s
        elif now_s - self._two_since_s > SWITCH_WINDOW_S:
            self.violated(f"epochs {sorted(epochs)} are served at once")

    def unregistered(self, worker: WorkerId) -> None:
        """A rank in force that is well keeps its admission until it drains."""
        status = self._deployment.status()
        in_force, shell = status.in_force, self._deployment.shells[worker]
        record, session = shell.presence.record, shell.presence._session
        rank = in_force.rank_of(worker) if in_force else None
        if in_force is None or rank is None or session is None or session.lost.is_set():
            return
        if record.state is not MemberState.SERVING or record.lost_reason:
            return
        member = status.members.get(worker)
        engine = self._deployment.fabric.engines.get(record.incarnation)
        mine = in_force.members[rank].incarnation == record.incarnation
        if engine is None or not mine or member is None or worker in status.lost_reasons():
            return
        operation = status.operation
        if operation is not None and worker in (*operation.lost, *operation.discarded):
            return
        self.violated(f"{worker} lost its admission in epoch {in_force.epoch}")

    def at_rest(self) -> list[str]:
        """What is not as it must be between two operations."""
        d = self._deployment
        status, data = d.status(), d.store.data
        topology = status.topology
        if topology is None:
            return ["nothing is served"]
        here = d.keys.endpoints(topology.epoch)
        found = [
            f"{key} is left in epoch {topology.epoch}"
            for key in data
            if key == d.keys.operation
            or key.startswith(d.keys.commands)
            or (key.startswith(d.keys.all_endpoints) and not key.startswith(here))
        ]
        incarnations = {m.incarnation for m in topology.members}
        found += [
            f"engine {i} of {e.worker_id} lives without a rank"
            for i, e in d.fabric.engines.items()
            if i not in incarnations
        ]
        for member in topology.members:
            found += self._member_at_rest(member.worker_id, topology)
        return found

    def _member_at_rest(self, worker: WorkerId, topology: Topology) -> list[str]:
        shell = self._deployment.shells[worker]
        rank = topology.rank_of(worker)
        incarnation = topology.members[rank].incarnation if rank is not None else ""
        engines = self._deployment.fabric.engines
        engine = next((e for i, e in engines.items() if i == incarnation), None)
        if engine is None:
            return [f"{worker} has no engine"]
        wrong = [
            what
            for what, holds in {
                f"steps in epoch {engine.epoch}": engine.epoch != topology.epoch,
                "is frozen": engine.frozen,
                "drains": engine.draining,
                "has a group pending": engine.pending is not None,
                "is not registered": not shell.registrar.registered,
                f"is {shell.presence.state}": shell.presence.state is not MemberState.SERVING,
            }.items()
            if holds
        ]
        return [f"{worker} {what} in epoch {topology.epoch}" for what in wrong]
