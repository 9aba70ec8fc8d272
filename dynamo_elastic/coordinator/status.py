"""Everything that is stored about a deployment, read at one revision."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, TypeVar, cast

from dynamo_elastic.coordinator.missing import LEASE_RAN_OUT
from dynamo_elastic.coordinator.records import (
    CapacityRecord,
    Keys,
    MemberRecord,
    MemberState,
    OperationRecord,
    Strike,
    TargetOutcome,
    TargetRecord,
    WarningRecord,
    decode,
)
from dynamo_elastic.coordinator.store import Store, Versioned
from dynamo_elastic.phases import Phase, committed
from dynamo_elastic.topology import Topology
from dynamo_elastic.types import WorkerId

T = TypeVar("T")

# A status is read after every change, and of a thousand records one has changed.
_member = lru_cache(maxsize=16_384)(partial(decode, MemberRecord))
_large = lru_cache(maxsize=16)(decode)


@dataclass(frozen=True, slots=True)
class Status:
    """One consistent view. `revisions` has the mod_revision of each key, for guards."""

    topology: Topology | None = None
    epoch: int = 0
    """The highest ever used."""
    members: dict[WorkerId, MemberRecord] = field(default_factory=dict)
    operation: OperationRecord | None = None
    last: OperationRecord | None = None
    target: TargetRecord | None = None
    outcome: TargetOutcome | None = None
    notice: str = ""
    """What the coordinator waits for, '' if for nothing."""
    capacity: CapacityRecord | None = None
    """Which widths can be had."""
    warnings: dict[str, WarningRecord] = field(default_factory=dict)
    """By name: what those who write targets want people to know."""
    leader: str = ""
    """Name of the coordinator in charge, '' if there is none."""
    revisions: Mapping[str, int] = field(default_factory=dict)

    def revision(self, key: str) -> int:
        """mod_revision of `key`, 0 if it does not exist."""
        return self.revisions.get(key, 0)

    @property
    def in_force(self) -> Topology | None:
        """What the ranks serve by: the stored topology, unless its decision was withdrawn."""
        return self.withdrawn or self.topology

    @property
    def withdrawn(self) -> Topology | None:
        """What the ranks serve by, if the stored topology has to be superseded."""
        now = self.operation
        newest = now if now is not None and committed(now.kind, now.phase) else self.last
        return newest.served if newest is not None else None

    @property
    def queued(self) -> TargetRecord | None:
        """A newer target than the one that the operation under way is for."""
        now, target = self.operation, self.target
        newer = now is not None and target is not None and target.request_id != now.request_id
        waits = (
            self.outcome is None
            or target is None
            or target.request_id
            not in (
                "",
                self.outcome.request_id,
            )
        )
        return target if newer and waits else None

    @property
    def strikes(self) -> dict[str, Strike]:
        """Who failed as a joiner lately; twice in a row is quarantine: see quarantine.py."""
        newest = self.operation or self.last
        return newest.strikes if newest is not None else {}

    @property
    def width(self) -> int:
        """Ranks in force."""
        return self.in_force.world_size if self.in_force else 0

    def lost_reasons(self, *, given_up: bool = True) -> dict[WorkerId, str]:
        """Members of the topology in force that can't serve any more, and why. Without `given_up`
        those that live, but failed the newest operation, are not among them."""
        if self.in_force is None:
            return {}
        failed = self._given_up() if given_up else {}
        reasons: dict[WorkerId, str] = {}
        for member in self.in_force.members:
            record = self.members.get(member.worker_id)
            if record is None:
                reasons[member.worker_id] = LEASE_RAN_OUT
            elif record.lost_reason:
                reasons[member.worker_id] = record.lost_reason
            elif record.incarnation != member.incarnation:
                reasons[member.worker_id] = "its engine is not the one that joined"
            elif member.worker_id in failed:
                reasons[member.worker_id] = failed[member.worker_id]
        outside = self._outside(self.in_force.worker_ids, reasons)
        return reasons | dict.fromkeys(outside, "its peers step without it")

    def _outside(
        self, members: Sequence[WorkerId], lost: Collection[WorkerId]
    ) -> frozenset[WorkerId]:
        """Of `members` that live, those that are not in the largest group whose engines step with
        each other and nobody else; of two as large, the one with the lower ranks stays."""
        living = [w for w in members if w not in lost]
        everyone = frozenset(living)
        masks = {w: self._masks(self.members[w]) for w in living}
        # Those that mask nobody share one view: compared by identity, for there may be thousands.
        views = {w: everyone.difference(m) if m else everyone for w, m in masks.items()}
        agreed = {
            group
            for group in set(views.values())
            if all(views[w] is group or views[w] == group for w in group)
        }
        if not agreed:
            return frozenset()
        stays = max(agreed, key=lambda g: (len(g), -min(map(living.index, g))))
        return everyone - stays

    def _masks(self, member: MemberRecord) -> tuple[WorkerId, ...]:
        """Whom its engine steps without in the epoch in force."""
        now = self.in_force is not None and member.masks_in == self.in_force.epoch
        return member.masks if now else ()

    def _given_up(self) -> dict[WorkerId, str]:
        """Members that the newest operation has recorded as lost: when it ended DONE, of the
        topology that it made; when it was undone, of the one that it was to replace. Those are not
        among them who only had lost their lease, and have claimed their slots again: their engines
        step with the others, who could not do without them if they were told to."""
        last = self.last
        if last is None or self.in_force is None:
            return {}
        made = last.plan.after if last.phase is Phase.DONE else last.plan.before
        if made.epoch != self.in_force.epoch and last.served is None:
            return {}
        reasons = {w: last.participants.get(w, "lost") for w in last.lost}
        return {
            w: reason
            for w, reason in reasons.items()
            if w not in self.members or not reason.endswith(LEASE_RAN_OUT)
        }

    def standby(self) -> tuple[WorkerId, ...]:
        """Shells without an engine, by slot: free to join."""
        free = [
            m for m in self.members.values() if m.state is MemberState.STANDBY and not m.lost_reason
        ]
        return tuple(m.worker_id for m in sorted(free, key=lambda m: (m.slot, m.worker_id)))


async def read_status(store: Store, keys: Keys) -> Status:
    """What is stored now. Raises StoreUnavailable, or RecordError for what can't be read."""
    return status_of(await store.get_prefix(keys.prefix), keys)


def status_of(stored: Iterable[Versioned], keys: Keys) -> Status:
    """The status in a snapshot of `keys.prefix`. Raises RecordError."""
    by_key = {v.key: v for v in stored}

    def read(kind: type[T], key: str) -> T | None:
        found: T | None = _large(cast(Any, kind), by_key[key].value) if key in by_key else None
        return found

    members = [_member(v.value) for k, v in by_key.items() if k.startswith(keys.members)]
    warnings = {
        k.removeprefix(keys.warnings): decode(WarningRecord, v.value)
        for k, v in by_key.items()
        if k.startswith(keys.warnings)
    }
    leader = by_key.get(keys.leader)
    return Status(
        topology=read(Topology, keys.topology),
        epoch=read(int, keys.epoch) or 0,
        members={m.worker_id: m for m in members},
        operation=read(OperationRecord, keys.operation),
        last=read(OperationRecord, keys.last),
        target=read(TargetRecord, keys.target),
        outcome=read(TargetOutcome, keys.outcome),
        notice=read(str, keys.notice) or "",
        capacity=read(CapacityRecord, keys.capacity),
        warnings=warnings,
        leader=leader.value.decode().split()[0] if leader else "",
        revisions={k: v.mod_revision for k, v in by_key.items()},
    )
