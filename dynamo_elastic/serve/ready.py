"""When a part that speaks HTTP is up."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import aiohttp

from dynamo_elastic.errors import ElasticError
from dynamo_elastic.serve.processes import Ready

_POLL_S = 0.02


def http_ok(url: str) -> Ready:
    """Something that returns once `url` answers 200."""

    async def answers() -> None:
        async with aiohttp.ClientSession() as session:
            while True:
                with suppress(aiohttp.ClientError):
                    async with session.get(url) as response:
                        if response.status == 200:
                            return
                await asyncio.sleep(_POLL_S)

    return answers


async def model_listed(url: str, name: str, *, timeout_s: float) -> None:
    """Return once the frontend at `url` knows the model: it hears of the first rank a moment after
    its registration, and answers 404 until then. Raises ElasticError."""
    try:
        async with asyncio.timeout(timeout_s), aiohttp.ClientSession() as session:
            while True:
                async with session.get(f"{url}/v1/models") as response:
                    models = await response.json()
                if any(model["id"] == name for model in models["data"]):
                    return
                await asyncio.sleep(_POLL_S)
    except (aiohttp.ClientError, TimeoutError) as exc:
        why = str(exc) or type(exc).__name__
        raise ElasticError(f"the frontend does not list {name}: {why}") from exc
