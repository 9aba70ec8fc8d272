"""Requests of a replica: they finish, or move on with the tokens so far."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from dynamo_elastic.engine.vllm.requests import Requests
from dynamo_elastic.errors import RequestMoved


class Stream:
    """Items of one request, given out when the test says so."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    def put(self, token: int, finish: str | None = None) -> None:
        self._queue.put_nowait({"token_ids": [token], "finish_reason": finish})

    async def items(self) -> AsyncGenerator[dict[str, Any], None]:
        while True:
            item = await self._queue.get()
            yield item
            if item["finish_reason"] is not None:
                return


async def read(requests: Requests, stream: Stream) -> list[int]:
    tokens: list[int] = []
    try:
        async for item in requests.run(stream.items()):
            tokens += item["token_ids"]
    except RequestMoved:
        tokens.append(-1)
    return tokens


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_request_runs_to_its_end_and_is_counted() -> None:
    async def body() -> None:
        requests, stream = Requests(), Stream()
        reading = asyncio.create_task(read(requests, stream))
        stream.put(1)
        await settle()
        assert requests.running == 1
        stream.put(2, "length")
        assert await reading == [1, 2]
        assert requests.running == 0

    asyncio.run(body())


def test_closed_admits_no_more_and_lets_those_under_way_finish() -> None:
    async def body() -> None:
        requests, stream = Requests(), Stream()
        reading = asyncio.create_task(read(requests, stream))
        stream.put(1)
        await settle()
        requests.close()
        assert await read(requests, Stream()) == [-1]
        assert not await requests.idle(0.0)
        stream.put(2, "stop")
        assert await reading == [1, 2]
        assert await requests.idle(1.0)
        requests.reopen()
        again = Stream()
        again.put(3, "stop")
        assert await read(requests, again) == [3]

    asyncio.run(body())


@pytest.mark.parametrize(
    ("finish", "seen"), [(None, [1, -1]), ("abort", [1, -1]), ("stop", [1, 2])]
)
def test_a_request_moves_at_its_next_item_unless_that_ends_it(
    finish: str | None, seen: list[int]
) -> None:
    async def body() -> None:
        requests, stream = Requests(), Stream()
        reading = asyncio.create_task(read(requests, stream))
        stream.put(1)
        await settle()
        requests.close()
        requests.move()
        stream.put(2, finish)
        assert await reading == seen
        assert requests.running == 0

    asyncio.run(body())
