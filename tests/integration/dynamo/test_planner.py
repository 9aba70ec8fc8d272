"""Dynamo's real planner, our plugin in it and our watcher: the width follows load and limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.coordinator.etcd import EtcdStore
from dynamo_elastic.coordinator.records import (
    CapacityRecord,
    Keys,
    OutcomeStatus,
    TargetOutcome,
    TargetRecord,
    decode,
    encode,
)
from dynamo_elastic.coordinator.store import Put
from dynamo_elastic.dynamo.base import Context, InstanceSpec, Load
from dynamo_elastic.dynamo.decisions import PlannerKeys
from dynamo_elastic.dynamo.launch import (
    PlannerControl,
    PlannerRefused,
    planner_argv,
    planner_environment,
)
from dynamo_elastic.dynamo.runtime import DynamoInstance
from dynamo_elastic.dynamo.watcher import PlannerWatcher, Widths
from dynamo_elastic.testing.deployments import asyncio_test
from dynamo_elastic.testing.dynamo_processes import dynamo_deployment, process
from dynamo_elastic.testing.etcd_process import etcd_process
from dynamo_elastic.topology import EngineShape

pytestmark = [pytest.mark.etcd, pytest.mark.dynamo]

SLOTS = 4
BLOCKS, BLOCK_TOKENS = 64, 16
FULL = Load(running=8, waiting=0, kv_tokens=BLOCKS * BLOCK_TOKENS - 1)
"""As busy as a rank can be short of a full KV cache."""


class Cluster:
    """Instances that come and go as the targets say, in place of coordinator and shells."""

    def __init__(self, config: DeploymentConfig, store: EtcdStore) -> None:
        self.load = FULL
        self.attainable = SLOTS
        self._config = config
        self._store = store
        self._keys = Keys(config.deployment)
        spec = InstanceSpec(
            namespace=config.namespace,
            model_path=str(config.model.path),
            model_name=config.model.name,
            context_length=128,
            kv_blocks=BLOCKS,
            block_tokens=BLOCK_TOKENS,
            batch_tokens=8,
        )
        self._all = [DynamoInstance(spec, _nothing) for _ in range(SLOTS)]
        self.width = 0
        self.widths: list[int] = []
        """Every width that was asked for."""

    async def resize(self, width: int) -> None:
        for rank in range(self.width, width):
            await self._all[rank].register({"rank": str(rank)})
        for rank in range(width, self.width):
            await self._all[rank].unregister()
        self.width = width
        await self.publish_capacity()

    async def publish_capacity(self) -> None:
        step = self._config.scale.multiple_of
        legal = tuple(range(step, SLOTS + 1, step))
        record = CapacityRecord(self.width, legal, self.attainable)
        await self._store.txn([], [Put(self._keys.capacity, encode(record))])

    async def obey(self) -> None:
        async with self._store.watch(self._keys.target) as watch:
            async for change in watch:
                if change.value is None:
                    continue
                target = decode(TargetRecord, change.value)
                self.widths.append(target.ranks)
                await self.resize(target.ranks)
                outcome = TargetOutcome(target.request_id, target.ranks, OutcomeStatus.REACHED)
                await self._store.txn([], [Put(self._keys.outcome, encode(outcome))])

    async def report(self) -> None:
        while True:
            for instance in self._all:
                instance.report(self.load)
            await asyncio.sleep(0.25)

    async def close(self) -> None:
        for instance in self._all:
            await instance.shutdown()


async def _nothing(
    request: Mapping[str, Any], context: Context
) -> AsyncGenerator[dict[str, Any], None]:
    yield {"token_ids": [5], "index": 0, "finish_reason": "length"}


async def unexpected(reason: str) -> None:
    raise AssertionError(f"a decision was not met: {reason}")


async def _ready(control: PlannerControl) -> None:
    async with asyncio.timeout(60.0):
        while True:
            with suppress(PlannerRefused):
                await control.limits()
                return
            await asyncio.sleep(0.2)


async def _settled(store: EtcdStore, keys: PlannerKeys, decision_id: int) -> None:
    async with asyncio.timeout(20.0):
        while True:
            stored = await store.get(keys.acknowledged)
            if stored is not None and int(stored.value) == decision_id:
                return
            await asyncio.sleep(0.05)


@pytest.mark.slow
@asyncio_test
async def test_the_width_follows_load_and_limits_from_legal_width_to_legal_width(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planner goes one rank at a time, and only every other width is legal."""
    with etcd_process(tmp_path / "etcd") as etcd:
        plain = dynamo_deployment(tmp_path, etcd, slots=SLOTS)
        scale = plain.scale.model_copy(update={"multiple_of": 2, "min_ranks": 2})
        rates = {"decode_scale_up_kv_rate": 60, "decode_scale_down_kv_rate": 25}
        planner_config = plain.planner.model_copy(update={"settings": rates})
        config = plain.model_copy(update={"scale": scale, "planner": planner_config})
        for name, value in planner_environment(config).items():
            monkeypatch.setenv(name, value)
        store = EtcdStore(config.etcd.urls)
        cluster = Cluster(config, store)
        cluster.attainable = 3
        await cluster.resize(2)
        planner = PlannerKeys(config.namespace)
        widths = Widths(EngineShape(8, 8), config.scale.limits, SLOTS)
        watcher = PlannerWatcher(
            store,
            Keys(config.deployment),
            planner,
            widths,
            unexpected,
            unexpected,
            look_every_s=10.0,
            rivals_after_s=10.0,
        )
        tasks = [asyncio.create_task(c) for c in (cluster.obey(), cluster.report(), watcher.run())]
        try:
            with process(config, planner_argv(config), tmp_path / "planner.log"):
                control = PlannerControl(config.planner.control_port)
                await _ready(control)
                # Full, but there is a GPU for one more only, and three ranks are not legal.
                await _logged(tmp_path / "planner.log", "3 -> 2: legal widths are 2, 4")
                assert cluster.widths == []
                cluster.attainable = SLOTS
                await cluster.publish_capacity()
                await _settled(store, planner, 0)
                assert cluster.widths == [4]
                # A quarter full: three would do, two would be half full and do as well.
                cluster.load = replace(FULL, kv_tokens=BLOCKS * BLOCK_TOKENS // 4)
                await _settled(store, planner, 1)
                await asyncio.sleep(3.0)
                assert cluster.widths == [4, 2], "and there it stays"
                # Limits move it as well.
                with pytest.raises(PlannerRefused, match="max_gpu_budget"):
                    await control.set_limits(min_endpoint=SLOTS + 1)
                await control.set_limits(min_endpoint=4)
                await _settled(store, planner, 2)
                await control.set_limits(min_endpoint=2, max_gpu_budget=2)
                await _settled(store, planner, 3)
                assert cluster.widths == [4, 2, 4, 2]
                assert len(await store.get_prefix(planner.instances)) == 1
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await cluster.close()
            await store.close()


async def _logged(log: Path, text: str) -> None:
    async with asyncio.timeout(30.0):
        while text not in log.read_text():
            await asyncio.sleep(0.2)
