"""Topologies, expert placements and scale plans: values and pure functions, no I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush

from dynamo_elastic.errors import TargetRefused
from dynamo_elastic.phases import Kind
from dynamo_elastic.types import Epoch, Incarnation, Rank, WorkerId

EMPTY = -1
"""An expert slot that holds no expert."""

DISK = WorkerId("")
"""The source of an expert that nobody holds any more: the model directory."""


@dataclass(frozen=True, slots=True)
class Member:
    """One rank of a topology. `experts[s]` is the expert in slot `s`, or EMPTY."""

    worker_id: WorkerId
    incarnation: Incarnation
    experts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Topology:
    """Which worker holds which rank, and which experts, at one epoch.

    The rank is the position in `members`. `placement` counts the expert moves made since the epoch
    began. Raises ValueError if a worker holds two ranks.
    """

    epoch: Epoch
    members: tuple[Member, ...] = ()
    placement: int = 0

    def __post_init__(self) -> None:
        ids = [m.worker_id for m in self.members]
        if len(set(ids)) != len(ids):
            raise ValueError(f"a worker holds two ranks: {ids}")

    @property
    def world_size(self) -> int:
        return len(self.members)

    @property
    def worker_ids(self) -> tuple[WorkerId, ...]:
        return tuple(m.worker_id for m in self.members)

    def rank_of(self, worker_id: WorkerId) -> Rank | None:
        """The rank of `worker_id`, or None if it is not a member."""
        ids = self.worker_ids
        return Rank(ids.index(worker_id)) if worker_id in ids else None

    def holders(self, expert: int) -> tuple[Rank, ...]:
        """Ranks with a replica of `expert`, in order."""
        return tuple(Rank(r) for r, m in enumerate(self.members) if expert in m.experts)

    def missing_experts(self, num_experts: int) -> tuple[int, ...]:
        """Experts that no member holds."""
        held = {e for m in self.members for e in m.experts}
        return tuple(e for e in range(num_experts) if e not in held)


@dataclass(frozen=True, slots=True)
class EngineShape:
    """What of a model limits its topologies. Every rank has `slots_per_rank` expert slots.

    `num_experts` is 0 where ranks share none: each is a replica with the whole model."""

    num_experts: int
    slots_per_rank: int

    @property
    def min_ranks(self) -> int:
        """Fewest ranks whose slots hold every expert."""
        return -(-self.num_experts // self.slots_per_rank) if self.num_experts else 1


@dataclass(frozen=True, slots=True)
class ScaleLimits:
    """What an operator allows. `multiple_of` is 1, or the ranks that come and go together."""

    min_ranks: int
    max_ranks: int
    multiple_of: int = 1


def refusal(target: int, shape: EngineShape, limits: ScaleLimits, slots: int) -> str | None:
    """Why `target` ranks cannot be had, with the remedy; None if they can.

    `slots` is the number of GPU slots that exist, in use or not.
    """
    if target < 1:
        return f"target {target}: a deployment has at least 1 rank; stop it to have none"
    if target < shape.min_ranks:
        room = target * shape.slots_per_rank
        return (
            f"target {target}: {target} ranks x {shape.slots_per_rank} expert slots hold {room} of "
            f"{shape.num_experts} experts; ask for at least {shape.min_ranks}"
        )
    if target < limits.min_ranks:
        return f"target {target}: scale.min_ranks is {limits.min_ranks}; ask for that or lower it"
    if target > limits.max_ranks:
        return f"target {target}: scale.max_ranks is {limits.max_ranks}; ask for at most that"
    if target % limits.multiple_of:
        return f"target {target}: ranks come in multiples of {limits.multiple_of}"
    if target > slots:
        return f"target {target}: only {slots} GPU slots exist; ask for at most {slots}"
    return None


def check_target(target: int, shape: EngineShape, limits: ScaleLimits, slots: int) -> None:
    """Raise TargetRefused, with reason and remedy, unless `target` ranks can be had."""
    reason = refusal(target, shape, limits, slots)
    if reason is not None:
        raise TargetRefused(reason)


def legal_width(wanted: int, shape: EngineShape, limits: ScaleLimits, slots: int) -> int:
    """The largest legal width <= `wanted`, or the smallest legal one if there is none below.

    Raises TargetRefused if no width at all is legal.
    """
    legal = [n for n in range(1, limits.max_ranks + 1) if refusal(n, shape, limits, slots) is None]
    if not legal:
        raise TargetRefused(
            f"no width is legal: {shape.min_ranks} ranks are needed for {shape.num_experts} "
            f"experts, scale allows {limits.min_ranks}-{limits.max_ranks}, {slots} slots exist"
        )
    below = [n for n in legal if n <= wanted]
    return below[-1] if below else legal[0]


@dataclass(frozen=True, slots=True)
class ExpertMove:
    """Copy `expert` from a worker that holds it (or DISK) into slot `to_slot` of another."""

    expert: int
    from_worker: WorkerId
    to_worker: WorkerId
    to_slot: int


@dataclass(frozen=True, slots=True)
class ScalePlan:
    """The move from one topology to the next. `after` is what the commit writes.

    Scale-up: `after` keeps every expert where it was and joiners hold none; `settled` is the
    placement after REBALANCE. Scale-down: `after` has every expert on the retained ranks, and
    `settled` equals it. Boot: `before` has no members.
    """

    kind: Kind
    before: Topology
    after: Topology
    settled: Topology

    @property
    def joiners(self) -> tuple[WorkerId, ...]:
        before = set(self.before.worker_ids)
        return tuple(w for w in self.after.worker_ids if w not in before)

    @property
    def loaders(self) -> tuple[WorkerId, ...]:
        """Joiners that hold experts from the start, and read them from disk."""
        rows = {m.worker_id: m.experts for m in self.after.members}
        return tuple(w for w in self.joiners if any(e != EMPTY for e in rows[w]))

    @property
    def leavers(self) -> tuple[WorkerId, ...]:
        after = set(self.after.worker_ids)
        return tuple(w for w in self.before.worker_ids if w not in after)

    @property
    def retained(self) -> tuple[WorkerId, ...]:
        before = set(self.before.worker_ids)
        return tuple(w for w in self.after.worker_ids if w in before)


@dataclass(frozen=True, slots=True)
class PlanInput:
    """What a plan is made from. `lost` are members whose worker is gone: they always leave.
    `leaving` is the first to go after them, if any does."""

    before: Topology
    target: int
    epoch: Epoch
    shape: EngineShape
    candidates: Sequence[WorkerId] = ()
    lost: frozenset[WorkerId] = field(default_factory=frozenset)
    leaving: WorkerId | None = None


def plan_scale(given: PlanInput) -> ScalePlan:
    """Plan the move to `target` ranks.

    Ranks in force keep their order; joiners come after them in the order of `candidates`; leavers
    are the lost ones, then `leaving`, then those with the highest ranks. Raises TargetRefused if
    there are too few candidates, or nothing to do.
    """
    before, target = given.before, given.target
    alive = [m for m in before.members if m.worker_id not in given.lost]
    first_to_stay = sorted(alive, key=lambda m: m.worker_id == given.leaving)
    staying = {m.worker_id for m in first_to_stay[:target]}
    kept = [m for m in alive if m.worker_id in staying]
    need = target - len(kept)
    known = set(before.worker_ids)
    fresh = [w for w in given.candidates if w not in known]
    if need > len(fresh):
        raise TargetRefused(
            f"target {target}: {need} joiners are needed, {len(fresh)} slots are free"
        )
    if need and len(kept) < len(before.members):
        raise TargetRefused("lost ranks must leave before new ones join")
    if not need and len(kept) == len(before.members):
        raise TargetRefused(f"target {target}: that is the width in force; nothing to do")
    empty = (EMPTY,) * given.shape.slots_per_rank
    joiners = [Member(w, Incarnation(""), empty) for w in fresh[:need]]
    after = Topology(given.epoch, (*kept, *joiners))
    if not before.members:
        placed = replace(after, members=place_experts(after.members, given.shape))
        return ScalePlan(Kind.BOOT, before, placed, placed)
    settled = replace(after, members=place_experts(after.members, given.shape), placement=1)
    if need:
        return ScalePlan(Kind.UP, before, after, settled)
    settled = replace(settled, placement=0)
    return ScalePlan(Kind.DOWN, before, settled, settled)


def plan_replacement(given: PlanInput) -> ScalePlan:
    """Plan that joiners take the ranks of the lost, of which more are lost than can be spared.

    Those that live keep their order and their experts; the joiners come after them and hold from
    the start, read from disk, what nobody else holds. Raises TargetRefused if there are too few
    candidates.
    """
    kept = [m for m in given.before.members if m.worker_id not in given.lost]
    fresh = [w for w in given.candidates if w not in given.before.worker_ids]
    need = given.target - len(kept)
    if need > len(fresh):
        raise TargetRefused(
            f"{need} ranks are lost and can't be spared, {len(fresh)} slots are free"
        )
    missing = Topology(given.epoch, tuple(kept)).missing_experts(given.shape.num_experts)
    slots = given.shape.slots_per_rank
    if len(missing) > need * slots:
        raise TargetRefused(f"{need} joiners have too few slots for {len(missing)} lost experts")
    rows = [missing[n::need] for n in range(need)]
    joiners = [
        Member(worker, Incarnation(""), (*row, *(EMPTY,) * (slots - len(row))))
        for worker, row in zip(fresh, rows, strict=False)
    ]
    after = Topology(given.epoch, (*kept, *joiners))
    settled = replace(after, members=place_experts(after.members, given.shape), placement=1)
    return ScalePlan(Kind.UP, given.before, after, settled)


def place_experts(members: Sequence[Member], shape: EngineShape) -> tuple[Member, ...]:
    """Place every expert on `members`, evenly, moving as little as possible.

    Replica counts differ by at most one, no rank holds an expert twice, slots that already hold
    what they should are left alone. Pure and deterministic. Raises TargetRefused if the slots are
    too few.
    """
    if not shape.num_experts:
        return tuple(members)
    total = len(members) * shape.slots_per_rank
    if total < shape.num_experts:
        raise TargetRefused(f"{total} expert slots cannot hold {shape.num_experts} experts")
    quota = _replica_quota(members, shape)
    slots = [_kept_slots(m, shape.slots_per_rank) for m in members]
    _drop_surplus(slots, quota)
    _fill(slots, quota)
    return tuple(replace(m, experts=tuple(s)) for m, s in zip(members, slots, strict=True))


def _replica_quota(members: Sequence[Member], shape: EngineShape) -> Counter[int]:
    """How many replicas each expert gets: even, and at most one a rank."""
    held = Counter(e for m in members for e in m.experts if e != EMPTY)
    quota: Counter[int] = Counter(dict.fromkeys(range(shape.num_experts), 0))
    budget = len(members) * min(shape.slots_per_rank, shape.num_experts)
    base, extra = divmod(budget, shape.num_experts)
    for e in quota:
        quota[e] = min(base, len(members))
    if base < len(members):
        # Experts that already have a spare replica get the remainder: fewer bytes to move.
        for e in sorted(quota, key=lambda e: (-held[e], e))[:extra]:
            quota[e] += 1
    return quota


def _kept_slots(member: Member, slots_per_rank: int) -> list[int]:
    kept = list(member.experts[:slots_per_rank])
    kept += [EMPTY] * (slots_per_rank - len(kept))
    seen: set[int] = set()
    for i, e in enumerate(kept):
        if e in seen:
            kept[i] = EMPTY
        elif e != EMPTY:
            seen.add(e)
    return kept


def _drop_surplus(slots: list[list[int]], quota: Mapping[int, int]) -> None:
    """Free the slots of experts with more replicas than their quota, fullest ranks first."""
    count = Counter(e for row in slots for e in row if e != EMPTY)
    for e, n in sorted(count.items()):
        if n <= quota[e]:
            continue
        holders = [r for r, row in enumerate(slots) if e in row]
        holders.sort(key=lambda r: (-sum(x != EMPTY for x in slots[r]), r))
        for r in holders[: n - quota[e]]:
            slots[r][slots[r].index(e)] = EMPTY


def _fill(slots: list[list[int]], quota: Mapping[int, int]) -> None:
    """Give every expert its quota, neediest experts first, on the emptiest ranks.

    Where the greedy choice paints itself into a corner (the only ranks with room hold the expert
    already), another rank's expert is moved over to make room.
    """
    count = Counter(e for row in slots for e in row if e != EMPTY)
    missing = sorted(
        (e for e in quota for _ in range(quota[e] - count[e])), key=lambda e: (count[e], e)
    )
    # A heap of ranks with room, the emptiest first: a thousand ranks are not looked at for each.
    emptiest = [(-row.count(EMPTY), r) for r, row in enumerate(slots) if EMPTY in row]
    heapify(emptiest)
    for e in missing:
        r = _roomiest_without(emptiest, slots, e)
        if r is None:
            _swap_in(slots, e)
            emptiest = [(-row.count(EMPTY), r) for r, row in enumerate(slots) if EMPTY in row]
            heapify(emptiest)
            continue
        slots[r][slots[r].index(EMPTY)] = e
        if EMPTY in slots[r]:
            heappush(emptiest, (-slots[r].count(EMPTY), r))


def _roomiest_without(
    emptiest: list[tuple[int, int]], slots: Sequence[Sequence[int]], expert: int
) -> int | None:
    """Take the rank with most room that does not hold `expert` off the heap, None if there is
    none."""
    holders = []
    try:
        while emptiest:
            entry = heappop(emptiest)
            if expert not in slots[entry[1]]:
                return entry[1]
            holders.append(entry)
        return None
    finally:
        for entry in holders:
            heappush(emptiest, entry)


def _swap_in(slots: list[list[int]], expert: int) -> None:
    """Place `expert` by first moving something from a rank without it to one with room."""
    rooms = [row for row in slots if EMPTY in row]
    for r, row in enumerate(slots):
        if expert in row:
            continue
        for full_at, other in enumerate(row):
            for dest in rooms:
                if other not in dest:
                    dest[dest.index(EMPTY)] = other
                    slots[r][full_at] = expert
                    return
    raise TargetRefused(f"expert {expert} has no slot left")


@dataclass(frozen=True, slots=True)
class MoveRound:
    """Copies that may run at once, and what to route by meanwhile.

    `routing` is the placement with every slot that this round overwrites emptied: once all ranks
    route by it, nobody reads the slots that the copies write.
    """

    routing: Topology
    moves: tuple[ExpertMove, ...]
    result: Topology


def move_rounds(before: Topology, after: Topology) -> tuple[MoveRound, ...]:
    """Split the way from `before`'s placement to `after`'s into rounds that never break serving.

    In every round each expert keeps a holder whose slot is not written. Members of `before` that
    are not in `after` serve as sources to the end; an expert without a holder comes from DISK.
    Raises TargetRefused if no order of copies is safe.
    """
    rounds: list[MoveRound] = []
    current = before
    wanted = {m.worker_id: m.experts for m in after.members}
    while True:
        pending = _pending_slots(current, wanted)
        if not pending:
            return tuple(rounds)
        step = _safe_round(current, wanted, pending)
        if not step.moves and step.result == current:
            raise TargetRefused("no safe order of expert copies: an empty slot is needed")
        rounds.append(step)
        current = step.result


def _pending_slots(
    current: Topology, wanted: Mapping[WorkerId, tuple[int, ...]]
) -> list[tuple[WorkerId, int]]:
    return [
        (m.worker_id, s)
        for m in current.members
        for s, e in enumerate(wanted.get(m.worker_id, m.experts))
        if m.experts[s] != e
    ]


def _safe_round(
    current: Topology,
    wanted: Mapping[WorkerId, tuple[int, ...]],
    pending: Sequence[tuple[WorkerId, int]],
) -> MoveRound:
    """As many of `pending` as leave each expert a holder that is not being overwritten."""
    rows = {m.worker_id: list(m.experts) for m in current.members}
    taken: list[tuple[WorkerId, int]] = []
    held = Counter(e for row in rows.values() for e in set(row) if e != EMPTY)
    for worker, slot in pending:
        old = rows[worker][slot]
        if old == EMPTY or held[old] > 1:
            rows[worker][slot] = EMPTY
            held[old] -= old not in rows[worker]
            taken.append((worker, slot))
    routing = _with_rows(current, rows)
    holders: dict[int, list[WorkerId]] = {}
    for worker, row in rows.items():
        for expert in dict.fromkeys(row):
            holders.setdefault(expert, []).append(worker)
    load: Counter[WorkerId] = Counter()
    moves: list[ExpertMove] = []
    result = {w: list(row) for w, row in rows.items()}
    for worker, slot in taken:
        expert = wanted[worker][slot]
        if expert == EMPTY:
            continue
        sources = [w for w in holders.get(expert, ()) if w != worker]
        source = min(sources, key=lambda w: (load[w], w)) if sources else DISK
        load[source] += 1
        moves.append(ExpertMove(expert, source, worker, slot))
        result[worker][slot] = expert
    return MoveRound(routing, tuple(moves), _with_rows(current, result))


def _with_rows(topology: Topology, rows: Mapping[WorkerId, Sequence[int]]) -> Topology:
    members = tuple(replace(m, experts=tuple(rows[m.worker_id])) for m in topology.members)
    return replace(topology, members=members)
