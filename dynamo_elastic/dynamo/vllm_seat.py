"""The place of a vLLM replica in Dynamo: taken and left at the word of its worker shell.

Dynamo's worker registers its model as soon as its engine is up. We stand in for the function that
it does this with: the first call waits at a gate until the shell says register, and is remembered,
so that the replica can leave and come back.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from enum import StrEnum
from typing import Any

from dynamo_elastic.dynamo.base import RUNTIME_DATA_KEY
from dynamo_elastic.errors import IllegalTransition, RegistrationFailed

_TIMEOUT_S = 20.0
_POLL_S = 0.005
_log = logging.getLogger(__name__)


class SeatState(StrEnum):
    """Where the replica is, as Dynamo sees it."""

    BEGINNING = "beginning"
    """Dynamo's worker is being made."""
    WAITING = "waiting"
    """It waits at the gate: nobody sees it."""
    TAKEN = "taken"
    """Instance and card are there."""
    LEFT = "left"
    """They are not any more; streams under way go on."""


_S = SeatState
SEAT_MOVES: Mapping[SeatState, frozenset[SeatState]] = {
    _S.BEGINNING: frozenset({_S.WAITING}),
    _S.WAITING: frozenset({_S.TAKEN}),
    _S.TAKEN: frozenset({_S.LEFT}),
    _S.LEFT: frozenset({_S.TAKEN}),
}


class ReplicaSeat:
    """One replica's registration. take() and leave() are called one at a time."""

    def __init__(
        self,
        register_model: Callable[..., Awaitable[None]],
        unregister_model: Callable[[Any], Awaitable[None]],
    ) -> None:
        """Dynamo's own functions."""
        self._register_model = register_model
        self._unregister_model = unregister_model
        self._state = SeatState.BEGINNING
        self._arrived = asyncio.Event()
        self._gate = asyncio.Event()
        self._call: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self._endpoint: Any = None
        self._client: Any = None
        self._tag = ""

    @property
    def state(self) -> SeatState:
        return self._state

    async def register_model(self, *arguments: Any, **named: Any) -> None:
        """In place of Dynamo's function, in its worker. Returns once the shell has said take."""
        self._call, self._endpoint = (arguments, named), arguments[2]
        self._move(SeatState.WAITING)
        self._arrived.set()
        await self._gate.wait()
        await self._put_card()

    async def take(self, runtime_data: Mapping[str, str]) -> int:
        """Dynamo's clients see instance and card; returns the instance's id. Taken already: all
        stays as it is. Raises RegistrationFailed, and then they see neither."""
        if self._state is not SeatState.TAKEN:
            self._tag = json.dumps(dict(sorted(runtime_data.items())))
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    await self._arrived.wait()
                    await self._take()
            except Exception as exc:  # the bindings raise bare Exception
                with suppress(RegistrationFailed):
                    await self.leave()
                raise RegistrationFailed(f"register: {str(exc) or type(exc).__name__}") from exc
        return int(self._endpoint.connection_id())

    async def _take(self) -> None:
        returning = self._state is SeatState.LEFT
        self._move(SeatState.TAKEN)
        if returning:
            await self._put_card()
            await self._endpoint.register_endpoint_instance()
        else:
            self._gate.set()  # Dynamo's worker puts the card, and then serves its endpoint
        await self._seen(present=True)

    async def leave(self) -> None:
        """Dynamo's clients do not see it any more. Idempotent. Raises RegistrationFailed."""
        if self._state is not SeatState.TAKEN:
            return
        self._move(SeatState.LEFT)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._endpoint.unregister_endpoint_instance()
                await self._unregister_model(self._endpoint)
                await self._seen(present=False)
        except Exception as exc:  # the bindings raise bare Exception
            raise RegistrationFailed(f"unregister: {str(exc) or type(exc).__name__}") from exc

    async def _put_card(self) -> None:
        arguments, named = self._call
        named["runtime_config"].set_engine_specific(RUNTIME_DATA_KEY, json.dumps(self._tag))
        await self._register_model(*arguments, **named)

    async def _seen(self, *, present: bool) -> None:
        if self._client is None:
            self._client = await self._endpoint.client()
        me = int(self._endpoint.connection_id())
        while (me in self._client.instance_ids()) is not present:
            await asyncio.sleep(_POLL_S)
        while present and me not in await self._client.wait_for_instances_by_runtime_data(
            RUNTIME_DATA_KEY, self._tag, 1, _TIMEOUT_S
        ):
            await asyncio.sleep(_POLL_S)

    def _move(self, after: SeatState) -> None:
        if after not in SEAT_MOVES[self._state]:
            raise IllegalTransition("seat of a replica", self._state, after)
        self._state = after
