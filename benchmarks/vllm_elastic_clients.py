"""Clients of a vLLM group that stream one request after the other, each at its own rank."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from itertools import count

import aiohttp
from vllm_elastic_meter import Stream

_TIMEOUT_S = 120.0


class Clients:
    """Clients that stream one request after the other, each at its own rank, until stopped. Who is
    moved goes on at another rank with the tokens that it has, as a router's migration does it."""

    def __init__(self, url: Callable[[int, str], str], model: str, *, tokens: int) -> None:
        self._url = url
        self._model = model
        self._tokens = tokens
        self._tasks: list[asyncio.Task[None]] = []
        self._moved: dict[int, int] = {}
        self._open: dict[int, tuple[int, aiohttp.ClientResponse]] = {}
        self.streams: list[Stream] = []

    def start(self, ranks: Sequence[int], each: int) -> None:
        """`each` more clients at every one of `ranks`."""
        for rank in ranks:
            self._tasks += [asyncio.create_task(self._run(rank, n)) for n in range(each)]

    def move(self, leavers: Sequence[int], stay: Sequence[int]) -> None:
        """Clients of `leavers` go on at those who stay, in turn, at once."""
        self._moved |= {rank: stay[n % len(stay)] for n, rank in enumerate(leavers)}
        for rank, response in list(self._open.values()):
            if rank in self._moved:
                response.close()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    async def _run(self, rank: int, number: int) -> None:
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            for turn in count():
                prompt = [5, 6, 7, 8 + number, 9 + turn % 100]
                at = self._moved.get(rank, rank)
                stream = Stream(at, time.monotonic(), prompt=prompt)
                self.streams.append(stream)
                await self._to_its_end(session, stream)
                if stream.error:
                    await asyncio.sleep(0.1)

    async def _to_its_end(self, session: aiohttp.ClientSession, stream: Stream) -> None:
        while not (stream.complete or stream.error):
            at = self._moved.get(stream.rank, stream.rank)
            if at != stream.rank:
                stream.rank, stream.moved = at, len(stream.tokens_s)
            try:
                await self._one(session, stream)
            except (aiohttp.ClientError, TimeoutError) as exc:
                if stream.rank not in self._moved:
                    stream.error = repr(exc)[:200]

    async def _one(self, session: aiohttp.ClientSession, stream: Stream) -> None:
        body = {
            "model": self._model,
            "prompt": stream.prompt + stream.tokens,
            "max_tokens": self._tokens - len(stream.tokens_s),
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        rank = stream.rank
        async with session.post(self._url(rank, "/v1/completions"), json=body) as response:
            if response.status != 200:
                said = (await response.text())[:150]
                if rank not in self._moved:
                    stream.error = f"{response.status} {said}"
                return
            self._open[id(stream)] = (rank, response)
            try:
                await read_tokens(stream, response)
            finally:
                del self._open[id(stream)]
        stream.complete = len(stream.tokens_s) >= self._tokens
        if not (stream.complete or stream.error or rank in self._moved):
            stream.error = f"ended after {len(stream.tokens_s)} of {self._tokens} tokens"


async def read_tokens(stream: Stream, response: aiohttp.ClientResponse) -> None:
    """Tokens of an answer and when they came, to its end or to an error in it."""
    async for line in response.content:
        if line.startswith(b'data: {"error"'):
            stream.error = line[:150].decode(errors="replace")
            return
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                came = choice.get("token_ids") or ()
                stream.tokens += came
                stream.tokens_s += [time.monotonic()] * len(came)
