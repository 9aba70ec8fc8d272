"""Streaming clients of a vLLM group, and what they saw: gaps between tokens, failures, first
tokens. Pure but for the clients."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Any

import aiohttp

_TIMEOUT_S = 120.0


@dataclass
class Stream:
    """One request: when it began, when its tokens came, why it failed."""

    rank: int
    began_s: float
    tokens_s: list[float] = field(default_factory=list)
    error: str = ""
    complete: bool = False
    """All of its tokens came."""


@dataclass(frozen=True)
class Seen:
    """What clients saw in one window of time."""

    requests: int
    failed: int
    tokens: int
    longest_gap_s: float
    """Between two tokens of one stream, at whatever rank."""
    longest_gap_at_s: float
    """From the beginning of the window to the beginning of that gap."""
    longest_gap_by_rank_s: dict[int, float]
    all_silent_s: float
    """The longest time without a token of any stream: what other benchmarks call the gap."""
    first_token_p50_s: float
    errors: list[str]


def seen(streams: Sequence[Stream], since_s: float, until_s: float) -> Seen:
    """What happened between two readings of time.monotonic(). A gap counts if any of it lies
    inside."""
    under_way = [s for s in streams if s.began_s < until_s and _end_s(s) > since_s]
    gaps = [
        (b - a, a, s.rank)
        for s in under_way
        for a, b in pairwise(s.tokens_s)
        if b > since_s and a < until_s
    ]
    # Who waits still has a gap, too, up to now.
    waiting = [s for s in under_way if s.tokens_s and not (s.complete or s.error)]
    gaps += [
        (until_s - s.tokens_s[-1], s.tokens_s[-1], s.rank)
        for s in waiting
        if s.tokens_s[-1] < until_s
    ]
    by_rank: dict[int, float] = {}
    for gap_s, _, rank in gaps:
        by_rank[rank] = round(max(gap_s, by_rank.get(rank, 0.0)), 4)
    everywhere = sorted(t for s in under_way for t in s.tokens_s if since_s <= t <= until_s)
    silent = [b - a for a, b in pairwise(everywhere)]
    longest = max(gaps, default=(0.0, since_s, 0))
    first = sorted(s.tokens_s[0] - s.began_s for s in under_way if s.tokens_s)
    failed = [s for s in under_way if s.error]
    return Seen(
        requests=len(under_way),
        failed=len(failed),
        tokens=len(everywhere),
        longest_gap_s=round(longest[0], 4),
        longest_gap_at_s=round(longest[1] - since_s, 4),
        longest_gap_by_rank_s=by_rank,
        all_silent_s=round(max(silent, default=0.0), 4),
        first_token_p50_s=round(first[len(first) // 2], 4) if first else 0.0,
        errors=sorted({s.error for s in failed})[:5],
    )


def _end_s(stream: Stream) -> float:
    return stream.tokens_s[-1] if stream.complete else float("inf")


class Clients:
    """Clients that stream one request after the other, each at its own rank, until stopped."""

    def __init__(self, url: Callable[[int, str], str], model: str, *, tokens: int) -> None:
        self._url = url
        self._model = model
        self._tokens = tokens
        self._tasks: list[asyncio.Task[None]] = []
        self.streams: list[Stream] = []

    def start(self, ranks: Sequence[int], each: int) -> None:
        """`each` more clients at every one of `ranks`."""
        for rank in ranks:
            self._tasks += [asyncio.create_task(self._run(rank, n)) for n in range(each)]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    async def _run(self, rank: int, client: int) -> None:
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            for number in count():
                stream = Stream(rank, time.monotonic())
                self.streams.append(stream)
                prompt = [5, 6, 7, 8, 9 + client, 10 + number % 100]
                try:
                    await self._one(session, stream, prompt)
                except (aiohttp.ClientError, TimeoutError) as exc:
                    stream.error = repr(exc)[:200]
                if stream.error:
                    await asyncio.sleep(0.1)

    async def _one(self, session: aiohttp.ClientSession, stream: Stream, prompt: list[int]) -> None:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": self._tokens,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }
        async with session.post(self._url(stream.rank, "/v1/completions"), json=body) as response:
            if response.status != 200:
                stream.error = f"{response.status} {(await response.text())[:150]}"
                return
            async for line in response.content:
                if line.startswith(b"data: {"):
                    if line.startswith(b'data: {"error"'):
                        stream.error = line[:150].decode(errors="replace")
                        return
                    stream.tokens_s.append(time.monotonic())
        if len(stream.tokens_s) < self._tokens:
            stream.error = f"ended after {len(stream.tokens_s)} of {self._tokens} tokens"
        else:
            stream.complete = True


async def first_token_s(
    post: Callable[[Any], Awaitable[tuple[int, Any]]], model: str
) -> float | None:
    """Seconds until a first request of one token was answered; None if it failed."""
    began_s = time.monotonic()
    body = {"model": model, "prompt": [5, 6, 7], "max_tokens": 1, "temperature": 0}
    status, _ = await post(body)
    return time.monotonic() - began_s if status == 200 else None


async def logprobs(
    post: Callable[[Any], Awaitable[tuple[int, Any]]], model: str, *, prompts: int, tokens: int
) -> list[list[float]] | None:
    """Log-probabilities of fixed continuations, greedy; None if a request failed."""
    found = []
    for number in range(prompts):
        body = {
            "model": model,
            "prompt": [5, 6, 7, 8, 20 + number],
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 1,
        }
        status, answer = await post(body)
        if status != 200:
            return None
        with suppress(KeyError, IndexError, TypeError):
            found.append([float(x) for x in answer["choices"][0]["logprobs"]["token_logprobs"]])
    return found if len(found) == prompts else None


def worst_difference(a: list[list[float]] | None, b: list[list[float]] | None) -> float | None:
    """The largest difference of two sets of log-probabilities; None if one is missing.

    >>> worst_difference([[-1.0, -2.0]], [[-1.0, -2.5]])
    0.5
    """
    if not a or not b:
        return None
    pairs = zip(a, b, strict=True)
    return max(abs(x - y) for left, right in pairs for x, y in zip(left, right, strict=True))


def encoded(value: Any) -> str:
    """As JSON, for a file that is written while the run goes on."""
    return json.dumps(value, indent=1, default=str) + "\n"
