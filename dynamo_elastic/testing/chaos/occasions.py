"""How each occasion is made in a world: what any day brings, and a resize alone does not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import aiohttp

from dynamo_elastic.dynamo.registrations import Registrations
from dynamo_elastic.errors import StoreError
from dynamo_elastic.testing.chaos.scenario import AtFailpoint, Occasion
from dynamo_elastic.testing.chaos.world import World
from dynamo_elastic.types import WorkerId

_MET_S = 45.0
"""In which somebody comes by the failpoint. A worker shell notices that its lease with Dynamo is
gone when it renews that, every 20 s."""
_POLL_S = 0.05
_CARD_S = 2.0
"""In which the last resize's card is in its place: a shell that is changing it would notice."""
_TOO_MANY = 1000
_TEXT, _TOKENS = "harbor meadow", 200


async def bring_about(world: World, occasion: Occasion, fault: AtFailpoint) -> None:
    """Make it happen until somebody has come by `fault`, or for as long as that may take."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_MET_S):
            await _HOW[occasion](world, fault)
            while world.armed(fault.file):
                await asyncio.sleep(_POLL_S)


async def _client_leaves(world: World, fault: AtFailpoint) -> None:
    """Again and again: whose engine has its stream is Dynamo's choice."""
    body = {
        "model": world.config.model.name,
        "prompt": _TEXT,
        "max_tokens": _TOKENS,
        "ignore_eos": True,
        "stream": True,
    }
    async with aiohttp.ClientSession() as session:
        while world.armed(fault.file):
            with suppress(aiohttp.ClientError):
                async with session.post(
                    f"{world.deployment.url}/v1/completions", json=body
                ) as reply:
                    await reply.content.readline()
            await asyncio.sleep(_POLL_S)


async def _instance_dropped(world: World, fault: AtFailpoint) -> None:
    registrations = Registrations(world.deployment.store, world.config.namespace)
    await asyncio.sleep(_CARD_S)
    while True:
        with suppress(StoreError):
            status = await world.status()
            member = status.members.get(WorkerId(fault.process))
            for one in await registrations.read(world.config.deployment):
                if member is not None and one.incarnation == member.incarnation:
                    return await registrations.expel(one)
        await asyncio.sleep(_POLL_S)


async def _target_refused(world: World, fault: AtFailpoint) -> None:
    await world.scale(_TOO_MANY)


_HOW: dict[Occasion, Callable[[World, AtFailpoint], Awaitable[None]]] = {
    Occasion.CLIENT_LEAVES: _client_leaves,
    Occasion.INSTANCE_DROPPED: _instance_dropped,
    Occasion.TARGET_REFUSED: _target_refused,
}
