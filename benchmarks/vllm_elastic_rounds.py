"""The same widths again and again under load: what grows, how long each resize takes, and whether
the group still computes what it did."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from vllm_elastic_meter import seen
from vllm_elastic_session import Session
from vllm_elastic_usage import growth, growths, usage

_SPARE_S = 20.0
"""Kept of the time that there is, to end the group and write."""


async def rounds(
    session: Session, widths: Sequence[int], number: int, prompts: int, deadline_s: float
) -> None:
    """As many of `number` rounds through `widths` as the time allows; earlier commands' count."""
    if not session.measured.all("prompts"):
        await session.score_prompts("before", prompts)
    done = len(session.measured.all("round"))
    for turn in _in_time(done, number, deadline_s):
        if not await _round(session, widths, turn):
            return
        await session.score_prompts(f"after round {turn}", prompts)


def _in_time(done: int, number: int, deadline_s: float) -> Iterator[int]:
    """Rounds with fewer are better than none."""
    began_s = time.monotonic()
    for turn in range(done, number):
        spent_s = time.monotonic() - began_s
        if turn > done and spent_s * (turn - done + 1) / (turn - done) > deadline_s - _SPARE_S:
            return
        yield turn


async def _round(session: Session, widths: Sequence[int], turn: int) -> bool:
    """Through all widths and to the last; False if a rank refused."""
    resizes: list[dict[str, Any]] = []
    for width in widths:
        before = session.group.width
        if width == before:
            continue
        await session.prepare(width)
        clients = session.clients(range(before))
        began_s = time.monotonic()
        leavers, stay = range(width, before), range(min(width, before))
        clients.move(leavers, stay)
        found = await session.resize(width)
        if found["ok"]:
            await session.group.wait_up(range(width), session.limits.joiner_s)
        clients.start(range(before, width), session.load.clients)
        await asyncio.sleep(session.load.serve_s)
        ended_s = time.monotonic()
        await clients.stop()
        window = asdict(seen(clients.streams, began_s, ended_s))
        resizes.append(found | {"seen": window})
        if not found["ok"]:
            session.measured.add("round", turn=turn, ok=False, resizes=resizes)
            return False
        await session.see_off(leavers)
    held = {rank: usage(pid) for rank, pid in sorted(session.group.pids.items())}
    session.measured.add("round", turn=turn, ok=True, resizes=resizes, usage=held)
    return True


def rounds_metrics(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What grew from the second round on, by least squares; the first one warms up."""
    whole = [step for step in steps if step["step"] == "round"]
    if not whole:
        return {}
    resizes = [each for step in whole for each in step["resizes"]]
    found: dict[str, float] = {
        "rounds": float(sum(step["ok"] for step in whole)),
        "rounds_failed": float(sum(not step["ok"] for step in whole)),
        "rounds_resizes": float(len(resizes)),
        "rounds_requests": sum(each["seen"]["requests"] for each in resizes),
        "rounds_requests_failed": sum(each["seen"]["failed"] for each in resizes),
        "rounds_gap_max_s": max(each["seen"]["longest_gap_s"] for each in resizes),
    }
    steady = [step for step in whole[1:] if step["ok"]]
    if len(steady) >= 2:
        grown = growths([step["usage"] for step in steady])
        found |= {f"rounds_{kind}_growth": value for kind, value in grown.items()}
    for way, up in (("up", True), ("down", False)):
        taken = [_median_s(step, up=up) for step in steady]
        known = [value for value in taken if value is not None]
        if known:
            found[f"rounds_{way}_s"] = statistics.median(known)
        if len(known) >= 2:
            found[f"rounds_{way}_s_growth"] = growth(known)
    return found


def _median_s(step: Mapping[str, Any], *, up: bool) -> float | None:
    taken = [e["total_s"] for e in step["resizes"] if (e["to"] > e["from"]) is up]
    return statistics.median(taken) if taken else None
