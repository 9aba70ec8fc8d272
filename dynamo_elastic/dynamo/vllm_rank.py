"""One rank of an elastic group of vLLM under Dynamo: an instance of its own, which Dynamo sees
exactly while the rank serves. Imports neither.

Every rank of the group is told of a scale operation, each in its own process. Rank 0 keeps the
group's coordinator, store and handshake: it never leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from dynamo_elastic.engine.vllm.requests import Requests
from dynamo_elastic.errors import ConfigError, EngineError
from dynamo_elastic.ipc import Handler

SCALE, ATTACH, FAIL = "scale", "attach", "fail"
"""Calls on the rank's socket, beside register and unregister."""

_MOVE_TIMEOUT_S = 5.0


class Engine(Protocol):
    """vLLM's AsyncLLM, as far as a rank needs it."""

    log_stats: bool
    engine_core: Any

    async def scale_elastic_ep(
        self, new_data_parallel_size: int, drain_timeout: int = ...
    ) -> None: ...


class Seat(Protocol):
    """The rank's place in Dynamo: see vllm_seat."""

    async def take(self, runtime_data: Mapping[str, str]) -> int: ...

    async def leave(self) -> None: ...


class ElasticRank:
    """What the shell of one rank asks of its engine. Calls come one at a time, but fail()."""

    def __init__(self, rank: int, engine: Engine, seat: Seat, requests: Requests) -> None:
        self._rank = rank
        self._engine = engine
        self._seat = seat
        self._requests = requests
        self._data: Mapping[str, str] = {}

    async def register(self, runtime_data: Mapping[str, str]) -> int:
        """Dynamo's clients see this rank; returns its instance's id."""
        self._data = runtime_data
        return await self._seat.take(runtime_data)

    async def scale(self, width: int, *, drain_timeout_s: float) -> None:
        """This rank's part of an operation to `width` ranks; returns when it is in force here. A
        rank that leaves is taken out of Dynamo first, and its requests end or go on elsewhere.

        Raises ConfigError for a width that rank 0 would not survive, and EngineError if the
        operation was undone: this rank serves, and is seen, as before.
        """
        if width < 1:
            raise ConfigError([f"width {width}: rank 0 keeps the group, and never leaves"])
        leaves = self._rank >= width
        if leaves:
            await self._seat.leave()
            await self._drain(drain_timeout_s)
        try:
            with keeping_statistics(self._engine):
                await self._engine.scale_elastic_ep(width)
        except Exception as exc:
            # vLLM's calls raise bare Exception for what happened in another process.
            if leaves:
                self._requests.reopen()
                await self._seat.take(self._data)
            raise EngineError(f"rank {self._rank} did not scale to {width}: {exc}") from exc

    async def _drain(self, timeout_s: float) -> None:
        self._requests.close()
        if not await self._requests.idle(timeout_s):
            self._requests.move()
            await self._requests.idle(_MOVE_TIMEOUT_S)

    async def attach(self, *, timeout_s: float) -> dict[str, float]:
        """A rank that has left joins the group that scales up to it, and is seen in Dynamo once it
        serves. Returns the seconds of each part. Raises EngineError: nobody sees it then."""
        coordinator = self._engine.engine_core.external_eep_coordinator
        try:
            async with asyncio.timeout(timeout_s):
                seconds: dict[str, float] = await coordinator.attach()
                while await self._paused():
                    await asyncio.sleep(coordinator.poll_s)
        except TimeoutError as exc:
            raise EngineError(f"rank {self._rank} did not serve within {timeout_s:g} s") from exc
        except RuntimeError as exc:
            raise EngineError(f"rank {self._rank} did not join: {exc}") from exc
        self._requests.reopen()
        await self._seat.take(self._data)
        return seconds

    async def _paused(self) -> bool:
        paused: bool = await self._engine.engine_core.call_utility_async("is_scheduler_paused")
        return paused

    async def fail(self, reason: str) -> None:
        """The operation that is being prepared is over, on all ranks."""
        self._engine.engine_core.external_eep_coordinator.tell_failure(reason)

    def calls(self) -> dict[str, Handler]:
        """What the rank's socket answers."""

        async def scale(params: dict[str, Any]) -> None:
            await self.scale(params["width"], drain_timeout_s=params["drain_timeout_s"])

        async def attach(params: dict[str, Any]) -> dict[str, float]:
            return await self.attach(timeout_s=params["timeout_s"])

        async def fail(params: dict[str, Any]) -> None:
            await self.fail(params["reason"])

        return {SCALE: scale, ATTACH: attach, FAIL: fail}


@contextmanager
def keeping_statistics(engine: Engine) -> Iterator[None]:
    """When it scales up, vLLM makes its statistics anew, without the loggers that Dynamo gave it:
    its KV metrics and gauges would stop. It does not while it believes that there are none; what
    counts steps already goes on."""
    was, engine.log_stats = engine.log_stats, False
    try:
        yield
    finally:
        engine.log_stats = was
