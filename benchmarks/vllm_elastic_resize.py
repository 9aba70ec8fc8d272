"""One operation of a group that is measured: scale requests, joiners, and whoever watches them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from vllm_elastic_ranks import OURS, Group, alive
from vllm_elastic_tiers import COLD, Ended

from dynamo_elastic.errors import ElasticError

_WATCH_S = 0.02
_SELDOM_S = 0.5
_GRACE_S = 8.0
_LINGER_S = 5.0
"""For joiners to say that they were ready, when all others have answered."""


class Stage(StrEnum):
    """Where a joiner is."""

    RESTORED = "restored"
    """Its process is there, and has not begun to attach; a cold one begins its boot."""
    READY = "ready"
    """It has attached, its weights too; a cold one never says so."""
    COMMITTING = "committing"
    """All are ready, and those who serve begin to pause."""


Watcher = Callable[[Stage, int], Awaitable[None]]
"""Told of each joiner's stages, by rank. It is waited for."""


async def _nobody(_: Stage, __: int) -> None:
    return


@dataclass(frozen=True, slots=True)
class Limits:
    """Deadlines of one operation, in seconds."""

    scale_s: float
    joiner_s: float
    """For a joiner that was there before, to be ready; ours is told then that it is lost."""


async def resize(
    group: Group, tier: Ended, width: int, limits: Limits, watcher: Watcher = _nobody,
    without: Collection[int] = (),
) -> dict[str, Any]:  # fmt: skip
    """Scale to `width`: what every rank answered and when, how each joiner came. The group has the
    new width if all who are asked said 200: who is in it, but for ranks that have ended, and those
    of `without`."""
    before, began_s = group.width, time.monotonic()
    there = [rank for rank in range(before) if rank in group.pids and alive(group.pids[rank])]
    asked = [rank for rank in there if rank not in without]
    operation = asyncio.create_task(_ask_all(group, asked, width, began_s, limits.scale_s))
    joining = [
        asyncio.create_task(_join(group, tier, rank, width, began_s, limits, watcher))
        for rank in range(before, width)
    ]
    try:
        answers = await operation
        if joining:
            await asyncio.wait(joining, timeout=_LINGER_S)
        late = [task for task in joining if not task.done()]
    finally:
        for task in (operation, *joining):
            task.cancel()
    joined = [task.result() for task in joining if task not in late]
    ok = bool(answers) and all(answer["status"] == 200 for answer in answers)
    if ok:
        group.width = width
        group.save()
    total_s = max((answer["answered_s"] for answer in answers), default=0.0)
    return {
        "from": before, "to": width, "ok": ok, "total_s": round(total_s, 3), "ranks": answers,
        "joiners": joined, "joiners_late": len(late),
    }  # fmt: skip


async def _ask_all(
    group: Group, ranks: Sequence[int], width: int, began_s: float, timeout_s: float
) -> list[dict[str, Any]]:
    """What each said. Once one has refused, the others have a grace to answer, and no more."""
    tasks = [
        asyncio.create_task(_ask_to_scale(group, rank, width, began_s, timeout_s)) for rank in ranks
    ]
    waiting, end_s = set(tasks), began_s + timeout_s
    try:
        while waiting and time.monotonic() < end_s:
            done, waiting = await asyncio.wait(
                waiting, timeout=end_s - time.monotonic(), return_when=asyncio.FIRST_COMPLETED
            )
            if any(task.result()["status"] != 200 for task in done):
                end_s = min(end_s, time.monotonic() + _GRACE_S)
        answered_s = round(time.monotonic() - began_s, 3)
        late = {"status": 0, "answered_s": answered_s, "said": "no answer"}
        return [
            {"rank": rank, **late} if task in waiting else task.result()
            for rank, task in zip(ranks, tasks, strict=True)
        ]
    finally:
        for task in waiting:
            task.cancel()


async def _ask_to_scale(
    group: Group, rank: int, width: int, began_s: float, timeout_s: float
) -> dict[str, Any]:
    body = {"new_data_parallel_size": width}
    status, answer = await group.post(rank, "/scale_elastic_ep", body, timeout_s)
    said = "" if status == 200 else str(answer)[:300]
    answered_s = round(time.monotonic() - began_s, 3)
    return {"rank": rank, "status": status, "answered_s": answered_s, "said": said}


async def _join(
    group: Group, tier: Ended, rank: int, width: int, began_s: float, limits: Limits,
    watcher: Watcher,
) -> dict[str, Any]:  # fmt: skip
    """A joiner from its tier: when it was there, when ready, and what of the time went where."""
    try:
        came = await tier.restore(rank, width)
    except (ElasticError, OSError) as exc:
        reason = f"{type(exc).__name__}: {exc}"[:2000]
        await _tell_of_failure(group, reason)
        return {"rank": rank, "tier": tier.name, "failed": reason}
    restored_s = round(time.monotonic() - began_s, 3)
    found: dict[str, Any] = {
        "rank": rank, "tier": came.tier, "restored_s": restored_s, "restore": came.seconds,
    }  # fmt: skip
    watch = asyncio.create_task(_tell_of_its_end(group, rank))
    try:
        await watcher(Stage.RESTORED, rank)
        if came.tier != COLD:
            status, parts = await group.post(rank, "/elastic_ep/attach", {}, limits.joiner_s)
            ready_s = round(time.monotonic() - began_s, 3)
            found |= {"status": status, "ready_s": ready_s, "attach": parts}
            if status != 200:
                reason = f"rank {rank} did not come to be ready: {str(parts)[:200]}"
                await _tell_of_failure(group, reason)
                return found
            await watcher(Stage.READY, rank)
        # To ask costs the rank that is asked: not often unless somebody waits for it.
        look_s = _SELDOM_S if watcher is _nobody else _WATCH_S
        if await _until_commit(group, width, look_s):
            await watcher(Stage.COMMITTING, rank)
            found["committing_s"] = round(time.monotonic() - began_s, 3)
        return found
    finally:
        watch.cancel()


async def _until_commit(group: Group, width: int, look_s: float) -> bool:
    """False if the operation failed before."""
    while True:
        status, said = await group.post(0, "/is_scaling_elastic_ep", {}, 2)
        if status == 200 and said.get("requested_data_parallel_size") == width:
            if said["phase"] in ("committing", "completed"):
                return True
            if said["phase"] == "failed":
                return False
        await asyncio.sleep(look_s)


async def _tell_of_its_end(group: Group, rank: int) -> None:
    while rank in group.pids and alive(group.pids[rank]):
        await asyncio.sleep(_WATCH_S)
    await _tell_of_failure(group, f"the process of rank {rank} ended")


async def _tell_of_failure(group: Group, reason: str) -> None:
    """Ours gives the operation up at once; upstream can't be told."""
    if group.setup.engine == OURS:
        await group.post(0, "/elastic_ep/fail", {"reason": reason}, 5)
