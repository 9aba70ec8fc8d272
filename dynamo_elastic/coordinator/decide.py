"""What the coordinator does next, from one view of what is stored: a pure function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from dynamo_elastic.config_sections import ScaleConfig
from dynamo_elastic.coordinator.quarantine import (
    barred_images,
    barred_slots,
    quarantined,
    released_s,
)
from dynamo_elastic.coordinator.records import OutcomeStatus, TargetOutcome, TargetRecord
from dynamo_elastic.coordinator.scale import ScaleRequest
from dynamo_elastic.coordinator.status import Status
from dynamo_elastic.errors import TargetRefused
from dynamo_elastic.phases import Kind, Phase
from dynamo_elastic.topology import (
    EngineShape,
    PlanInput,
    ScalePlan,
    Topology,
    legal_width,
    move_rounds,
    place_experts,
    plan_replacement,
    plan_scale,
    refusal,
)
from dynamo_elastic.types import Epoch, WorkerId

BOOT_SOURCE = "boot"
EVICTION_SOURCE = "eviction"
SUPERSEDING_SOURCE = "superseding"
REBALANCE_SOURCE = "rebalance"
AS_WANTED = "as wanted"


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing to do until something stored changes, or until `until_s` (wall clock); `reason` says
    what is waited for."""

    reason: str
    until_s: float | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer a target; with `restore` the width in force becomes the target again."""

    outcome: TargetOutcome
    restore: bool = False


@dataclass(frozen=True, slots=True)
class Operate:
    """Carry out an operation."""

    request: ScaleRequest


Action = Idle | Answer | Operate


@dataclass(frozen=True, slots=True)
class View:
    """What is decided from: what is stored, what is legal, and the wall clock."""

    status: Status
    shape: EngineShape
    config: ScaleConfig
    now_s: float
    suspects: Mapping[str, str] = field(default_factory=dict)
    """In quarantine, and why."""
    released_s: float | None = None
    """When the first of them is let out."""


def decide(status: Status, shape: EngineShape, config: ScaleConfig, now_s: float) -> Action:
    """The next action: boot what is not there, supersede what nobody switched to, evict who is
    lost, then follow the target, and at last bring experts to where they should be."""
    strikes = status.last.strikes if status.last else {}
    suspects = quarantined(strikes, now_s, config.quarantine_s)
    released = released_s(strikes, suspects, config.quarantine_s)
    view = View(status, shape, config, now_s, suspects, released)
    action = _next(view)
    return _until_given_up(view, action) if isinstance(action, Idle) else action


def _next(view: View) -> Action:
    status, lost = view.status, view.status.lost_reasons()
    if status.in_force is None or len(lost) == status.width:
        return _boot(view)
    if status.withdrawn is not None:
        return _supersede(view, status.withdrawn)
    if lost:
        return _evict(view, status.in_force, frozenset(lost))
    return _follow(view, status.in_force)


def wanted(status: Status, config: ScaleConfig) -> TargetRecord:
    """The target in force: the stored one, or the width to boot with."""
    return status.target or TargetRecord("", config.initial_ranks, BOOT_SOURCE, 0.0)


def _answered(status: Status, target: TargetRecord) -> bool:
    """True if nobody waits for an answer to `target`."""
    known = status.outcome.request_id if status.outcome is not None else ""
    return target.request_id in ("", known)


def _until_given_up(view: View, idle: Idle) -> Action:
    """Wait, but nobody shall wait for ever for a target that can't be acted on."""
    target = wanted(view.status, view.config)
    if _answered(view.status, target):
        return idle
    until_s = target.requested_at_s + view.config.slots_timeout_s
    if view.now_s < until_s:
        return replace(idle, until_s=min(until_s, idle.until_s or until_s))
    reason = (
        f"target {target.ranks}: given up after {view.config.slots_timeout_s:g} s "
        f"(scale.slots_timeout_s), {view.status.width} ranks stay: {idle.reason}"
    )
    outcome = TargetOutcome(target.request_id, target.ranks, OutcomeStatus.FAILED, reason)
    return Answer(outcome, restore=view.status.width > 0)


def _boot(view: View) -> Action:
    """Start from nothing, with an epoch above all before. Shells of a topology that can't serve any
    more join again, after those that are free, once they have ended its engines; those in
    quarantine come last."""
    status, ranks = view.status, view.config.initial_ranks
    nothing = Topology(status.topology.epoch if status.topology else Epoch(0))
    members = status.topology.worker_ids if status.topology else ()
    members += status.withdrawn.worker_ids if status.withdrawn else ()
    discarded = tuple(dict.fromkeys(w for w in members if w in status.members))
    barred = barred_slots(view.suspects)
    free = sorted(dict.fromkeys((*status.standby(), *discarded)), key=lambda w: w in barred)
    if len(free) < ranks:
        return Idle(f"boot: {len(free)} of {ranks} worker shells are on standby")
    try:
        plan = _plan(view, nothing, ranks, candidates=free)
    except TargetRefused as exc:
        return Idle(f"boot: {exc.reason}")
    return _operate(view, plan, BOOT_SOURCE, discarded=discarded)


def _supersede(view: View, served: Topology) -> Action:
    """Give the ranks that serve a newer epoch than the one that was withdrawn. Who missed that
    decision is left out; if it can't be spared it stays, as long as it lives."""
    status, last = view.status, view.status.last
    staying = last.plan.retained if last is not None else served.worker_ids
    joiners = last.plan.joiners + last.discarded if last is not None else ()
    discarded = tuple(w for w in joiners if w in status.members)
    reason = ""
    for lost in (status.lost_reasons(), status.lost_reasons(given_up=False)):
        stay = [w for w in staying if w not in lost]
        try:
            plan = _narrowed(view, served, len(stay), frozenset(lost))
        except TargetRefused as exc:
            reason = exc.reason
            continue
        gone = tuple(w for w in served.worker_ids if w in lost)
        request = ScaleRequest(
            plan, SUPERSEDING_SOURCE, lost=gone, discarded=discarded, served=served
        )
        return Operate(request)
    anew = _boot(view)
    return anew if isinstance(anew, Operate) else Idle(f"nobody has switched: {reason}")


