"""Requests of one replica: how many run, and how they leave. Imports no vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any

from dynamo_elastic.errors import RequestMoved

Item = Mapping[str, Any]

_POLL_S = 0.01
_ENDS = ("stop", "length")
"""Finish reasons of a request that is complete, whatever its replica does."""


class Requests:
    """Counts requests under way; sends them on when the replica leaves."""

    def __init__(self) -> None:
        self.running = 0
        self._admits = True
        self._moves = False

    async def run(self, items: AsyncGenerator[Item, None]) -> AsyncGenerator[Item, None]:
        """`items` of one request as they come. Raises RequestMoved when the rest of them has to
        come from another replica; then the tokens so far are right. `items` is closed in any
        case."""
        async with aclosing(items):
            if not self._admits:
                raise RequestMoved("this replica leaves")
            with self._one():
                async for item in items:
                    if self._moves and item.get("finish_reason") not in _ENDS:
                        raise RequestMoved("this replica leaves")
                    yield item

    @contextmanager
    def _one(self) -> Iterator[None]:
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    def close(self) -> None:
        """Admit no more."""
        self._admits = False

    def move(self) -> None:
        """Each request that is under way moves at its next item."""
        self._moves = True

    def reopen(self) -> None:
        """Undo close() and move()."""
        self._admits, self._moves = True, False

    async def idle(self, timeout_s: float) -> bool:
        """True once no request is under way, False if that takes longer."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_s
        while self.running and clock() < deadline:
            await asyncio.sleep(_POLL_S)
        return not self.running
