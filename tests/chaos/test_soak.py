"""A short walk on a real deployment; benchmarks/protocol_soak.py is the long one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dynamo_elastic.demo.load import Prompt
from dynamo_elastic.demo.run import leftovers
from dynamo_elastic.testing import soak as soaks
from dynamo_elastic.testing.cycles import is_ours, lasting
from dynamo_elastic.testing.soak import Component, soak, soak_config

pytestmark = [
    pytest.mark.root,
    pytest.mark.criu,
    pytest.mark.etcd,
    pytest.mark.nixl,
    pytest.mark.dynamo,
    pytest.mark.timeout(400),
]

PROMPTS = [Prompt("river stone light", 7, 24), Prompt("amber cloud", 8, 64)]


@pytest.mark.slow
def test_a_walk_with_every_component_restarted_violates_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soaks, "REST_EVERY", 4)
    config = soak_config(tmp_path, "test-soak")
    result = asyncio.run(
        soak(
            config,
            PROMPTS,
            seed=1,
            clients=2,
            lasts=lambda so_far: len(so_far.restarts) < len(Component),
            say=lambda text: None,
            restart_every=2,
        )
    )
    assert result.violations == []
    tally = result.tally
    assert (tally.failed, tally.unequal) == (0, 0), tally.errors
    assert tally.requests > 10
    assert set(result.restarts) == set(Component)
    first, *_, last = result.rests
    # A shell may have told of its tokens, and not been heard yet.
    assert abs(last.etcd_keys - first.etcd_keys) <= config.scale.max_ranks
    processes = [p for p in lasting([r.footprints for r in result.rests[-2:]]) if is_ours(p)]
    before, after = (r.footprints for r in result.rests[-2:])
    assert sum(after[p].fds - before[p].fds for p in processes) <= 4
    assert leftovers(config, set()) == []
