"""The external scaler of examples/keda, asked over gRPC as KEDA asks, on a deployment of fakes."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import pytest

from dynamo_elastic.config_sections import ApiConfig
from dynamo_elastic.coordinator.api import ApiServer
from dynamo_elastic.coordinator.main_loop import Coordinator, Deployment
from dynamo_elastic.coordinator.targets import request_scale
from dynamo_elastic.phases import Step
from dynamo_elastic.report.history import History
from dynamo_elastic.testing.coordination import CONFIG, SHAPE, World, world
from dynamo_elastic.testing.deployments import asyncio_test
from dynamo_elastic.testing.etcd_process import free_port
from dynamo_elastic.testing.participants import Misbehaviour, Script
from dynamo_elastic.testing.store import FakeStore

TIMEOUT_S = 30.0
EXAMPLE = Path(__file__).parents[3] / "examples" / "keda" / "external_scaler.py"


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("external_scaler", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Keda:
    """Calls the scaler; messages are its own, made from KEDA's field numbers."""

    def __init__(self, channel: grpc.aio.Channel, example: ModuleType) -> None:
        self._channel = channel
        self._types = example.TYPES

    async def ask(self, method: str, answer: str, **fields: Any) -> Any:
        request = "GetMetricsRequest" if fields else "ScaledObjectRef"
        call = self._channel.unary_unary(
            f"/externalscaler.ExternalScaler/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=self._types[answer].FromString,
        )
        return await call(self._types[request](**fields), timeout=TIMEOUT_S)

    async def replicas(self) -> int:
        """What KEDA's autoscaler would make of the answers."""
        (spec,) = (await self.ask("GetMetricSpec", "GetMetricSpecResponse")).metricSpecs
        answer = await self.ask("GetMetrics", "GetMetricsResponse", metricName=spec.metricName)
        (value,) = answer.metricValues
        assert value.metricValue == value.metricValueFloat
        replicas: int = round(value.metricValueFloat / spec.targetSizeFloat)
        return replicas


@asynccontextmanager
async def scaler() -> AsyncIterator[tuple[World, Keda, ApiServer]]:
    example, listen, stop = load_example(), f"127.0.0.1:{free_port()}", asyncio.Event()
    config = ApiConfig(port=free_port())
    async with world(FakeStore(), 4) as here:
        kept = History(Path("nothing is kept"), keep=1)
        server = ApiServer(here.store, here.keys, config, CONFIG, "c", token="keda-1", history=kept)
        await server.start()
        leader = Coordinator(here.store, Deployment(here.keys, CONFIG, SHAPE), "leader")
        url = f"http://127.0.0.1:{config.port}"
        tasks = {
            asyncio.create_task(leader.run()),
            asyncio.create_task(example.serve(url, listen, "keda-1", stop)),
        }
        try:
            await here.until(CONFIG.initial_ranks, timeout_s=TIMEOUT_S)
            async with grpc.aio.insecure_channel(listen) as channel:
                yield here, Keda(channel, example), server
        finally:
            stop.set()
            await server.close()
            await asyncio.wait(tasks, timeout=0.5)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


@asyncio_test
async def test_pods_follow_the_target_up_at_once_and_down_after_the_release() -> None:
    async with scaler() as (here, keda, _):
        assert await keda.replicas() == 2
        assert (await keda.ask("IsActive", "IsActiveResponse")).result
        await request_scale(here.store, here.keys, 4, "keda")
        await here.until(4, timeout_s=TIMEOUT_S)
        assert await keda.replicas() == 4
        here[3].script = Script({Step.PARK: Misbehaviour.LATE})
        await request_scale(here.store, here.keys, 2, "keda")
        while (status := await here.status()).width != 2 or status.operation is not None:
            count = await keda.replicas()
            assert count == 4 or (await here.status()).operation is None
        assert await keda.replicas() == 2


@asyncio_test
async def test_keda_is_told_what_is_wrong() -> None:
    async with scaler() as (_, keda, server):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await keda.ask("GetMetrics", "GetMetricsResponse", metricName="cpu")
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "slots_wanted" in str(caught.value.details())
        await server.close()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await keda.ask("IsActive", "IsActiveResponse")
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