def _narrowed(view: View, before: Topology, alive: int, lost: frozenset[WorkerId]) -> ScalePlan:
    """From `before` to the largest legal width that `alive` ranks can be. Raises TargetRefused."""
    slots = len(view.status.members)
    ranks = legal_width(alive, view.shape, view.config.limits, slots)
    if ranks > alive:
        raise TargetRefused(f"{alive} ranks live, {ranks} are the fewest that are legal")
    if ranks < before.world_size:
        return _plan(view, before, ranks, lost)
    after = replace(before, epoch=_next_epoch(view.status), placement=0)
    return ScalePlan(Kind.DOWN, before, after, after)


def _evict(view: View, topology: Topology, lost: frozenset[WorkerId]) -> Action:
    """Go down to the largest legal width of the living; if there is none, free shells take the
    place of the dead; if there are too few of them, start anew."""
    alive = topology.world_size - len(lost)
    gone = tuple(w for w in topology.worker_ids if w in lost)
    try:
        plan = _narrowed(view, topology, alive, lost)
    except TargetRefused as exc:
        try:
            plan = _replaced(view, topology, alive, lost)
        except TargetRefused as also:
            anew = _boot(view)
            reason = f"{', '.join(gone)} lost: {exc.reason}; {also.reason}"
            return anew if isinstance(anew, Operate) else Idle(reason)
    cold = barred_images(view.suspects)
    return Operate(ScaleRequest(plan, EVICTION_SOURCE, lost=gone, cold=cold))


def _replaced(view: View, topology: Topology, alive: int, lost: frozenset[WorkerId]) -> ScalePlan:
    """Joiners in place of the lost, for the smallest legal width. Raises TargetRefused."""
    status = view.status
    ranks = legal_width(alive, view.shape, view.config.limits, len(status.members))
    barred = barred_slots(view.suspects)
    free = tuple(w for w in status.standby() if w not in barred)
    given = PlanInput(topology, ranks, _next_epoch(status), view.shape, free, lost)
    return plan_replacement(given)


def _follow(view: View, topology: Topology) -> Action:
    status, config = view.status, view.config
    target = wanted(status, config)
    answered = _answered(status, target)
    if target.ranks == topology.world_size:
        return _settle(view, topology) if answered else Answer(_reached(status, target))
    why_not = refusal(target.ranks, view.shape, config.limits, len(status.members))
    if why_not and not answered:
        outcome = TargetOutcome(target.request_id, target.ranks, OutcomeStatus.REFUSED, why_not)
        return Answer(outcome, restore=True)
    if why_not:
        return Idle(why_not)
    barred = barred_slots(view.suspects)
    free = tuple(w for w in status.standby() if w not in barred)
    try:
        plan = _plan(view, topology, target.ranks, candidates=free, leaving=target.leaving)
    except TargetRefused as exc:
        return Idle(exc.reason + _in_quarantine(view), view.released_s)
    return _operate(view, plan, target.source, request_id=target.request_id)


def _settle(view: View, topology: Topology) -> Action:
    """All is as wanted; experts may not be where they should, if moving them was stopped."""
    settled = replace(topology, members=place_experts(topology.members, view.shape))
    try:
        if not move_rounds(topology, settled):
            return Idle(AS_WANTED)
    except TargetRefused as exc:
        return Idle(f"{AS_WANTED}, but experts stay where they are: {exc.reason}")
    plan = ScalePlan(Kind.REBALANCE, topology, topology, settled)
    return Operate(ScaleRequest(plan, REBALANCE_SOURCE))


def _in_quarantine(view: View) -> str:
    barred = sorted(barred_slots(view.suspects))
    return "".join(f"; {w} is in quarantine: {view.suspects[w]}" for w in barred)


def _operate(
    view: View,
    plan: ScalePlan,
    source: str,
    *,
    request_id: str = "",
    discarded: tuple[WorkerId, ...] = (),
) -> Operate:
    """An operation that starts engines: not from images that are in quarantine."""
    cold = barred_images(view.suspects)
    return Operate(ScaleRequest(plan, source, request_id, discarded=discarded, cold=cold))


def _reached(status: Status, target: TargetRecord) -> TargetOutcome:
    """A target for the width in force: reached if it came while that width was being made."""
    last = status.last
    joined = (
        last is not None
        and last.phase is Phase.DONE
        and last.opened_at_s <= target.requested_at_s <= last.opened_at_s + last.elapsed_s
    )
    if joined and last is not None:
        return TargetOutcome(
            target.request_id,
            target.ranks,
            OutcomeStatus.REACHED,
            operation_id=last.operation_id,
        )
    reason = f"target {target.ranks}: that is the width in force; nothing to do"
    return TargetOutcome(target.request_id, target.ranks, OutcomeStatus.UNCHANGED, reason)


def _plan(
    view: View,
    before: Topology,
    ranks: int,
    lost: frozenset[WorkerId] = frozenset(),
    *,
    candidates: Sequence[WorkerId] = (),
    leaving: WorkerId | None = None,
) -> ScalePlan:
    epoch = _next_epoch(view.status)
    return plan_scale(PlanInput(before, ranks, epoch, view.shape, candidates, lost, leaving))


def _next_epoch(status: Status) -> Epoch:
    return Epoch(max(status.epoch, status.topology.epoch if status.topology else 0) + 1)
