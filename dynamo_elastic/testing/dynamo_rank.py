"""One rank in Dynamo without a worker process: a real instance before a fake engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.dynamo.base import Context, InstanceSpec
from dynamo_elastic.dynamo.runtime import DynamoInstance
from dynamo_elastic.engine.base import EngineState, Request
from dynamo_elastic.testing.engine import FakeEngine
from dynamo_elastic.types import Incarnation, WorkerId
from dynamo_elastic.worker.requests import RequestDesk

_STEP_S = 0.01


class RecordedEngine(FakeEngine):
    """A fake engine that keeps what it was asked."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.asked: list[Request] = []

    async def submit(self, request: Request) -> None:
        await super().submit(request)
        self.asked.append(request)


class DynamoRank:
    """One instance, its desk and a fake engine that steps."""

    def __init__(self, config: DeploymentConfig, name: str) -> None:
        self.name = name
        self.engine = RecordedEngine(
            WorkerId(name), Incarnation(name), max_context=10_000, state=EngineState.SERVING
        )
        self.desk = RequestDesk(max_context=10_000)
        spec = InstanceSpec(
            namespace=config.namespace,
            model_path=str(config.model.path),
            model_name=config.model.name,
            context_length=10_000,
            kv_blocks=64,
            block_tokens=16,
            batch_tokens=8,
        )
        self.instance = DynamoInstance(spec, self._handle)
        self._tasks = [asyncio.create_task(self.desk.pump(self.engine))]
        self._tasks.append(asyncio.create_task(self._step()))

    def _handle(
        self, request: Mapping[str, Any], context: Context
    ) -> AsyncGenerator[dict[str, Any], None]:
        return self.desk.handle(request, context)

    async def _step(self) -> None:
        while True:
            await asyncio.sleep(_STEP_S)
            self.engine.step()

    @property
    def served(self) -> int:
        return len(self.engine.asked)

    async def join(self, epoch: int) -> None:
        self.engine.draining = False
        self.desk.open(self.engine)
        await self.instance.register({"epoch": str(epoch), "incarnation": self.name})

    async def leave(self) -> None:
        self.desk.close()
        await self.instance.unregister()
        await self.engine.drain(short_tokens=0, timeout_s=1.0)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.instance.shutdown()
