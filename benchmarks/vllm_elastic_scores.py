"""Whether a group computes what it did: log-probabilities of what it says and of fixed prompts."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from vllm_elastic_meter import Stream

Post = Callable[[Any], Awaitable[tuple[int, Any]]]
PostAt = Callable[[int, Any], Awaitable[tuple[int, Any]]]

_LENGTH = 24
"""Tokens of a prompt that is scored."""
_AT_ONCE = 8
"""Requests at a rank."""
WRONG_BY = 0.05
"""A greedy token is wrong if another is more likely by more than this: noise of bf16 is 0.001, and
the best of a vocabulary of random weights stands 0.2 above the mean."""


async def first_token_s(post: Post, model: str) -> float | None:
    """Seconds until a first request of one token was answered; None if it failed."""
    began_s = time.monotonic()
    body = {"model": model, "prompt": [5, 6, 7], "max_tokens": 1, "temperature": 0}
    status, _ = await post(body)
    return time.monotonic() - began_s if status == 200 else None


async def logprobs(
    post: Post, model: str, *, prompts: int, tokens: int
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


def prompts(number: int, *, seed: int = 7) -> list[list[int]]:
    """The same ones in every run."""
    source = random.Random(seed)
    return [[source.randrange(5, 500) for _ in range(_LENGTH)] for _ in range(number)]


async def scored(
    post: PostAt, ranks: Sequence[int], model: str, number: int
) -> list[list[float] | None]:
    """Log-probabilities of each token of `number` prompts, each at one rank in turn; None where a
    request failed."""
    places = {rank: asyncio.Semaphore(_AT_ONCE) for rank in ranks}

    async def one(place: int, prompt: list[int]) -> list[float] | None:
        rank = ranks[place % len(ranks)]
        async with places[rank]:
            rows = await _prompt_rows(lambda body: post(rank, body), model, prompt, 0)
        return None if rows is None else [own for own, _ in rows]

    return await asyncio.gather(*(one(n, p) for n, p in enumerate(prompts(number))))


async def _prompt_rows(
    post: Post, model: str, prompt: list[int], best: int
) -> list[tuple[float, float]] | None:
    """Of each token of a prompt but the first: its log-probability, and that of the likeliest."""
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    status, answer = await post(body | {"prompt_logprobs": best})
    if status != 200:
        return None
    with suppress(KeyError, IndexError, TypeError, ValueError):
        rows = answer["choices"][0]["prompt_logprobs"][1:]
        found = []
        for token, row in zip(prompt[1:], rows, strict=True):
            values = {int(name): float(each["logprob"]) for name, each in row.items()}
            found.append((values[token], max(values.values())))
        return found
    return None


async def wrong_tokens(post: Post, model: str, streams: Sequence[Stream]) -> dict[str, Any]:
    """How many tokens that were served are not the likeliest ones, by a rank that is well."""
    places = asyncio.Semaphore(_AT_ONCE)

    async def one(stream: Stream) -> list[float] | None:
        async with places:
            rows = await _prompt_rows(post, model, stream.prompt + stream.tokens, 1)
        return None if rows is None else margins(rows[len(stream.prompt) - 1 :])

    found = await asyncio.gather(*(one(stream) for stream in streams if stream.tokens))
    known = [margin for each in found if each is not None for margin in each]
    return {
        "judged": len(known),
        "wrong": sum(margin > WRONG_BY for margin in known),
        "worst_margin": round(max(known, default=0.0), 5),
        "streams_not_judged": sum(each is None for each in found),
    }


def margins(rows: Sequence[tuple[float, float]]) -> list[float]:
    """By how much the likeliest token is likelier than the one that was served.

    >>> margins([(-1.0, -1.0), (-2.0, -1.5)])
    [0.0, 0.5]
    """
    return [best - own for own, best in rows]


def compared(
    first: Sequence[Sequence[float] | None], now: Sequence[Sequence[float] | None]
) -> dict[str, float]:
    """The worst differences of two scorings: of a token, and of a prompt's log-likelihood.

    >>> compared([[-1.0, -2.0], [-3.0]], [[-1.5, -1.5], None])
    {'token_max_abs_err': 0.5, 'prompt_max_abs_err': 0.0, 'missing': 1}
    """
    pairs = [(a, b) for a, b in zip(first, now, strict=True) if a is not None and b is not None]
    tokens = [abs(x - y) for a, b in pairs for x, y in zip(a, b, strict=True)]
    sums = [abs(sum(a) - sum(b)) for a, b in pairs]
    return {
        "token_max_abs_err": max(tokens, default=0.0),
        "prompt_max_abs_err": max(sums, default=0.0),
        "missing": len(first) - len(pairs),
    }
