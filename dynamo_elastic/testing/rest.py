"""A deployment at rest: nothing is under way, somebody leads, and what was decided is served."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from dynamo_elastic.coordinator.status import Status
from dynamo_elastic.errors import StoreError


class NotAtRest(Exception):
    """It did not come to rest in time; says why."""


def unrest(status: Status) -> str:
    """Why a deployment is not at rest; '' if it is."""
    if status.operation is not None:
        return f"{status.operation.operation_id} is in {status.operation.phase}"
    if not status.leader:
        return "nobody leads"
    if status.withdrawn is not None or status.in_force is None:
        return "no decided topology is served"
    lost = status.lost_reasons()
    return f"lost: {lost}" if lost else ""


async def at_rest(
    read: Callable[[], Awaitable[Status]],
    why_not: Callable[[Status], str],
    *,
    deadline_s: float,
    poll_s: float,
) -> Status:
    """The first status for which `why_not` has nothing to say. etcd may be away meanwhile. Raises
    NotAtRest at `deadline_s` of the monotonic clock."""
    why = "etcd does not answer"
    while time.monotonic() < deadline_s:
        with suppress(StoreError):
            status = await read()
            why = why_not(status)
            if not why:
                return status
        await asyncio.sleep(poll_s)
    raise NotAtRest(why)
