"""Outputs wait for their reader; a newer reader takes over; private ones go elsewhere."""

from __future__ import annotations

import asyncio

import pytest

from dynamo_elastic.engine.base import Finish, Output
from dynamo_elastic.engine.reference.feed import Feed
from dynamo_elastic.errors import EngineError


def test_outputs_wait_for_a_reader_and_go_to_the_newest() -> None:
    async def scenario() -> None:
        feed = Feed(asyncio.get_running_loop())
        feed.put([Output("a", (1,))])
        old = feed.steps()
        assert await anext(old) == [Output("a", (1,))]
        waiting = asyncio.ensure_future(anext(old))
        await asyncio.sleep(0)
        new = feed.steps()
        feed.put([Output("a", (2,))])
        assert await anext(new) == [Output("a", (2,))]
        with pytest.raises(StopAsyncIteration):
            await waiting

    asyncio.run(scenario())


def test_private_outputs_reach_only_the_one_who_asked() -> None:
    async def scenario() -> None:
        feed = Feed(asyncio.get_running_loop())
        name, tokens = feed.private()
        feed.put([Output(name, (1,)), Output("a", (5,))])
        feed.put([Output(name, (2,), Finish.LENGTH)])
        assert await tokens == (1, 2)
        assert await anext(feed.steps()) == [Output("a", (5,))]
        name, tokens = feed.private()
        feed.put([Output(name, (), Finish.MOVED)])
        with pytest.raises(EngineError, match="moved"):
            await tokens

    asyncio.run(scenario())
