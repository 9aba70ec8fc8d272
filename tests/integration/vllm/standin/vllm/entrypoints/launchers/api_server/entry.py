"""A rank that has no engine: it generates the same tokens for everybody."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from vllm.entrypoints.cli.main import serve


class Engine:
    """An AsyncLLM without processes of its own."""

    model_config = None

    def __init__(self) -> None:
        self.engine_core = self

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    async def call_utility_async(self, method: str, *_: Any) -> Any:
        return {"called": method}

    async def collective_rpc(self, method: str, **_: Any) -> list[Any]:
        return [{"called": method}]

    async def generate(self, *_: Any) -> AsyncIterator[Any]:
        logprobs = [{token: SimpleNamespace(logprob=-1.5)} for token in range(8)]
        yield SimpleNamespace(
            outputs=[SimpleNamespace(token_ids=list(range(8)), logprobs=logprobs)]
        )


@asynccontextmanager
async def build_async_engine_client(_: Any) -> AsyncIterator[Engine]:
    yield Engine()


def build_app(arguments: Any, *_: Any) -> Any:
    return SimpleNamespace(state=arguments)


async def init_app_state(*_: Any) -> None:
    """It has none."""


def setup_server(arguments: Any, *, reuse_port: bool) -> tuple[str, socket.socket]:
    listener = socket.create_server((arguments.host, arguments.port), reuse_port=reuse_port)
    return f"http://{arguments.host}:{arguments.port}", listener


async def serve_http(application: Any, listener: Any, **_: Any) -> asyncio.Task[None]:
    return asyncio.create_task(serve(application.state, retired=True, listener=listener))
