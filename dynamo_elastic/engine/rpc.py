"""The Engine protocol over a unix socket: both ends, from one description of every call."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, get_type_hints

import msgspec

from dynamo_elastic.engine.base import Engine
from dynamo_elastic.errors import EngineError
from dynamo_elastic.failpoints import failpoint
from dynamo_elastic.ipc import Handler

CALLS = (
    "status",
    "open_epoch",
    "connect_epoch",
    "load_weights",
    "push_dense",
    "push_experts",
    "check",
    "install",
    "decide",
    "wait_switched",
    "canary",
    "freeze",
    "drain",
    "readmit",
    "disconnect",
    "abort_epoch",
    "detach",
    "submit",
    "cancel",
)
"""Every call of Engine but `outputs`, which is a stream, and `close`, which is the client's own."""

OUTPUTS = "outputs"


def handlers(engine: Engine) -> dict[str, Handler]:
    """What an RpcServer needs to serve `engine`, outputs excepted."""
    return {name: _handler(name, getattr(engine, name)) for name in CALLS}


def _handler(name: str, method: Callable[..., Awaitable[Any]]) -> Handler:
    # Names and types are those of the protocol, whatever the engine's own annotations are.
    call = getattr(Engine, name)
    hints = get_type_hints(call)
    names = [n for n in inspect.signature(call).parameters if n != "self"]

    async def handle(params: dict[str, Any]) -> Any:
        unknown = set(params) ^ set(names)
        if unknown:
            raise EngineError(f"{name}: parameters {sorted(unknown)} are missing or unknown")
        try:
            values = {n: msgspec.convert(params[n], hints[n], str_keys=True) for n in names}
        except msgspec.ValidationError as exc:
            raise EngineError(f"{name}: {exc}") from exc
        failpoint(f"engine.{name}")
        return msgspec.to_builtins(await method(**values), str_keys=True)

    return handle


async def lines(steps: AsyncIterator[list[Any]]) -> AsyncIterator[Any]:
    """The stream of outputs as it travels: one line a step."""
    async for outputs in steps:
        yield msgspec.to_builtins(outputs)
