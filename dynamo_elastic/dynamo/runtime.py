"""The only module that imports Dynamo: one runtime a process, one instance a rank.

A request's handler is an async generator over Dynamo's own request mapping. What it raises decides
what the client sees: RequestMoved makes the frontend go on with the tokens so far on another
instance, RequestRefused reaches the client as a 400, anything else ends its stream with an error.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from dynamo.llm import (
    FpmDirectPublisher,
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    WorkerType,
    register_model,
    unregister_model,
)
from dynamo.llm.exceptions import InvalidArgument, StreamIncomplete
from dynamo.runtime import DistributedRuntime

from dynamo_elastic.errors import ElasticError, RequestMoved, RequestRefused

log = logging.getLogger(__name__)

_POLL_S = 0.005
_VISIBLE_TIMEOUT_S = 10.0
_RUNTIME_DATA_KEY = "dynamo_elastic"


class RegistrationFailed(ElasticError):
    """Dynamo did not do what was asked; the instance counts as unregistered."""


class Context(Protocol):
    """Dynamo's context of one request."""

    def id(self) -> str:
        """The frontend's id of the request: the same on every instance it is moved to."""
        ...

    def is_stopped(self) -> bool: ...

    def async_killed_or_stopped(self) -> asyncio.Future[bool]: ...


Handler = Callable[[Mapping[str, Any], Context], AsyncGenerator[dict[str, Any], None]]


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """What is the same in every registration of one shell."""

    namespace: str
    model_path: str
    model_name: str
    context_length: int
    kv_blocks: int
    block_tokens: int
    batch_tokens: int
    component: str = "backend"
    endpoint: str = "generate"

    @property
    def path(self) -> str:
        return f"{self.namespace}.{self.component}.{self.endpoint}"


@dataclass(frozen=True, slots=True)
class Load:
    """One forward pass, as the planner sees it."""

    decoding: int
    decode_kv_tokens: int
    waiting: int
    waiting_tokens: int
    step_s: float


class DynamoInstance:
    """This process's place in Dynamo. Registered and unregistered many times; shut down once.

    Owns the process's one DistributedRuntime, its lease and its keys. DYN_* and ETCD_* must be in
    the environment before it is made. Not to be used from two tasks at once, load() excepted.
    """

    def __init__(self, spec: InstanceSpec, handler: Handler) -> None:
        self._spec = spec
        self._handler = handler
        self._runtime = DistributedRuntime(asyncio.get_running_loop(), "etcd", "tcp")
        self._endpoint = self._runtime.endpoint(spec.path)
        self._client: Any = None
        self._serving: asyncio.Future[Any] | None = None
        self._fpm: FpmDirectPublisher | None = None

    @property
    def instance_id(self) -> int:
        """Dynamo's name for this process; it lasts as long as the process."""
        return int(self._endpoint.connection_id())

    @property
    def registered(self) -> bool:
        return self._fpm is not None

    async def register(self, runtime_data: Mapping[str, str]) -> int:
        """Publish the model card with `runtime_data` and the instance; returns the instance id.

        Returns when a Dynamo client of this process sees both. Registered already: the card is
        replaced. Raises RegistrationFailed, and then the instance is unregistered.
        """
        if self.registered:
            await self.unregister()
        tag = json.dumps(dict(sorted(runtime_data.items())))
        try:
            await self._publish_card(tag)
            await self._publish_instance()
            await self._wait_visible(tag)
        except Exception as exc:  # Dynamo's bindings raise bare Exception for anything
            await self.unregister()
            raise RegistrationFailed(f"registration with Dynamo: {exc}") from exc
        self._fpm = FpmDirectPublisher(self._endpoint, str(self.instance_id), 1)
        return self.instance_id

    async def unregister(self) -> None:
        """Take instance and card away, and wait until that shows. Streams under way go on.

        Idempotent.
        """
        if self._fpm is not None:
            self._fpm.shutdown()
            self._fpm = None
        if self._serving is None:
            return
        await self._endpoint.unregister_endpoint_instance()
        await unregister_model(self._endpoint)
        await self._wait_instance(present=False)

    def load(self, load: Load) -> None:
        """Tell the planner about a forward pass. Without an instance it is not told anything."""
        if self._fpm is None:
            return
        self._fpm.publish(
            dp_rank=0,
            scheduled_num_prefill_requests=0,
            scheduled_sum_prefill_tokens=0,
            scheduled_sum_prefill_kv_tokens=0,
            scheduled_num_decode_requests=load.decoding,
            scheduled_sum_decode_kv_tokens=load.decode_kv_tokens,
            queued_num_prefill_requests=load.waiting,
            queued_sum_prefill_tokens=load.waiting_tokens,
            queued_num_decode_requests=0,
            queued_sum_decode_kv_tokens=0,
            wall_time_secs=load.step_s,
        )

    async def shutdown(self) -> None:
        """Unregister, and end the runtime and its lease. Idempotent."""
        await self.unregister()
        self._runtime.shutdown()
        if self._serving is not None:
            await asyncio.wait([self._serving], timeout=_VISIBLE_TIMEOUT_S)
            self._serving = None

    async def _publish_card(self, tag: str) -> None:
        card = ModelRuntimeConfig()
        card.context_length = self._spec.context_length
        card.total_kv_blocks = self._spec.kv_blocks
        card.max_num_seqs = self._spec.batch_tokens
        card.max_num_batched_tokens = self._spec.batch_tokens
        card.set_engine_specific(_RUNTIME_DATA_KEY, json.dumps(tag))
        await register_model(
            ModelInput.Tokens,
            ModelType.Chat | ModelType.Completions,
            self._endpoint,
            self._spec.model_path,
            self._spec.model_name,
            worker_type=WorkerType.Aggregated,
            kv_cache_block_size=self._spec.block_tokens,
            runtime_config=card,
            ignore_weights=True,
        )

    async def _publish_instance(self) -> None:
        if self._serving is None:
            self._serving = asyncio.ensure_future(self._endpoint.serve_endpoint(self._generate))
        else:
            await self._endpoint.register_endpoint_instance()

    async def _wait_visible(self, tag: str) -> None:
        await self._wait_instance(present=True)
        async with asyncio.timeout(_VISIBLE_TIMEOUT_S):
            ids = await self._client.wait_for_instances_by_runtime_data(
                _RUNTIME_DATA_KEY, tag, 1, _VISIBLE_TIMEOUT_S
            )
        if self.instance_id not in ids:
            raise RegistrationFailed("another instance carries this runtime data")

    async def _wait_instance(self, *, present: bool) -> None:
        if self._client is None:
            self._client = await self._endpoint.client()
        async with asyncio.timeout(_VISIBLE_TIMEOUT_S):
            while (self.instance_id in self._client.instance_ids()) is not present:
                if self._serving is not None and self._serving.done():
                    raise RegistrationFailed(f"endpoint ended: {self._serving.exception()}")
                await asyncio.sleep(_POLL_S)

    async def _generate(
        self, request: Mapping[str, Any], context: Context
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Maps our errors to the ones that Dynamo's frontend acts on."""
        try:
            async with aclosing(self._handler(request, context)) as items:
                async for item in items:
                    yield item
        except RequestMoved as exc:
            raise StreamIncomplete(str(exc)) from None
        except RequestRefused as exc:
            raise InvalidArgument(str(exc)) from None
