"""Cards that change while Dynamo's real frontend serves: no request may notice."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from dynamo_elastic.coordinator.etcd import EtcdStore
from dynamo_elastic.demo.load import Load, Prompt
from dynamo_elastic.dynamo.environment import dynamo_environment
from dynamo_elastic.testing.deployments import asyncio_test
from dynamo_elastic.testing.dynamo_cards import all_cards
from dynamo_elastic.testing.dynamo_processes import (
    dynamo_deployment,
    frontend,
    wait_for_model,
)
from dynamo_elastic.testing.dynamo_rank import DynamoRank
from dynamo_elastic.testing.etcd_process import etcd_process

pytestmark = [pytest.mark.etcd, pytest.mark.dynamo]

CHANGES = 8
CLIENTS = 6
SHORT = [Prompt(f"w{k} w{k + 1}", seed=k, max_tokens=3) for k in range(10, 13)]
LONG = [Prompt(f"w{k} w{k + 1}", seed=k, max_tokens=80) for k in range(20, 22)]
"""Streams that are under way while the cards change."""


@pytest.mark.parametrize(
    ("width", "router"),
    [
        pytest.param(1, "round-robin", marks=pytest.mark.slow),
        (1, "kv"),
        pytest.param(2, "kv", marks=pytest.mark.slow),
    ],
)
@asyncio_test
async def test_no_request_fails_while_cards_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int, router: str
) -> None:
    with etcd_process(tmp_path / "etcd") as etcd:
        config = dynamo_deployment(tmp_path, etcd, slots=4, router_mode=router)
        for name, value in dynamo_environment(config).items():
            monkeypatch.setenv(name, value)
        store = EtcdStore(config.etcd.urls)
        ranks = [DynamoRank(config, f"rank{k}") for k in range(width)]
        try:
            with frontend(config, tmp_path) as url:
                await asyncio.gather(*(r.join(1) for r in ranks))
                await wait_for_model(url)
                before = set(await all_cards(store, config.namespace))
                loads = [Load(url, "test", p, CLIENTS) for p in (SHORT, LONG)]
                for load in loads:
                    load.start()
                    await load.wait_for_each_prompt(timeout_s=20.0)
                for epoch in range(2, 2 + CHANGES):
                    # All at once, as after a commit.
                    await asyncio.gather(*(r.join(epoch) for r in ranks))
                    now = await all_cards(store, config.namespace)
                    assert set(now) == before, "ids stay, and no stand-in is left"
                    assert {c["epoch"] for c in now.values()} == {str(epoch)}
                for load in loads:
                    await load.stop()
                check(loads, ranks)
        finally:
            for rank in ranks:
                await rank.close()
            await store.close()


def check(loads: Sequence[Load], ranks: Sequence[DynamoRank]) -> None:
    results = [r for load in loads for r in load.results]
    assert [r.error for r in results if r.error] == []
    assert len(results) > 50
    assert all(rank.served for rank in ranks), "every rank was given requests"
    for key in {r.prompt.key for r in results}:
        assert len({r.text for r in results if r.prompt.key == key}) == 1
