"""The registrar of a shell whose engine is Dynamo's worker itself: it asks the engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from dynamo_elastic.dynamo.base import Load
from dynamo_elastic.errors import EngineError, RegistrationFailed
from dynamo_elastic.ipc import RpcClient

REGISTER, UNREGISTER = "register", "unregister"
"""Calls on the engine's socket beside those of the Engine protocol."""

_TIMEOUT_S = 30.0
"""Above what the engine gives Dynamo."""


class Closable(Protocol):
    """Something that is shut down once."""

    async def shutdown(self) -> None: ...


class VllmRegistrar:
    """dynamo.base.Registrar of the engine that listens on a socket, whichever that is just now."""

    def __init__(self, socket_path: Path, own: Closable | None = None) -> None:
        """`own`: what of Dynamo the shell has besides; shut down with us."""
        self._path = socket_path
        self._own = own

    async def register(self, runtime_data: Mapping[str, str]) -> int:
        """See Registrar."""
        return int(await self._call(REGISTER, {"runtime_data": dict(runtime_data)}))

    async def unregister(self) -> None:
        """See Registrar. Without an engine there is nothing to take back."""
        if self._path.exists():
            await self._call(UNREGISTER, {})

    def visible(self) -> bool:
        """As far as we know: a worker of Dynamo that loses its lease ends, and so its engine."""
        return True

    def owns(self, instance_id: int) -> bool:
        """What is registered for our engine is registered by it, and goes when it does."""
        return True

    def report(self, load: Load) -> None:
        """vLLM's scheduler tells the planner itself, more than we could."""

    async def shutdown(self) -> None:
        """End what is the shell's own; the registration lives and dies with the engine."""
        if self._own is not None:
            await self._own.shutdown()

    async def _call(self, name: str, params: dict[str, Any]) -> Any:
        # Made anew each time: an open connection may lead to the engine before this one.
        client = RpcClient(self._path)
        try:
            return await client.call(name, params, timeout_s=_TIMEOUT_S)
        except EngineError as exc:
            raise RegistrationFailed(str(exc)) from exc
        finally:
            await client.close()
