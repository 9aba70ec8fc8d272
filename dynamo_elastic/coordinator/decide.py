"""What the coordinator does next, from one view of what is stored: a pure function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynamo_elastic.config import ScaleConfig
from dynamo_elastic.coordinator.records import OutcomeStatus, TargetOutcome, TargetRecord
from dynamo_elastic.coordinator.scale import ScaleRequest
from dynamo_elastic.coordinator.status import Status
from dynamo_elastic.errors import TargetRefused
from dynamo_elastic.phases import Phase
from dynamo_elastic.topology import (
    EngineShape,
    PlanInput,
    ScalePlan,
    Topology,
    legal_width,
    plan_scale,
    refusal,
)
from dynamo_elastic.types import Epoch, WorkerId

BOOT_SOURCE = "boot"
EVICTION_SOURCE = "eviction"


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing to do until something stored changes; `reason` says what is waited for."""

    reason: str


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


def decide(status: Status, shape: EngineShape, config: ScaleConfig) -> Action:
    """The next action: boot what is not there, evict who is lost, then follow the target."""
    lost = status.lost_reasons()
    if status.topology is None or len(lost) == status.width:
        return _boot(status, shape, config)
    if lost:
        return _evict(status, shape, config, frozenset(lost))
    return _follow(status, status.topology, shape, config)


def wanted(status: Status, config: ScaleConfig) -> TargetRecord:
    """The target in force: the stored one, or the width to boot with."""
    return status.target or TargetRecord("", config.initial_ranks, BOOT_SOURCE, 0.0)


def _boot(status: Status, shape: EngineShape, config: ScaleConfig) -> Action:
    """Start from nothing, with an epoch above all before. Shells of a topology that can't serve any
    more join again, after those that are free, once they have ended its engines."""
    nothing = Topology(status.topology.epoch if status.topology else Epoch(0))
    ranks = config.initial_ranks
    members = status.topology.worker_ids if status.topology else ()
    discarded = tuple(w for w in members if w in status.members)
    free = tuple(dict.fromkeys((*status.standby(), *discarded)))
    if len(free) < ranks:
        return Idle(f"boot: {len(free)} of {ranks} worker shells are on standby")
    try:
        plan = _plan(status, nothing, ranks, shape, candidates=free)
    except TargetRefused as exc:
        return Idle(f"boot: {exc.reason}")
    return Operate(ScaleRequest(plan, BOOT_SOURCE, discarded=discarded))


def _evict(
    status: Status, shape: EngineShape, config: ScaleConfig, lost: frozenset[WorkerId]
) -> Action:
    """Go down to the largest legal width of the living; if there is none, or if experts are lost
    with the dead, start anew."""
    topology = status.topology or Topology(Epoch(0))
    alive = status.width - len(lost)
    names = ", ".join(sorted(lost))
    try:
        ranks = legal_width(alive, shape, config.limits, len(status.members))
        if ranks > alive:
            raise TargetRefused(f"{alive} ranks live, {ranks} are the fewest that are legal")
        plan = _plan(status, topology, ranks, shape, lost)
    except TargetRefused as exc:
        anew = _boot(status, shape, config)
        return anew if isinstance(anew, Operate) else Idle(f"{names} lost: {exc.reason}")
    gone = tuple(w for w in topology.worker_ids if w in lost)
    return Operate(ScaleRequest(plan, EVICTION_SOURCE, lost=gone))


def _follow(status: Status, topology: Topology, shape: EngineShape, config: ScaleConfig) -> Action:
    target = wanted(status, config)
    answered = not target.request_id or (
        status.outcome is not None and status.outcome.request_id == target.request_id
    )
    if target.ranks == topology.world_size:
        return Idle("as wanted") if answered else Answer(_reached(status, target))
    why_not = refusal(target.ranks, shape, config.limits, len(status.members))
    if why_not and not answered:
        outcome = TargetOutcome(target.request_id, target.ranks, OutcomeStatus.REFUSED, why_not)
        return Answer(outcome, restore=True)
    if why_not:
        return Idle(why_not)
    try:
        plan = _plan(status, topology, target.ranks, shape)
    except TargetRefused as exc:
        return Idle(exc.reason)
    return Operate(ScaleRequest(plan, target.source, target.request_id))


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
    status: Status,
    before: Topology,
    ranks: int,
    shape: EngineShape,
    lost: frozenset[WorkerId] = frozenset(),
    candidates: Sequence[WorkerId] | None = None,
) -> ScalePlan:
    free = status.standby() if candidates is None else candidates
    epoch = Epoch(max(status.epoch, before.epoch) + 1)
    return plan_scale(PlanInput(before, ranks, epoch, shape, free, lost))
