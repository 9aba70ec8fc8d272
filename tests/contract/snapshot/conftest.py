"""Tests with a GPU run in processes of their own: one that has used CUDA must not fork, and the
tests of tests/gpu, which come later, do."""

from __future__ import annotations

import pytest

from dynamo_elastic.testing.isolated import run_isolated

_DEADLINE_S = 110.0


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    if item.get_closest_marker("gpu") is None or item.get_closest_marker("skip") is not None:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in run_isolated(item, deadline_s=_DEADLINE_S, after=str):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
