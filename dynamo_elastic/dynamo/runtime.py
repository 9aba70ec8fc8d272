"""The only module that imports Dynamo: one runtime a process, one instance a rank."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from typing import Any

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

from dynamo_elastic.dynamo.base import Context, Handler, InstanceSpec, Load
from dynamo_elastic.errors import RegistrationFailed, RequestMoved, RequestRefused

log = logging.getLogger(__name__)

_POLL_S = 0.005
_TIMEOUT_S = 10.0
_RUNTIME_DATA_KEY = "dynamo_elastic"


class DynamoInstance:
    """dynamo.base.Registrar over Dynamo's runtime. Registered many times, shut down once.

    Owns a DistributedRuntime, its lease and its keys. DYN_* and ETCD_* must be in the environment
    before it is made. A runtime ends with its lease: registering then makes a new one.
    """

    def __init__(self, spec: InstanceSpec, handler: Handler) -> None:
        self._spec = spec
        self._handler = handler
        self._fpm: FpmDirectPublisher | None = None
        self._open()

    def _open(self) -> None:
        self._runtime = DistributedRuntime(asyncio.get_running_loop(), "etcd", "tcp")
        self._endpoint = self._runtime.endpoint(self._spec.path)
        self._client: Any = None
        self._serving: asyncio.Future[Any] | None = None
        self._published = False

    @property
    def instance_id(self) -> int:
        """Dynamo's name for this runtime: the id of its lease."""
        return int(self._endpoint.connection_id())

    async def register(self, runtime_data: Mapping[str, str]) -> int:
        """See Registrar. Returns once a Dynamo client of this process sees instance and card."""
        tag = json.dumps(dict(sorted(runtime_data.items())))
        try:
            await self.unregister()
            await self._register(tag)
        except RegistrationFailed as exc:
            log.warning("a new Dynamo runtime is made: %s", exc)
            self._renew()
            await self._register(tag)
        self._fpm = FpmDirectPublisher(self._endpoint, str(self.instance_id), 1)
        return self.instance_id

    async def _register(self, tag: str) -> None:
        self._published = True
        try:
            async with _answering("register"):
                await self._publish_card(tag)
                await self._publish_instance()
                await self._see_card(tag)
        except RegistrationFailed:
            with suppress(RegistrationFailed):
                await self.unregister()
            raise

    def _renew(self) -> None:
        self._runtime.shutdown()
        try:
            self._open()
        except Exception as exc:  # the bindings raise bare Exception
            raise RegistrationFailed(f"no Dynamo runtime: {exc}") from exc

    async def unregister(self) -> None:
        """See Registrar."""
        if self._fpm is not None:
            self._fpm.shutdown()
            self._fpm = None
        if not self._published:
            return
        self._published = False
        async with _answering("unregister"):
            if self._serving is not None:
                await self._endpoint.unregister_endpoint_instance()
            await unregister_model(self._endpoint)
            await self._see_instance(present=False)

    def report(self, load: Load) -> None:
        """See Registrar. The publisher repeats zeros by itself while it is told nothing."""
        if self._fpm is None:
            return
        self._fpm.publish(
            dp_rank=0,
            scheduled_num_prefill_requests=0,
            scheduled_sum_prefill_tokens=0,
            scheduled_sum_prefill_kv_tokens=0,
            scheduled_num_decode_requests=load.running,
            scheduled_sum_decode_kv_tokens=load.kv_tokens,
            queued_num_prefill_requests=load.waiting,
            queued_sum_prefill_tokens=0,
            queued_num_decode_requests=0,
            queued_sum_decode_kv_tokens=0,
            wall_time_secs=0.0,
        )

    async def shutdown(self) -> None:
        """Unregister, and end the runtime and its lease. Not to be used again."""
        try:
            await self.unregister()
        finally:
            self._runtime.shutdown()
            if self._serving is not None:
                await asyncio.wait([self._serving], timeout=_TIMEOUT_S)
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

    async def _see_card(self, tag: str) -> None:
        await self._see_instance(present=True)
        ids = await self._client.wait_for_instances_by_runtime_data(
            _RUNTIME_DATA_KEY, tag, 1, _TIMEOUT_S
        )
        if self.instance_id not in ids:
            raise RegistrationFailed("another instance carries this runtime data")

    async def _see_instance(self, *, present: bool) -> None:
        if self._client is None:
            self._client = await self._endpoint.client()
        while (self.instance_id in self._client.instance_ids()) is not present:
            if self._serving is not None and self._serving.done():
                raise RegistrationFailed(f"endpoint ended: {self._serving.exception()}")
            await asyncio.sleep(_POLL_S)

    async def _generate(
        self, request: Mapping[str, Any], context: Context
    ) -> AsyncGenerator[dict[str, Any], None]:
        with _frontend_errors():
            async with aclosing(self._handler(request, context)) as items:
                async for item in items:
                    yield item


@asynccontextmanager
async def _answering(act: str) -> AsyncIterator[None]:
    """Give Dynamo a deadline, and turn what its bindings raise into RegistrationFailed."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            yield
    except RegistrationFailed:
        raise
    except Exception as exc:  # the bindings raise bare Exception
        raise RegistrationFailed(f"{act} with Dynamo: {exc or type(exc).__name__}") from exc


@contextmanager
def _frontend_errors() -> Iterator[None]:
    """Turn our errors into those that Dynamo's frontend acts on."""
    try:
        yield
    except RequestMoved as exc:
        raise StreamIncomplete(str(exc)) from None
    except RequestRefused as exc:
        raise InvalidArgument(str(exc)) from None
