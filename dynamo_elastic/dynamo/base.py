"""The seam to Dynamo's runtime: one instance a worker shell. Imports no Dynamo.

A request's handler is an async generator over Dynamo's own request mapping. What it raises decides
what the client sees: RequestMoved makes the frontend go on with the tokens so far on another
instance, RequestRefused reaches the client as a bad request, anything else ends its stream with an
error.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class Context(Protocol):
    """Dynamo's context of one request."""

    def id(self) -> str:
        """The frontend's id of the request: the same on every instance it is moved to."""
        ...

    def async_killed_or_stopped(self) -> asyncio.Future[bool]:
        """Done once the client has gone."""
        ...


Handler = Callable[[Mapping[str, Any], Context], AsyncGenerator[dict[str, Any], None]]
ControlRoute = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
"""Answers a JSON body, {} if there was none. What it raises is answered as HTTP 500."""

SYSTEM_PORT = "DYN_SYSTEM_PORT"
"""Environment: where Dynamo serves a process's health, metrics and control routes."""


RUNTIME_DATA_KEY = "dynamo_elastic"
"""In a card: under it is what the instance was registered with, as JSON in JSON."""


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
    """How busy a rank is, as the planner sees it."""

    running: int
    waiting: int
    kv_tokens: int


class Registrar(Protocol):
    """This process's instance in Dynamo. One task at a time, report() excepted."""

    async def register(self, runtime_data: Mapping[str, str]) -> int:
        """Visible to Dynamo's clients with this data; returns the instance id.

        Registered already: only the data changes, and at no moment is nobody registered. Raises
        RegistrationFailed, and then it is not registered.
        """
        ...

    async def unregister(self) -> None:
        """Not visible any more; streams under way go on. Idempotent. Raises RegistrationFailed
        if Dynamo does not answer: then the instance goes when its lease does."""
        ...

    def visible(self) -> bool:
        """False while nothing is registered, or once Dynamo has dropped it, its lease having run
        out."""
        ...

    def owns(self, instance_id: int) -> bool:
        """True if this process, or its engine, answers for that instance."""
        ...

    def report(self, load: Load) -> None:
        """Tell the planner, if registered."""
        ...
