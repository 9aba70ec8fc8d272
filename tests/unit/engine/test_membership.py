"""What ranks tell each other, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dynamo_elastic.engine.reference.membership import (
    ControlRecord,
    Membership,
    all_ready,
    decode_records,
    encode_record,
    merge_masks,
    placement_digest,
)
from dynamo_elastic.topology import EMPTY, Member, Topology
from dynamo_elastic.types import Epoch, Incarnation, Rank, WorkerId


def record(masked: tuple[int, ...] = (), ready: int = 1, placement: str = "p") -> ControlRecord:
    ranks = tuple(Rank(r) for r in masked)
    return ControlRecord(False, False, Epoch(ready), Epoch(0), placement, ranks)


def topology(*experts: tuple[int, ...]) -> Topology:
    members = (Member(WorkerId(f"w{i}"), Incarnation(""), row) for i, row in enumerate(experts))
    return Topology(Epoch(1), tuple(members))


class Group:
    """An ExpertGroup of which only the names and the masks matter."""

    epoch = Epoch(1)
    address = ""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = Rank(rank)
        self.world_size = world_size
        self.masked: frozenset[Rank] = frozenset()
        self.here: set[int] = set()

    def connect(self, addresses: Mapping[Rank, str], *, timeout_s: float) -> None: ...

    def arrived(self, ranks: Sequence[Rank]) -> bool:
        return self.here.issuperset(ranks)

    def control(self, record: bytes, *, timeout_s: float) -> Mapping[Rank, bytes]:
        return {self.rank: record}

    def exchange(self, payloads: Mapping[Rank, bytes], *, timeout_s: float) -> Mapping[Rank, bytes]:
        return payloads

    def close(self) -> None: ...


def test_records_travel_unchanged() -> None:
    sent = record((2, 3), ready=7)
    assert decode_records({Rank(1): encode_record(sent)}) == {Rank(1): sent}


def test_masks_spread_and_the_masked_are_not_believed() -> None:
    records = {Rank(0): record((2,)), Rank(1): record(), Rank(2): record((0,))}
    assert merge_masks(frozenset(), records) == {2}
    del records[Rank(0)]
    assert merge_masks(frozenset(), records) == {0}
    assert merge_masks(frozenset({Rank(2)}), records) == {2}


def test_ready_needs_a_record_of_everyone() -> None:
    records = {Rank(0): record(ready=2), Rank(1): record(ready=2)}
    assert all_ready(records, [Rank(0), Rank(1)], Epoch(2))
    assert not all_ready(records, [Rank(0), Rank(1), Rank(2)], Epoch(2))
    assert not all_ready({**records, Rank(1): record()}, [Rank(0), Rank(1)], Epoch(2))


def test_a_placement_is_used_once_every_live_rank_has_it() -> None:
    before, after = topology((0,), (1,), (EMPTY,)), topology((0,), (1,), (1,))
    membership = Membership(Group(0, 3), before, num_experts=2)
    membership.installed = after
    new, old = placement_digest(after), placement_digest(before)
    records = {Rank(r): record(placement=new) for r in (0, 1)}
    membership.agree({**records, Rank(2): record(placement=old)})
    assert membership.topology is before
    membership.agree({**records, Rank(2): record(placement=new)})
    assert membership.topology is after


def test_a_masked_rank_is_routed_around() -> None:
    group = Group(0, 3)
    membership = Membership(group, topology((0,), (1,), (1,)), num_experts=2)
    here = record(placement=placement_digest(membership.installed))
    assert {membership.placement.choose(1, row)[0] for row in range(8)} == {1, 2}
    group.masked = frozenset({Rank(1)})
    membership.agree({Rank(0): here, Rank(2): here})
    assert {membership.placement.choose(1, row)[0] for row in range(8)} == {2}
    assert not membership.lost_experts
    membership.agree({Rank(0): replace_masked(here, 2)})
    assert membership.lost_experts == (1,)


def replace_masked(given: ControlRecord, rank: int) -> ControlRecord:
    return ControlRecord(
        given.work, given.go, given.ready, given.commit, given.placement, (Rank(rank),)
    )


def test_dead_joiners_are_not_waited_for() -> None:
    group = Group(0, 3)
    membership = Membership(group, topology((0,), (1,), (1,)), num_experts=2)
    joiners = [Rank(1), Rank(2)]
    group.here = {1}
    assert not membership.all_here(joiners)
    group.masked = frozenset({Rank(2)})
    assert membership.all_here(joiners)


def test_shared_ranks() -> None:
    now = Membership(Group(0, 3), topology((0,), (1,), (1,)), num_experts=2)
    members = now.topology.members
    smaller = replace(now.topology, members=(members[2], members[0]))
    then = Membership(Group(0, 2), smaller, num_experts=2)
    assert now.shared_with(then) == ([0, 2], [1, 0])
