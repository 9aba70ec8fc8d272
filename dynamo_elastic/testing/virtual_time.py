"""An asyncio loop whose clock jumps: a test that waits an hour takes no time and never varies."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_LOOK_EVERY = 64


class _JumpingSelector(selectors.SelectSelector):
    """Where the loop would sleep, move its clock on instead."""

    now_s = 0.0
    _calls = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("deadlock: every task waits and no timer is set")
        self.now_s += max(timeout, 0.0)
        # Nothing comes from outside but a signal: looking for it now and then is enough.
        self._calls += 1
        return super().select(0) if self._calls % _LOOK_EVERY == 0 else []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """For tasks that talk to nothing outside the process. `time()` starts at 0."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self.started_s = time.time()

    def time(self) -> float:
        return self._jumping.now_s


def wall_clock() -> float:
    """The idea that the running VirtualTimeLoop has of time.time()."""
    loop = asyncio.get_running_loop()
    started_s = loop.started_s if isinstance(loop, VirtualTimeLoop) else time.time() - loop.time()
    return started_s + loop.time()


def run(main: Coroutine[Any, Any, T]) -> T:
    """asyncio.run() in virtual time. Raises RuntimeError if the tasks wait for each other."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
