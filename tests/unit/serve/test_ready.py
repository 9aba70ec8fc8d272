"""When a frontend is up, told by one that knows its model only after a while."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from dynamo_elastic.errors import ElasticError
from dynamo_elastic.serve.ready import model_listed


@asynccontextmanager
async def frontend(*known: list[str]) -> AsyncIterator[str]:
    """Its URL; `known` are the models of its first answers, the last of all that follow."""
    answers = list(known)

    async def models(request: web.Request) -> web.Response:
        names = answers.pop(0) if len(answers) > 1 else answers[0]
        return web.json_response({"data": [{"id": name} for name in names]})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        host, port = runner.addresses[0]
        yield f"http://{host}:{port}"
        assert len(answers) == 1
    finally:
        await runner.cleanup()


def test_it_is_up_once_it_lists_the_model() -> None:
    async def scenario() -> None:
        async with frontend([], ["other"], ["other", "ours"]) as url:
            await model_listed(url, "ours", timeout_s=5.0)

    asyncio.run(scenario())


def test_a_model_that_does_not_come_is_an_error() -> None:
    async def scenario() -> None:
        async with frontend(["other"]) as url:
            with pytest.raises(ElasticError, match="does not list ours"):
                await model_listed(url, "ours", timeout_s=0.1)
        with pytest.raises(ElasticError, match="does not list ours"):
            await model_listed(url, "ours", timeout_s=0.5)

    asyncio.run(scenario())
