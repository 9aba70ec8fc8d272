"""Real instances behind Dynamo's real frontend: what clients see while ranks come and go."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from dynamo_elastic.coordinator.etcd import EtcdStore
from dynamo_elastic.demo.load import Load, Prompt
from dynamo_elastic.dynamo.environment import dynamo_environment
from dynamo_elastic.testing.deployments import asyncio_test
from dynamo_elastic.testing.dynamo_processes import dynamo_deployment, frontend, wait_for_model
from dynamo_elastic.testing.dynamo_rank import DynamoRank
from dynamo_elastic.testing.etcd_process import etcd_process
from dynamo_elastic.types import LeaseId

pytestmark = [pytest.mark.etcd, pytest.mark.dynamo]


@asynccontextmanager
async def served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, router_mode: str = "round-robin"
) -> AsyncIterator[tuple[str, list[DynamoRank], EtcdStore]]:
    """A frontend, and `ranks` instances of which the first is registered."""
    with etcd_process(tmp_path / "etcd") as etcd:
        config = dynamo_deployment(tmp_path, etcd, slots=4, router_mode=router_mode)
        for name, value in dynamo_environment(config).items():
            monkeypatch.setenv(name, value)
        store = EtcdStore(config.etcd.urls)
        instances = [DynamoRank(config, f"rank{k}") for k in range(ranks)]
        try:
            with frontend(config, tmp_path) as url:
                await instances[0].join(1)
                await wait_for_model(url)
                yield url, instances, store
        finally:
            for rank in instances:
                await rank.close()
            await store.close()


async def complete(url: str, **body: Any) -> tuple[int, dict[str, Any]]:
    request = {"model": "test", "prompt": "w10 w11", "max_tokens": 5, "ignore_eos": True} | body
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/completions", json=request) as response,
    ):
        return response.status, await response.json()


@pytest.mark.parametrize("router_mode", [pytest.param("round-robin", marks=pytest.mark.slow), "kv"])
@asyncio_test
async def test_no_client_notices_that_ranks_come_and_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, router_mode: str
) -> None:
    async with served(tmp_path, monkeypatch, 3, router_mode) as (url, ranks, store):
        prompts = [Prompt(f"w{k} w{k + 1}", seed=k, max_tokens=30) for k in range(10, 14)]
        load = Load(url, "test", prompts, clients=4)
        load.start()
        await load.wait_for_each_prompt(timeout_s=20.0)
        before = len(load.results)
        keys: list[int] = []
        for epoch in range(2, 14, 2):
            for rank in ranks[1:]:
                await rank.join(epoch)
            await asyncio.sleep(0.35)
            for rank in ranks[1:]:
                await rank.leave()
            await asyncio.sleep(0.25)
            keys.append(len(await store.get_prefix("v1/")))
        await load.stop()
        assert [r.error for r in load.results if r.error] == []
        assert len(load.results) > before
        assert all(rank.served for rank in ranks), "every rank was given requests"
        moved = sum(rank.served for rank in ranks) - len(load.results)
        assert moved > 0, "the load was too light to move a stream"
        texts = {p.key: {r.text for r in load.results if r.prompt.key == p.key} for p in prompts}
        assert {len(seen) for seen in texts.values()} == {1}, "a move changed tokens"
        assert max(r.max_gap_s for r in load.results) < 1.0
        assert len(set(keys)) == 1, f"etcd keys grow: {keys}"


@asyncio_test
async def test_what_clients_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(tmp_path, monkeypatch, 2) as (url, ranks, store):
        # A request that no rank can serve is the client's fault, and says which field.
        status, body = await complete(url, top_p=0.5)
        assert status == 400
        assert "top_p" in str(body)
        # The card carries what the rank was registered with, and goes with the instance.
        cards = await store.get_prefix("v1/mdc/")
        assert b"rank0" in cards[0].value
        await ranks[1].join(7)
        await ranks[0].leave()
        assert len(await store.get_prefix("v1/instances/")) == 1
        # Without a seed, a stream that moves goes on with the tokens that it would have had.
        streaming = asyncio.create_task(complete(url, max_tokens=60))
        await asyncio.sleep(0.25)
        await ranks[0].join(8)
        await ranks[1].leave()
        status, body = await streaming
        assert (status, body["usage"]["completion_tokens"]) == (200, 60)
        assert (ranks[1].served, ranks[0].served) == (1, 1)
        assert ranks[1].engine.asked[0].seed == ranks[0].engine.asked[0].seed
        # A client that goes away frees its rank.
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await complete(url, max_tokens=5000)
        await asyncio.wait_for(ranks[0].desk.idle(), 5.0)
        # A crashed engine's streams go on elsewhere.
        await ranks[1].join(9)
        pending = [asyncio.create_task(complete(url, max_tokens=60)) for _ in range(2)]
        await asyncio.sleep(0.3)
        ranks[1].engine.die()
        ranks[1].desk.close()
        await ranks[1].instance.unregister()
        assert [status for status, _ in await asyncio.gather(*pending)] == [200, 200]


@asyncio_test
async def test_fifty_lives_of_one_instance_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with etcd_process(tmp_path / "etcd") as etcd:
        config = dynamo_deployment(tmp_path, etcd, slots=1)
        for name, value in dynamo_environment(config).items():
            monkeypatch.setenv(name, value)
        store, rank = EtcdStore(config.etcd.urls), DynamoRank(config, "rank0")
        descriptors, resident_bytes = [], []
        try:
            for epoch in range(1, 51):
                await rank.join(epoch)
                await rank.leave()
                assert await store.get_prefix("v1/") == ()
                descriptors.append(len(os.listdir("/proc/self/fd")))
                pages = int(Path("/proc/self/statm").read_text().split()[1])
                resident_bytes.append(pages * os.sysconf("SC_PAGE_SIZE"))
        finally:
            await rank.close()
            await store.close()
    assert max(descriptors[-10:]) <= max(descriptors[:10])
    assert resident_bytes[-1] - resident_bytes[9] < 8 << 20


@pytest.mark.slow
@asyncio_test
async def test_an_instance_whose_lease_ran_out_can_be_registered_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with etcd_process(tmp_path / "etcd") as etcd:
        config = dynamo_deployment(tmp_path, etcd, slots=1)
        for name, value in dynamo_environment(config).items():
            monkeypatch.setenv(name, value)
        store, rank = EtcdStore(config.etcd.urls), DynamoRank(config, "rank0")
        try:
            await rank.join(1)
            before = rank.instance.instance_id
            await store.revoke_lease(LeaseId(before))
            assert await store.get_prefix("v1/instances/") == ()
            async with asyncio.timeout(20.0):
                while rank.instance.visible():
                    await asyncio.sleep(0.05)
            await rank.join(2)
            assert rank.instance.visible()
            assert rank.instance.instance_id != before
            assert len(await store.get_prefix("v1/instances/")) == 1
        finally:
            await rank.close()
            await store.close()
