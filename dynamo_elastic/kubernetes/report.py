"""What the planner and people are told about one graph, as conditions and counts. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dynamo_elastic.coordinator.status import Status
from dynamo_elastic.kubernetes.base import Condition, PodView, Report, Role
from dynamo_elastic.kubernetes.decide import View, overdue, settled

READY = "Ready"
"""Ranks serve. Dynamo's planner scales nothing while this does not hold."""
SETTLED = "ElasticSettled"
"""The wish is in force, its operation is over, and no pod is left over."""
DEGRADED = "ElasticDegraded"
"""Ranks are lost, or pods have trouble: a fault, not a wish for less."""


def report_of(view: View, refusals: Sequence[str] = ()) -> Report:
    """The report on `view`: desired, allocated, active and safe to delete, each by itself.
    `refusals`: what the API server would not do, in its own words."""
    pods = [p for p in view.cluster.pods if not p.deleting]
    conditions = (_ready(view.status), _settled(view, pods), _degraded(view, pods, refusals))
    return Report(
        generation=view.cluster.graph.generation,
        allocated=len(pods),
        active=view.status.width,
        conditions=tuple(replace(c, since_s=view.now_s) for c in conditions),
    )


def _ready(status: Status) -> Condition:
    if status.width:
        return Condition(READY, True, "RanksServe", f"{status.width} ranks serve")
    return Condition(READY, False, "Booting", status.notice or "no ranks serve yet")


def _settled(view: View, pods: list[PodView]) -> Condition:
    released = [p.name for p in view.cluster.pods if p.role is Role.RELEASED or p.deleting]
    counts = (
        f"desired {view.desired}, allocated {len(pods)}, active {view.status.width}, "
        f"safe to delete: {', '.join(released) or 'none'}"
    )
    operation = view.status.operation
    if operation is not None:
        doing = f"; operation {operation.operation_id}: {operation.kind}, {operation.phase}"
        return Condition(SETTLED, False, "Scaling", counts + doing)
    if settled(view) and not released and len(pods) == view.desired:
        return Condition(SETTLED, True, "AsWanted", counts)
    waits = f"; {view.status.notice}" if view.status.notice else ""
    return Condition(SETTLED, False, "Waiting", counts + waits)


def _degraded(view: View, pods: list[PodView], refusals: Sequence[str]) -> Condition:
    faults = list(refusals)
    faults += [f"{w}: {why}" for w, why in sorted(view.status.lost_reasons().items())]
    faults += [f"{p.name}: {p.trouble or 'no worker'}" for p in pods if _troubled(view, p)]
    if faults:
        return Condition(DEGRADED, True, "Faults", "; ".join(faults))
    return Condition(DEGRADED, False, "NoFaults", "no rank is lost, no pod has trouble")


def _troubled(view: View, pod: PodView) -> bool:
    return pod.failed or overdue(view, pod) or bool(pod.trouble)
