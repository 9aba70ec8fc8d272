"""Outputs on their way from the step loop to the one who reads them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator

from dynamo_elastic.engine.base import Finish, Output
from dynamo_elastic.errors import EngineError

_PRIVATE = "engine/"


class Feed:
    """Keeps the outputs of steps until the one reader takes them; a newer reader replaces it.

    Outputs of private requests go to those who wait for them instead. Used in the thread of
    `loop`, except put().
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._steps: list[list[Output]] = []
        self._wake = asyncio.Event()
        self._readers = 0
        self._numbers = itertools.count()
        self._private: dict[str, tuple[list[int], asyncio.Future[tuple[int, ...]]]] = {}

    def put(self, outputs: list[Output]) -> None:
        """Take the outputs of one step, from any thread."""
        self._loop.call_soon_threadsafe(self._sort, outputs)

    def _sort(self, outputs: list[Output]) -> None:
        public = [o for o in outputs if not o.request_id.startswith(_PRIVATE)]
        if public:
            self._steps.append(public)
            self._wake.set()
        for output in outputs:
            if output.request_id in self._private:
                self._collect(output)

    def _collect(self, output: Output) -> None:
        tokens, future = self._private[output.request_id]
        tokens += output.tokens
        if output.finish is None:
            return
        del self._private[output.request_id]
        if future.done():
            return
        if output.finish in (Finish.LENGTH, Finish.STOP):
            future.set_result(tuple(tokens))
        else:
            future.set_exception(EngineError(f"it ended as {output.finish}: {output.reason}"))

    def private(self) -> tuple[str, asyncio.Future[tuple[int, ...]]]:
        """A new request id, and its tokens once it is done."""
        request_id = f"{_PRIVATE}{next(self._numbers)}"
        future: asyncio.Future[tuple[int, ...]] = self._loop.create_future()
        self._private[request_id] = ([], future)
        return request_id, future

    def drop(self, request_id: str) -> None:
        """Forget a private request; what still comes of it is dropped."""
        self._private.pop(request_id, None)

    def end(self) -> None:
        """Whoever reads has had the last; from any thread."""
        self._loop.call_soon_threadsafe(self._replace_reader)

    def _replace_reader(self) -> int:
        self._readers += 1
        self._wake.set()
        return self._readers

    async def steps(self) -> AsyncIterator[list[Output]]:
        """The outputs of every step, from the oldest that nobody took, until replaced."""
        me = self._replace_reader()
        while me == self._readers:
            if self._steps:
                yield self._steps.pop(0)
                continue
            self._wake.clear()
            await self._wake.wait()
