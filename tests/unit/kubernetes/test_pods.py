"""Pods and status as JSON: what is written, and what is read of what others write."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_elastic.kubernetes.base import Condition, GraphView, Report, Role
from dynamo_elastic.kubernetes.pods import (
    Served,
    graph_view,
    pod_body,
    pod_view,
    status_body,
)
from dynamo_elastic.testing.graph_api import COMPONENT, manifest

SERVED = Served("dynamo-moe", "moe")


def graph(**metadata: Any) -> dict[str, Any]:
    """The graph of deploy/kubernetes, as the API server gives it back."""
    body = manifest("graph.yaml")[0]
    body["metadata"] |= {"uid": "u", "resourceVersion": "7", "generation": 3} | metadata
    return body


def seen(body: dict[str, Any]) -> GraphView:
    view = graph_view(body, COMPONENT)
    assert view is not None
    return view


def stored(body: dict[str, Any], **status: Any) -> dict[str, Any]:
    """A pod as the API server gives it back."""
    times = {"creationTimestamp": "2026-01-01T00:00:00Z", "uid": "p", "resourceVersion": "9"}
    return body | {"metadata": body["metadata"] | times, "status": status}


def test_a_pod_is_read_as_it_was_written() -> None:
    pod = pod_view(stored(pod_body(seen(graph()), COMPONENT, 5)))
    assert pod is not None
    assert (pod.name, pod.slot, pod.role, pod.live) == ("moe-decode-5", 5, Role.HELD, True)


def test_a_pod_keeps_what_its_template_says_and_leaves_the_template_alone() -> None:
    view = seen(graph())
    before = str(view.template)
    body = pod_body(view, COMPONENT, 1)
    body["spec"]["containers"][0]["args"].append("--more")
    assert str(view.template) == before
    assert body["metadata"]["labels"]["app"] == "dynamo-elastic-worker"
    assert body["metadata"]["ownerReferences"][0]["uid"] == "u"


def test_pods_of_others_are_not_ours() -> None:
    body = stored(pod_body(seen(graph()), COMPONENT, 1))
    del body["metadata"]["labels"]["dynamo-elastic/slot"]
    assert pod_view(body) is None


@pytest.mark.parametrize(
    ("status", "trouble"),
    [
        (
            {
                "conditions": [
                    {
                        "type": "PodScheduled",
                        "status": "False",
                        "reason": "Unschedulable",
                        "message": "0/3 nodes",
                    }
                ]
            },
            "Unschedulable: 0/3 nodes",
        ),
        (
            {"containerStatuses": [{"state": {"waiting": {"reason": "CrashLoopBackOff"}}}]},
            "CrashLoopBackOff",
        ),
        ({"phase": "Failed", "reason": "Evicted"}, "Failed: Evicted"),
        ({"phase": "Running", "containerStatuses": [{"state": {"running": {}}}]}, ""),
    ],
)
def test_trouble_is_said_in_the_words_of_who_has_it(status: dict[str, Any], trouble: str) -> None:
    pod = pod_view(stored(pod_body(seen(graph()), COMPONENT, 1), **status))
    assert pod is not None
    assert pod.trouble == trouble
    assert pod.failed == (status.get("phase") == "Failed")


def test_a_pods_time_runs_from_its_last_change_of_readiness() -> None:
    ready = {"type": "Ready", "status": "False", "lastTransitionTime": "2026-01-01T00:01:00Z"}
    body = pod_body(seen(graph()), COMPONENT, 1)
    young, old = pod_view(stored(body, conditions=[ready])), pod_view(stored(body))
    assert young is not None
    assert old is not None
    assert young.since_s - old.since_s == 60


def test_a_graph_without_the_component_has_none() -> None:
    assert graph_view(graph(), "prefill") is None
    assert seen(graph()).index == 0


def test_a_condition_keeps_its_time_until_it_turns() -> None:
    def report(holds: bool, at_s: float) -> Report:
        return Report(3, 2, 2, (Condition("Ready", holds, "R", "m", at_s),))

    body = graph()
    for holds, at_s, since in ((True, 100.0, 100.0), (True, 200.0, 100.0), (False, 300.0, 300.0)):
        view = seen(body)
        body["status"] = status_body(report(holds, at_s), COMPONENT, SERVED, view)
        told = seen(body).report
        assert told == report(holds, at_s)
        assert told.conditions[0].since_s == since


def test_the_status_has_what_dynamos_planner_asks_for() -> None:
    conditions = (Condition("Ready", True, "R", "m"),)
    body = status_body(Report(3, 4, 2, conditions), COMPONENT, SERVED, seen(graph()))
    assert body["observedGeneration"] == 3
    component = body["components"][COMPONENT]
    assert (component["replicas"], component["updatedReplicas"]) == (4, 2)
    assert (component["gpusPerReplica"], component["servedModelName"]) == (1, "moe")
