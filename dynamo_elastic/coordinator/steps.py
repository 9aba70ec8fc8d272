"""What each step says to whom, and what its acks must agree on: pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from dynamo_elastic.config_sections import ScaleConfig
from dynamo_elastic.coordinator.records import AckRecord, OperationRecord, to_json
from dynamo_elastic.phases import Kind, Step, Who
from dynamo_elastic.topology import EMPTY, ScalePlan, Topology
from dynamo_elastic.types import Incarnation, WorkerId

Digests = dict[WorkerId, dict[str, str]]
"""Worker -> region -> digest of the bytes that its source holds."""

_PLANNED = frozenset(
    {
        Step.OPEN,
        Step.CONNECT,
        Step.LOAD,
        Step.STREAM,
        Step.SWITCH,
        Step.SERVE,
        Step.DISCONNECT,
    }
)
"""Steps that are about the plan as a whole, with every member of the next topology."""


def participants(record: OperationRecord, who: Who) -> tuple[WorkerId, ...]:
    """Workers that a step is for. Lost ones are left out, but not of the leavers to be parked."""
    plan = record.plan
    if who is Who.LEAVERS:
        return (*plan.leavers, *record.discarded)
    groups: dict[Who, tuple[WorkerId, ...]] = {
        Who.RETAINED: plan.retained,
        Who.JOINERS: plan.joiners,
        Who.LOADERS: plan.loaders,
        Who.LIVE_LEAVERS: plan.leavers,
        Who.NEXT: plan.after.worker_ids,
        Who.BEFORE: plan.before.worker_ids,
    }
    if who is Who.PROBED:
        reference = [w for w in plan.retained if w not in record.lost][:1]
        return tuple(w for w in (*reference, *plan.joiners) if w not in record.lost)
    return tuple(w for w in groups[who] if w not in record.lost)


def everyone(record: OperationRecord) -> tuple[WorkerId, ...]:
    """All workers of both topologies, lost ones too."""
    return tuple(dict.fromkeys((*record.plan.before.worker_ids, *record.plan.joiners)))


def timeout_s(step: Step, scale: ScaleConfig) -> float:
    """How long a participant has for a step."""
    if step is Step.RESTORE:
        return scale.restore_timeout_s
    if step is Step.DRAIN:
        return scale.drain_timeout_s + scale.step_timeout_s
    return scale.step_timeout_s


def common_payload(step: Step, record: OperationRecord) -> dict[str, Any]:
    """What all commands of a step of the phase table say; expert moves have their own."""
    if step not in _PLANNED:
        return {}
    plan = record.plan
    return {
        "topology": to_json(plan.after),
        "retained": list(plan.retained),
        "joiners": list(plan.joiners),
        "leavers": list(plan.leavers),
    }


def own_payload(
    step: Step, worker: WorkerId, record: OperationRecord, scale: ScaleConfig, digests: Digests
) -> dict[str, Any]:
    """What a step of the phase table says to `worker` besides."""
    if step in (Step.ABORT, Step.WITHDRAW):
        return {"epoch": record.plan.after.epoch}
    if step is Step.RESTORE:
        return {"cold": worker in record.cold, "founds": record.kind is Kind.BOOT}
    if step is Step.DRAIN:
        return {"short_tokens": scale.short_tokens, "timeout_s": scale.drain_timeout_s}
    if step is Step.CHECK:
        return {"digests": digests.get(worker, {})}
    return {}


def with_incarnations(plan: ScalePlan, acks: Mapping[WorkerId, AckRecord]) -> ScalePlan:
    """The plan with the incarnations that RESTORE acks report."""

    def named(topology: Topology) -> Topology:
        members = tuple(
            replace(m, incarnation=Incarnation(str(acks[m.worker_id].payload["incarnation"])))
            if m.worker_id in acks
            else m
            for m in topology.members
        )
        return replace(topology, members=members)

    return replace(plan, after=named(plan.after), settled=named(plan.settled))


def merge_digests(acks: Iterable[AckRecord]) -> tuple[Digests, tuple[str, ...]]:
    """All digests that sources report, and the regions on which two sources disagree."""
    merged: Digests = {}
    disputed: set[str] = set()
    for ack in acks:
        for worker, regions in ack.payload.get("digests", {}).items():
            known = merged.setdefault(WorkerId(worker), {})
            for region, digest in regions.items():
                if known.setdefault(region, digest) != digest:
                    disputed.add(region)
    return merged, tuple(sorted(disputed))


def not_switched(acks: Mapping[WorkerId, AckRecord]) -> tuple[WorkerId, ...]:
    """Workers that have seen the decision, and wait for others to switch."""
    return tuple(w for w, ack in acks.items() if not ack.payload.get("switched", True))


def odd_ones(
    acks: Mapping[WorkerId, AckRecord], order: Iterable[WorkerId], key: str
) -> tuple[WorkerId, ...]:
    """Workers whose answer under `key` differs from the reference: the first of `order` that has
    answered."""
    answers = {w: acks[w].payload.get(key) for w in order if w in acks}
    reference = next(iter(answers.values()), None)
    return tuple(w for w, answer in answers.items() if answer != reference or answer is None)


def facts(acks: Mapping[WorkerId, AckRecord]) -> dict[str, Any]:
    """What the acks of one step say that is worth showing, worker by worker."""
    return {
        worker: {k: v for k, v in ack.payload.items() if k != "digests"}
        for worker, ack in acks.items()
        if ack.payload
    }


def incomplete(record: OperationRecord) -> bool:
    """True if experts were lost with members of the topology decided on: nobody can answer anything
    until they are read from disk."""
    after = record.plan.after
    left = without_experts(after, record.lost)
    held, living = ({e for m in t.members for e in m.experts} for t in (after, left))
    return not held - {EMPTY} <= living


def without_experts(topology: Topology, lost: Iterable[WorkerId]) -> Topology:
    """`topology` with nothing routed to the workers that are lost; ranks stay as they are."""
    gone = set(lost)
    return replace(
        topology,
        members=tuple(
            replace(m, experts=(EMPTY,) * len(m.experts)) if m.worker_id in gone else m
            for m in topology.members
        ),
    )
