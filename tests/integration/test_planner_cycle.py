"""Load rises and falls, the real planner decides; benchmarks/planner_cycle.py is the long one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dynamo_elastic.demo.run import leftovers
from dynamo_elastic.phases import Kind
from dynamo_elastic.testing.etcd_process import etcd_process
from dynamo_elastic.testing.planner_cycle import Part, cycle_config, planner_cycles

pytestmark = [
    pytest.mark.etcd,
    pytest.mark.nixl,
    pytest.mark.dynamo,
    pytest.mark.timeout(300),
]


@pytest.mark.slow
def test_the_planner_scales_with_the_load(tmp_path: Path) -> None:
    """The coordinator is killed on the way up, the frontend on the way down."""
    with etcd_process(tmp_path / "etcd") as etcd:
        config = cycle_config(tmp_path, etcd, scale={"max_ranks": 3}, snapshot={"enabled": False})
        result = asyncio.run(
            planner_cycles(
                config,
                etcd,
                [(Part.COORDINATOR, Part.FRONTEND)],
                clients=30,
                requests_min=150,
                say=print,
            )
        )
    meter = result.meter
    assert meter.failed == 0, meter.errors
    assert meter.unequal == 0
    assert meter.total >= 100
    assert [h.ranks_after for h in result.halves] == [3, 2]
    assert [h.killed for h in result.halves] == ["coordinator", "frontend"]
    assert all(h.killed_in for h in result.halves), "each was killed in the middle"
    assert all(h.stable for h in result.halves)
    assert (result.decided(Kind.UP), result.decided(Kind.DOWN)) == (1, 1)
    assert leftovers(config, set()) == []
