"""A short soak on a real deployment; benchmarks/protocol_soak.py is the long one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dynamo_elastic.agent.base import Tier
from dynamo_elastic.demo.load import Prompt
from dynamo_elastic.demo.run import leftovers
from dynamo_elastic.testing.cycles import is_ours, lasting
from dynamo_elastic.testing.soak import soak, soak_config

pytestmark = [
    pytest.mark.root,
    pytest.mark.criu,
    pytest.mark.etcd,
    pytest.mark.nixl,
    pytest.mark.dynamo,
    pytest.mark.timeout(180),
]

PROMPTS = [Prompt("river stone light", 7, 24), Prompt("amber cloud", 8, 64)]


@pytest.mark.slow
def test_cycles_under_load_leave_nothing_behind(tmp_path: Path) -> None:
    config = soak_config(tmp_path, "test-soak")
    result = asyncio.run(
        soak(config, PROMPTS, clients=4, cycles=3, settle_s=0.5, say=lambda text: None)
    )
    tally = result.tally
    assert tally.failed == 0, tally.errors
    assert tally.requests > 20
    assert tally.unequal == 0
    assert 0 < tally.moved <= sum(c.drained for c in result.cycles)
    assert tally.moved_gap_max_s <= 1.0
    assert {t for c in result.cycles for t in c.tiers} == {Tier.IMAGE}

    # Caches and pools fill in the first cycle.
    first, last = result.cycles[1], result.cycles[-1]
    assert last.etcd_keys == first.etcd_keys
    processes = [p for p in lasting([c.footprints for c in result.cycles]) if is_ours(p)]
    names = {p.partition(":")[0] for p in processes}
    assert names == {"agent", "coordinator", "engine0", "slot0", "slot1", "slot2", "slot3"}
    grown = {p: last.footprints[p].fds - first.footprints[p].fds for p in processes}
    assert sum(grown.values()) <= 2, grown
    assert leftovers(config, set()) == []
