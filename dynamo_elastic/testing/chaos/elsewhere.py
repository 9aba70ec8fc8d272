"""Failpoints for which the fault matrix has no run, and the test that hits each of them."""

from __future__ import annotations

from dynamo_elastic.failpoint_table import FAILPOINTS, Actor

_CONTROLLER = (
    "tests/unit/kubernetes/test_controller.py::test_it_fails_or_dies_before_and_after_each_act"
)
"""On fakes; on a real API server, where there is one, its process is killed after each of four
acts by tests/integration/kubernetes/test_controller.py."""

ELSEWHERE = {f.name: _CONTROLLER for f in FAILPOINTS if f.actor is Actor.CONTROLLER}
