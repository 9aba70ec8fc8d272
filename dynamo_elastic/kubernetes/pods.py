"""Pods and graph status as JSON: made from, and read into, the values of base.py. Pure.

The template says how a worker starts; a pod adds labels, from which the template can learn its
slot (the downward API: metadata.labels['dynamo-elastic/slot']).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from dynamo_elastic.kubernetes.base import Condition, GraphView, PodView, Report, Role

Json = Mapping[str, Any]

GROUP, VERSION, KIND = "nvidia.com", "v1beta1", "DynamoGraphDeployment"
API_VERSION = f"{GROUP}/{VERSION}"
SLOT = "dynamo-elastic/slot"
ROLE = "dynamo-elastic/role"
GRAPH = f"{GROUP}/dynamo-graph-deployment-name"
COMPONENT = f"{GROUP}/dynamo-component"
"""With GRAPH, what Dynamo's planner finds pods by, and what we list them by."""

_GPU = "nvidia.com/gpu"
_OVER = ("Failed", "Succeeded")


@dataclass(frozen=True, slots=True)
class Served:
    """What the planner reads from the status besides counts."""

    namespace: str
    """Dynamo's, of the workers."""
    model: str


def labels(graph: str, component: str) -> dict[str, str]:
    """Of every pod of a component, and of no other pod."""
    return {GRAPH: graph, COMPONENT: component}


def pod_name(graph: str, component: str, slot: int) -> str:
    """One name for each slot: the API server sees to it that no slot has two pods."""
    return f"{graph}-{component}-{slot}".lower()


def pod_body(graph: GraphView, component: str, slot: int) -> dict[str, Any]:
    """A held pod for `slot`, from the graph's template and owned by the graph."""
    template = copy.deepcopy(dict(graph.template))
    metadata = template.get("metadata") or {}
    owner = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": graph.name,
        "uid": graph.uid,
        "controller": True,
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": pod_name(graph.name, component, slot),
            "labels": {
                **(metadata.get("labels") or {}),
                **labels(graph.name, component),
                SLOT: str(slot),
                ROLE: Role.HELD.value,
            },
            "annotations": metadata.get("annotations") or {},
            "ownerReferences": [owner],
        },
        "spec": template.get("spec") or {},
    }


def pod_view(pod: Json) -> PodView | None:
    """What we need of a pod; None if it has no slot, so is none of ours."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    known = metadata.get("labels") or {}
    slot = known.get(SLOT, "")
    if not slot.isdecimal():
        return None
    return PodView(
        name=metadata["name"],
        uid=metadata["uid"],
        version=metadata["resourceVersion"],
        slot=int(slot),
        role=Role.RELEASED if known.get(ROLE) == Role.RELEASED else Role.HELD,
        deleting="deletionTimestamp" in metadata,
        failed=status.get("phase") in _OVER,
        since_s=max(_time_s(metadata["creationTimestamp"]), _ready_since_s(status)),
        trouble=_trouble(status),
    )


def graph_view(graph: Json, component: str) -> GraphView | None:
    """The graph with its elastic component; None if it has none of that name."""
    components = graph["spec"].get("components") or ()
    index = next((i for i, c in enumerate(components) if c.get("name") == component), None)
    if index is None:
        return None
    metadata, found = graph["metadata"], components[index]
    return GraphView(
        name=metadata["name"],
        uid=metadata["uid"],
        version=metadata["resourceVersion"],
        generation=metadata["generation"],
        replicas=found.get("replicas", 0),
        index=index,
        template=found.get("podTemplate") or {},
        report=_report(graph.get("status") or {}, component),
        deleting="deletionTimestamp" in metadata,
    )


def status_body(report: Report, component: str, served: Served, graph: GraphView) -> dict[str, Any]:
    """The graph's status as Dynamo's operator would write it. The planner takes the component for
    stable when replicas wanted, updated and available are equal: both of the latter are the ranks
    in force. (`Deployment` is the nearest kind that the schema knows.)"""
    gpus = _gpus(graph.template)
    ready = report.conditions[0].holds
    return {
        "observedGeneration": report.generation,
        "state": "successful" if ready else "pending",
        "conditions": [_condition(c, report, graph.report) for c in report.conditions],
        "components": {
            component: {
                "componentKind": "Deployment",
                "runtimeNamespace": served.namespace,
                "servedModelName": served.model,
                "gpusPerEngine": gpus,
                "gpusPerReplica": gpus,
                "replicas": report.allocated,
                "updatedReplicas": report.active,
                "readyReplicas": report.active,
                "availableReplicas": report.active,
            }
        },
    }


def _condition(condition: Condition, report: Report, before: Report | None) -> dict[str, Any]:
    body: dict[str, Any] = {
        "type": condition.kind,
        "status": str(condition.holds),
        "reason": condition.reason,
        "message": condition.message,
        "observedGeneration": report.generation,
    }
    known = {c.kind: c for c in before.conditions} if before else {}
    same = known.get(condition.kind)
    since_s = condition.since_s
    if same is not None and same.holds == condition.holds:
        since_s = same.since_s
    return body | {"lastTransitionTime": _timestamp(since_s)}


def _report(status: Json, component: str) -> Report | None:
    counts = (status.get("components") or {}).get(component)
    if counts is None or "observedGeneration" not in status:
        return None
    conditions = tuple(
        Condition(
            c["type"],
            c["status"] == "True",
            c.get("reason", ""),
            c.get("message", ""),
            _time_s(c["lastTransitionTime"]),
        )
        for c in status.get("conditions") or ()
    )
    return Report(
        status["observedGeneration"],
        counts.get("replicas", 0),
        counts.get("availableReplicas", 0),
        conditions,
    )


def _gpus(template: Json) -> int:
    containers = (template.get("spec") or {}).get("containers") or ()
    limits = ((c.get("resources") or {}).get("limits") or {} for c in containers)
    return sum(int(limit.get(_GPU, 0)) for limit in limits)


def _ready_since_s(status: Json) -> float:
    ready = (c for c in status.get("conditions") or () if c["type"] == "Ready")
    return max((_time_s(c.get("lastTransitionTime")) for c in ready), default=0.0)


def _trouble(status: Json) -> str:
    """Why the pod does not run, in the words of scheduler or kubelet."""
    waiting = ((c.get("state") or {}).get("waiting") for c in status.get("containerStatuses") or ())
    reasons = [f"{w.get('reason')}: {w.get('message', '')}" for w in waiting if w]
    reasons += [
        f"{c.get('reason')}: {c.get('message', '')}"
        for c in status.get("conditions") or ()
        if c["type"] == "PodScheduled" and c["status"] == "False"
    ]
    if status.get("phase") in _OVER:
        reasons.append(f"{status['phase']}: {status.get('reason', 'its containers have ended')}")
    return "; ".join(r.rstrip(": ") for r in reasons)


def _time_s(stamp: str | None) -> float:
    return datetime.fromisoformat(stamp).timestamp() if stamp else 0.0


def _timestamp(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
