"""One rank's part in the group of one epoch, and what the ranks of a group tell each other.

Before every step each rank sends a ControlRecord to all. Whatever all must do at the same step is
announced in one round and done in the next: a rank that dies while its record is on its way leaves
the others with different records of one round, but not with different announcements.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from dynamo_elastic.comm.base import ExpertGroup
from dynamo_elastic.engine.reference.experts import Placement
from dynamo_elastic.topology import Topology
from dynamo_elastic.types import Epoch, Rank


class ControlRecord(msgspec.Struct, frozen=True, array_like=True):
    """What one rank says before a step."""

    work: bool
    """It has rows to compute: announce a step."""
    go: bool
    """A step was announced in the last round: all run it now."""
    ready: Epoch
    """The newest epoch whose group it could switch to."""
    commit: Epoch
    """A switch was announced in the last round: all switch to this epoch now (0: none)."""
    placement: str
    """Digest of the newest expert placement that it has installed."""
    masked: tuple[Rank, ...]


_decoder = msgspec.msgpack.Decoder(ControlRecord)
_encode = msgspec.msgpack.encode


def encode_record(record: ControlRecord) -> bytes:
    return _encode(record)


def decode_records(raw: Mapping[Rank, bytes]) -> dict[Rank, ControlRecord]:
    return {rank: _decoder.decode(record) for rank, record in sorted(raw.items())}


def placement_digest(topology: Topology) -> str:
    """Equal for topologies that put the same experts in the same slots."""
    rows = repr([m.experts for m in topology.members])
    return hashlib.blake2s(rows.encode(), digest_size=8).hexdigest()


def merge_masks(known: frozenset[Rank], records: Mapping[Rank, ControlRecord]) -> frozenset[Rank]:
    """`known` and what the records add. Lower ranks are believed first, and a rank that was masked
    is not believed, so that two ranks that masked each other are judged alike by all."""
    masked = set(known)
    for rank, record in sorted(records.items()):
        if rank not in masked:
            masked.update(record.masked)
    return frozenset(masked)


def all_ready(records: Mapping[Rank, ControlRecord], ranks: Iterable[Rank], epoch: Epoch) -> bool:
    """True if each of `ranks` said that it could switch to `epoch`."""
    return all(rank in records and records[rank].ready >= epoch for rank in ranks)


@dataclass(slots=True, eq=False)
class Membership:
    """This rank's part in `group`. Changed by the step loop alone.

    `topology` is the placement that all route by; `installed` is the newest one that this rank
    has, and becomes `topology` once every live rank has it.
    """

    group: ExpertGroup
    topology: Topology
    num_experts: int
    installed: Topology = field(init=False)
    placement: Placement = field(init=False)
    masked: frozenset[Rank] = frozenset()
    decided_s: float = 0.0
    """Monotonic time at which the decision for this epoch was seen; 0 before."""
    withdrawn: bool = False
    """It was decided, and is to be dropped unless the switch to it has been announced."""
    proven: bool = False
    """A step of this group was right."""

    def __post_init__(self) -> None:
        self.installed = self.topology
        self._place()

    @property
    def epoch(self) -> Epoch:
        return self.group.epoch

    @property
    def rank(self) -> Rank:
        return self.group.rank

    @property
    def may_be_entered(self) -> bool:
        """True if the decision for this epoch was seen and not taken back."""
        return self.decided_s > 0 and not self.withdrawn

    @property
    def alone(self) -> bool:
        """True if there were others, and all are lost."""
        return 0 < len(self.masked) == self.group.world_size - 1

    @property
    def lost_experts(self) -> tuple[int, ...]:
        return self.placement.lost

    def agree(self, records: Mapping[Rank, ControlRecord]) -> None:
        """Take in who is masked, and the newest placement if every live rank has it."""
        masked = merge_masks(self.masked | self.group.masked, records)
        said = {r.placement for rank, r in records.items() if rank not in masked}
        settled = said == {placement_digest(self.installed)}
        if masked != self.masked or (settled and self.topology is not self.installed):
            self.masked = masked
            self.topology = self.installed if settled else self.topology
            self._place()

    def _place(self) -> None:
        self.placement = Placement(self.topology, self.rank, self.num_experts, self.masked)

    def all_here(self, joiners: Iterable[Rank]) -> bool:
        """True once those of `joiners` that live wait in this group's first round."""
        return self.group.arrived([r for r in joiners if r not in self.group.masked])

    def shared_with(self, other: Membership) -> tuple[list[Rank], list[Rank]]:
        """Ranks of the workers that are in both groups: here, and in `other`."""
        mine, theirs = self.topology.worker_ids, other.topology.worker_ids
        both = [w for w in mine if w in theirs]
        return [Rank(mine.index(w)) for w in both], [Rank(theirs.index(w)) for w in both]
