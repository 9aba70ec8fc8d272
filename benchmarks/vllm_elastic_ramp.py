"""One trace against groups that differ in what happens in its middle: nothing, a restart with more
ranks, a scale-up."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from enum import StrEnum
from typing import Any

import aiohttp
from vllm_elastic_clients import read_tokens
from vllm_elastic_meter import Stream
from vllm_elastic_ranks import MODEL
from vllm_elastic_session import Session
from vllm_elastic_trace import (
    FAILED_S,
    WINDOW_S,
    Arrival,
    Waited,
    arrivals,
    p95_between,
    percentile,
    windows,
)

_COMPLETE_S = 60.0
"""For all tokens of a request."""


class Mode(StrEnum):
    """What the group is, and becomes in the middle of the trace."""

    SMALL = "small"
    LARGE = "large"
    RESTARTED = "restarted"
    SCALED = "scaled"


class Router:
    """Sends each request of a trace, when it comes, to the rank with the fewest under way."""

    def __init__(self, session: Session) -> None:
        self._url = session.group.url
        self.ranks = range(session.group.width)
        self._busy: dict[int, int] = {}
        self.waited: list[Waited] = []

    async def replay(self, trace: Sequence[Arrival]) -> None:
        """All of it; returns when the last request has ended, well or not."""
        began_s = time.monotonic()
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=_COMPLETE_S)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
            asyncio.TaskGroup() as requests,
        ):
            for arrival in trace:
                await asyncio.sleep(began_s + arrival.at_s - time.monotonic())
                requests.create_task(self._request(session, arrival))

    async def _request(self, session: aiohttp.ClientSession, arrival: Arrival) -> None:
        rank = min(self.ranks, key=lambda r: self._busy.get(r, 0))
        self._busy[rank] = self._busy.get(rank, 0) + 1
        stream = Stream(rank, time.monotonic())
        try:
            await self._stream(session, arrival, stream)
        except (aiohttp.ClientError, TimeoutError) as exc:
            stream.error = repr(exc)[:100]
        finally:
            self._busy[rank] -= 1
        came_s = stream.tokens_s[0] - stream.began_s if stream.tokens_s else FAILED_S
        failed = len(stream.tokens_s) < arrival.tokens or came_s >= FAILED_S
        self.waited.append(Waited(arrival.at_s, FAILED_S if failed else came_s, failed))

    async def _stream(
        self, session: aiohttp.ClientSession, arrival: Arrival, stream: Stream
    ) -> None:
        body = {
            "model": MODEL,
            "prompt": list(arrival.prompt),
            "max_tokens": arrival.tokens,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        async with session.post(self._url(stream.rank, "/v1/completions"), json=body) as response:
            if response.status == 200:
                await read_tokens(stream, response)


Change = Callable[[Router], Awaitable[dict[str, Any]]]


async def ramp(session: Session, mode: Mode, trace_s: float, rate: float, change: Change) -> None:
    """The trace in one mode; `change` is what happens in its middle."""
    trace = arrivals(rate, trace_s)
    router = Router(session)
    began_s = time.monotonic()

    async def changed() -> dict[str, Any]:
        await asyncio.sleep(trace_s / 2)
        found = await change(router)
        return found | {"until_s": round(time.monotonic() - began_s, 2)}

    change_task = asyncio.create_task(changed())
    try:
        await router.replay(trace)
        found = await change_task
    finally:
        change_task.cancel()
        with suppress(asyncio.CancelledError):
            await change_task
    path = session.group.folder / f"ramp-{mode}.json"
    path.write_text(json.dumps([asdict(w) for w in router.waited]) + "\n")
    waited, window_s = router.waited, min(WINDOW_S, trace_s / 4)
    session.measured.add(
        "ramp", mode=mode, trace_s=trace_s, rate=rate, window_s=window_s, requests=len(trace),
        failed=sum(w.failed for w in waited), change=found,
        p95_s=list(windows(waited, trace_s, window_s)), **_parts(waited, found, trace_s),
    )  # fmt: skip


def _parts(waited: Sequence[Waited], change: Mapping[str, Any], trace_s: float) -> dict[str, Any]:
    """95th percentiles: of all, of the first half, and of those who came after the change."""
    return {
        "p95_all_s": percentile([w.first_token_s for w in waited], 0.95),
        "p95_first_half_s": p95_between(waited, 0, trace_s / 2),
        "p95_changing_s": p95_between(waited, trace_s / 2, change["until_s"]),
        "p95_after_s": p95_between(waited, change["until_s"], trace_s),
    }


async def no_change(_: Router) -> dict[str, Any]:
    return {}


def scaled_to(session: Session, width: int) -> Change:
    """The group grows; requests go to who joins from then on."""

    async def change(router: Router) -> dict[str, Any]:
        found = await session.resize(width)
        router.ranks = range(session.group.width)
        return found

    return change


def restarted_with(session: Session, width: int, boot: Callable[[], Awaitable[float]]) -> Change:
    """The group ends and boots with `width` ranks. Requests meanwhile find nobody."""

    async def change(router: Router) -> dict[str, Any]:
        session.group.end(sorted(session.group.pids))
        boot_s = await boot()
        router.ranks = range(width)
        return {"boot_s": boot_s}

    return change


async def calibrated_rate(session: Session, seconds: float, share: float) -> float:
    """Requests a second that this group bears when it has all that it can take, times `share`."""
    trace = arrivals(1000.0, 0.4)
    done = 0
    began_s = time.monotonic()
    router = Router(session)

    async def client(place: int) -> None:
        nonlocal done
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=FAILED_S)) as http:
            turn = place
            while time.monotonic() < began_s + seconds:
                arrival = trace[turn % len(trace)]
                stream = Stream(place % session.group.width, time.monotonic())
                with suppress(aiohttp.ClientError, TimeoutError):
                    await router._stream(http, arrival, stream)
                done += len(stream.tokens_s) >= arrival.tokens
                turn += 97

    await asyncio.gather(*(client(n) for n in range(64 * session.group.width)))
    return share * done / (time.monotonic() - began_s)
