"""How a rank leaves a vLLM group: it knows nothing of the next topology, and does what rank 0 calls
for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from dynamo_elastic.engine.vllm.group import RankGroup
from dynamo_elastic.errors import EngineError

_FOLLOW_POLL_S = 0.01
_log = logging.getLogger(__name__)


async def leave(group: RankGroup, left: Callable[[], None]) -> None:
    """Return once this rank has left, and `left` was called. An operation that comes to nothing is
    followed by another; a store that does not answer is asked again. Cancelled, the rank stays and
    has nothing prepared; or it has left all the same, if all ranks had come to commit."""
    seen, trouble = "", ""
    while group.size:
        try:
            called = group.summons()
            new = called is not None and called.operation != seen
            if called is not None and new and called.size <= group.rank:
                seen = called.operation
                await _leave_for(group, called.size, left)
        except EngineError as exc:
            if str(exc) != trouble:
                _log.warning("rank %d stays for now: %s", group.rank, exc)
            trouble = str(exc)
        await asyncio.sleep(_FOLLOW_POLL_S)


async def _leave_for(group: RankGroup, size: int, left: Callable[[], None]) -> None:
    await group.prepare(size)
    leaving = asyncio.ensure_future(_commit_when_called(group, left))
    try:
        await asyncio.shield(leaving)
    except asyncio.CancelledError:
        if not leaving.done():
            await _stay(group)
        await asyncio.gather(leaving, return_exceptions=True)
        raise


async def _commit_when_called(group: RankGroup, left: Callable[[], None]) -> None:
    while (called := group.summons()) is not None and not called.commits:
        await asyncio.sleep(_FOLLOW_POLL_S)
    if called is not None:
        await group.commit()
        left()
    else:
        await group.give_up("rank 0 has given it up")


async def _stay(group: RankGroup) -> None:
    """What was prepared is over, unless all ranks have come to commit: vLLM would take it for the
    next operation of that size."""
    reason = f"rank {group.rank} stays"
    try:
        withdrawn = await group.withdraw(reason)
    except EngineError:  # its store is gone, without which nobody commits
        withdrawn = True
    if withdrawn:
        await group.give_up(reason)
