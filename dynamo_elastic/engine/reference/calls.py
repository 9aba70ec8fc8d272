"""Functions on their way into the step loop's thread."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from dynamo_elastic.errors import ElasticError

T = TypeVar("T")


class CallQueue:
    """Any thread puts functions in; one thread runs them when it has time."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()

    def put(self, function: Callable[[], T]) -> Future[T]:
        """Have `function` run. ElasticErrors go to the future; anything else is a fault of this
        program and goes to the thread that runs it."""
        future: Future[T] = Future()
        self._queue.put((function, future))
        return future

    def run(self, *, wait_s: float) -> None:
        """Run all that is there; wait up to `wait_s` for the first."""
        try:
            function, future = self._queue.get(wait_s > 0, wait_s)
            while True:
                _run(function, future)
                function, future = self._queue.get_nowait()
        except queue.Empty:
            return


def _run(function: Callable[[], Any], future: Future[Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except ElasticError as exc:
        future.set_exception(exc)
    else:
        future.set_result(result)
