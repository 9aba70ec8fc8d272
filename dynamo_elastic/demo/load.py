"""Streaming clients in a loop, each token's time kept: gaps, failures and texts per stream."""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from dataclasses import dataclass, field

import aiohttp

_REQUEST_TIMEOUT_S = 60.0
_ID_PREFIX = "cmpl-"
"""Dynamo's frontend names a completion so, and then by its id of the request."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is asked. The same prompt must always be answered with the same text."""

    text: str
    seed: int
    max_tokens: int

    @property
    def key(self) -> str:
        return f"{self.text}#{self.seed}"


@dataclass(slots=True)
class StreamResult:
    """One stream as its client saw it. Times are time.monotonic() seconds."""

    prompt: Prompt
    started_s: float
    request_id: str = ""
    """The frontend's own, which the stream keeps on every rank that it is moved to."""
    ended_s: float = 0.0
    text: str = ""
    token_times_s: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def max_gap_s(self) -> float:
        """Longest time between two tokens of this stream; 0 with fewer than two."""
        return max((b - a for a, b in self.gaps()), default=0.0)

    def gaps(self) -> list[tuple[float, float]]:
        """(from, to) of every pause between two tokens."""
        return list(zip(self.token_times_s, self.token_times_s[1:], strict=False))


class Load:
    """`clients` loops over `prompts`, client k starting at prompt k. Owns one HTTP session."""

    def __init__(
        self, url: str, model: str, prompts: list[Prompt], clients: int, *, pause_s: float = 0.0
    ) -> None:
        """A client waits `pause_s` after each answer."""
        self._url = f"{url}/v1/completions"
        self._pause_s = pause_s
        self._model = model
        self._prompts = prompts
        self._clients = clients
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.results: list[StreamResult] = []
        self.live: set[int] = set()
        """Clients with a stream open."""

    def start(self) -> None:
        """Start the clients."""
        self._tasks = [asyncio.create_task(self._client(k)) for k in range(self._clients)]

    async def stop(self) -> None:
        """Let every client finish the stream it is in, then end. Raises what a client raised."""
        self._stop.set()
        await asyncio.gather(*self._tasks)

    def take(self) -> list[StreamResult]:
        """Streams that ended since the last call; they are kept here no longer."""
        taken, self.results = self.results, []
        return taken

    async def wait_for_each_prompt(self, *, timeout_s: float) -> None:
        """Return once every prompt has been answered at least once. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while {r.prompt.key for r in self.results if not r.error} < {
                p.key for p in self._prompts
            }:
                await asyncio.sleep(0.05)

    async def _client(self, number: int) -> None:
        async with aiohttp.ClientSession() as session:
            turn = number
            while not self._stop.is_set():
                self.live.add(number)
                result = await self._one(session, self._prompts[turn % len(self._prompts)])
                self.live.discard(number)
                self.results.append(result)
                turn += 1
                await asyncio.sleep(0.2 if result.error else self._pause_s)

    async def _one(self, session: aiohttp.ClientSession, prompt: Prompt) -> StreamResult:
        result = StreamResult(prompt, time.monotonic())
        body = {
            "model": self._model,
            "prompt": prompt.text,
            "max_tokens": prompt.max_tokens,
            "seed": prompt.seed,
            "temperature": 1.0,
            "stream": True,
        }
        timeout = aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT_S)
        try:
            async with session.post(self._url, json=body, timeout=timeout) as response:
                if response.status != 200:
                    result.error = f"HTTP {response.status}: {(await response.text())[:200]}"
                else:
                    await self._read(response, result)
        except (aiohttp.ClientError, TimeoutError, ValueError) as exc:
            result.error = f"{type(exc).__name__}: {exc}"
        result.ended_s = time.monotonic()
        return result

    async def _read(self, response: aiohttp.ClientResponse, result: StreamResult) -> None:
        finished = False
        async for line in response.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                result.error = str(event["error"])[:200]
                return
            result.request_id = str(event.get("id", "")).removeprefix(_ID_PREFIX)
            for choice in event.get("choices", ()):
                if choice.get("text"):
                    result.text += choice["text"]
                    result.token_times_s.append(time.monotonic())
                finished = finished or choice.get("finish_reason") is not None
        if not finished:
            result.error = "stream ended without a finish reason"


@dataclass(frozen=True, slots=True)
class LoadSummary:
    """All streams together."""

    requests_total: int
    requests_failed: int
    tokens_equal: bool
    """Every prompt got the same text every time."""
    token_gap_max_s: float
    tokens_total: int
    errors: tuple[str, ...]


def summarize(results: list[StreamResult], reference: dict[str, str]) -> LoadSummary:
    """Compare every finished stream's text with `reference` (prompt key -> text)."""
    good = [r for r in results if not r.error]
    return LoadSummary(
        requests_total=len(results),
        requests_failed=len(results) - len(good),
        tokens_equal=bool(good) and all(r.text == reference.get(r.prompt.key) for r in good),
        token_gap_max_s=max((r.max_gap_s for r in good), default=0.0),
        tokens_total=sum(len(r.token_times_s) for r in good),
        errors=tuple(sorted({r.error for r in results if r.error}))[:5],
    )


def reference_texts(results: list[StreamResult]) -> dict[str, str]:
    """The text of each prompt, from streams of one topology. Raises ValueError if two differ."""
    texts: dict[str, set[str]] = defaultdict(set)
    for r in results:
        if not r.error:
            texts[r.prompt.key].add(r.text)
    unstable = [key for key, seen in texts.items() if len(seen) > 1]
    if unstable:
        raise ValueError(f"answers differ without any scaling: {unstable[:3]}")
    return {key: seen.pop() for key, seen in texts.items()}


def longest_gap(results: list[StreamResult], since_s: float, until_s: float) -> float:
    """Longest pause of any stream that overlaps the interval (time.monotonic() seconds)."""
    return max(
        (b - a for r in results for a, b in r.gaps() if b >= since_s and a <= until_s),
        default=0.0,
    )
