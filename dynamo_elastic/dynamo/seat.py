"""The only module that imports Dynamo's runtime: one lease, at most one instance with its card."""

from __future__ import annotations

import asyncio
import json
import logging
import os
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

from dynamo_elastic.dynamo.base import (
    RUNTIME_DATA_KEY,
    SYSTEM_PORT,
    ControlRoute,
    Handler,
    InstanceSpec,
    Load,
)
from dynamo_elastic.errors import RegistrationFailed, RequestMoved, RequestRefused

log = logging.getLogger(__name__)

_POLL_S = 0.005
_TIMEOUT_S = 10.0
_SEEN_TIMEOUT_S = 2.0
"""A change of a card that is not seen by then is made once more: Dynamo has lost one."""


class Seat:
    """One runtime, and at most one instance of it with its card."""

    def __init__(
        self,
        spec: InstanceSpec,
        handler: Handler,
        routes: Mapping[str, ControlRoute],
        *,
        system_port: int,
    ) -> None:
        self._spec = spec
        self._handler = handler
        self._routes = routes
        self._system_port = system_port
        self._open()

    def _open(self) -> None:
        try:
            with _system_port(self._system_port):
                self._runtime = DistributedRuntime(asyncio.get_running_loop(), "etcd", "tcp")
        except Exception as exc:  # the bindings raise bare Exception
            raise RegistrationFailed(f"no Dynamo runtime: {exc}") from exc
        for name, route in self._routes.items():
            self._runtime.register_engine_route(f"control/{name}", route)
        self.endpoint = self._runtime.endpoint(self._spec.path)
        self.published = False
        self._client: Any = None
        self._serving: asyncio.Future[Any] | None = None
        self._fpm: FpmDirectPublisher | None = None

    @property
    def instance_id(self) -> int:
        return int(self.endpoint.connection_id())

    @property
    def ended(self) -> bool:
        """True once the runtime has shut down by itself, as it does without its lease."""
        return self._serving is not None and self._serving.done()

    async def publish(self, tag: str) -> None:
        """Visible with this tag, by a new runtime if this one does not do. Raises
        RegistrationFailed, and then it is not visible."""
        try:
            await self.withdraw()
            await self._publish(tag)
        except RegistrationFailed as exc:
            log.warning("a new Dynamo runtime is made: %s", exc)
            self._runtime.shutdown()
            self._open()
            await self._publish(tag)

    async def _publish(self, tag: str) -> None:
        self.published = True
        try:
            async with _answering("register"):
                await self._put_card(tag)
                if self._serving is None:
                    serving = self.endpoint.serve_endpoint(self._generate)
                    self._serving = asyncio.ensure_future(serving)
                else:
                    await self.endpoint.register_endpoint_instance()
                await self._see_instance(present=True)
                await self._see_card(tag)
        except RegistrationFailed:
            with suppress(RegistrationFailed):
                await self.withdraw()
            raise

    async def replace_card(self, tag: str) -> None:
        """The instance, which is visible, carries this tag. Raises RegistrationFailed."""
        async with _answering("change the card"):
            while True:
                await unregister_model(self.endpoint)
                await self._put_card(tag)
                with suppress(TimeoutError):
                    async with asyncio.timeout(_SEEN_TIMEOUT_S):
                        await self._see_instance(present=True)
                        return await self._see_card(tag)
                log.warning("a change of the card was lost; it is made again")

    async def withdraw(self) -> None:
        """Not visible; streams under way go on. Idempotent. Raises RegistrationFailed."""
        if self._fpm is not None:
            self._fpm.shutdown()
            self._fpm = None
        if not self.published:
            return
        self.published = False
        async with _answering("unregister"):
            if self._serving is not None:
                await self.endpoint.unregister_endpoint_instance()
            await unregister_model(self.endpoint)
            await self._see_instance(present=False)

    def start_reporting(self) -> None:
        """Be one of the planner's workers, idle until report() says otherwise."""
        self._fpm = FpmDirectPublisher(self.endpoint, str(self.instance_id), 1)

    def report(self, load: Load) -> None:
        """Tell the planner, if reporting. Zeros are repeated while nothing is told."""
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

    async def close(self) -> None:
        """End the runtime and its lease."""
        self._runtime.shutdown()
        if self._serving is not None:
            await asyncio.wait([self._serving], timeout=_TIMEOUT_S)

    async def _put_card(self, tag: str) -> None:
        card = ModelRuntimeConfig()
        card.context_length = self._spec.context_length
        card.total_kv_blocks = self._spec.kv_blocks
        card.max_num_seqs = self._spec.batch_tokens
        card.max_num_batched_tokens = self._spec.batch_tokens
        card.set_engine_specific(RUNTIME_DATA_KEY, json.dumps(tag))
        await register_model(
            ModelInput.Tokens,
            ModelType.Chat | ModelType.Completions,
            self.endpoint,
            self._spec.model_path,
            self._spec.model_name,
            worker_type=WorkerType.Aggregated,
            kv_cache_block_size=self._spec.block_tokens,
            runtime_config=card,
            ignore_weights=True,
        )

    async def _see_card(self, tag: str) -> None:
        client = await self._discovery()
        while self.instance_id not in await client.wait_for_instances_by_runtime_data(
            RUNTIME_DATA_KEY, tag, 1, _TIMEOUT_S
        ):
            await asyncio.sleep(_POLL_S)

    async def _see_instance(self, *, present: bool) -> None:
        client = await self._discovery()
        while (self.instance_id in client.instance_ids()) is not present:
            if self._serving is not None and self._serving.done():
                raise RegistrationFailed(f"endpoint ended: {self._serving.exception()}")
            await asyncio.sleep(_POLL_S)

    async def _discovery(self) -> Any:
        if self._client is None:
            self._client = await self.endpoint.client()
        return self._client

    async def _generate(
        self, request: Mapping[str, Any], context: Any
    ) -> AsyncGenerator[dict[str, Any], None]:
        with _frontend_errors():
            async with aclosing(self._handler(request, context)) as items:
                async for item in items:
                    yield item


@contextmanager
def _system_port(port: int) -> Iterator[None]:
    """A runtime made meanwhile serves its routes on this port, or on none: two of one process must
    not ask for the same one."""
    before = os.environ.pop(SYSTEM_PORT, None)
    if port:
        os.environ[SYSTEM_PORT] = str(port)
    try:
        yield
    finally:
        os.environ.pop(SYSTEM_PORT, None)
        if before is not None:
            os.environ[SYSTEM_PORT] = before


@asynccontextmanager
async def _answering(act: str) -> AsyncIterator[None]:
    """Give Dynamo a deadline, and turn what its bindings raise into RegistrationFailed."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            yield
    except RegistrationFailed:
        raise
    except Exception as exc:  # the bindings raise bare Exception
        raise RegistrationFailed(f"{act} with Dynamo: {str(exc) or type(exc).__name__}") from exc


@contextmanager
def _frontend_errors() -> Iterator[None]:
    """Turn our errors into those that Dynamo's frontend acts on."""
    try:
        yield
    except RequestMoved as exc:
        raise StreamIncomplete(str(exc)) from None
    except RequestRefused as exc:
        raise InvalidArgument(str(exc)) from None
