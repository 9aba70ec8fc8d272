"""A scale operation that can fail before its commit without harm: vLLM's state machine, guarded.

vLLM's engine core lets every exception of its operation end the engine. Here one that comes before
the commit undoes the operation: the rank serves on and can scale again at once.
"""

from __future__ import annotations

import logging
import time
from enum import StrEnum
from typing import Any, Protocol

from dynamo_elastic.engine.vllm.elastic.meeting import GivenUp
from dynamo_elastic.errors import IllegalTransition

_log = logging.getLogger(__name__)
_LOOK_EVERY_S = 0.05


class Stage(StrEnum):
    """How far an operation is on one rank."""

    PREPARING = "preparing"
    READY = "ready"
    COMMITTED = "committed"
    """It only goes forward; an exception is a fault of the engine."""
    GIVEN_UP = "given up"
    DONE = "done"
    LEFT = "left"
    """This rank is out of the group, and lives on."""


MOVES: dict[Stage, frozenset[Stage]] = {
    Stage.PREPARING: frozenset({Stage.READY, Stage.COMMITTED, Stage.GIVEN_UP}),
    Stage.READY: frozenset({Stage.COMMITTED, Stage.GIVEN_UP}),
    Stage.COMMITTED: frozenset({Stage.DONE, Stage.LEFT}),
    Stage.GIVEN_UP: frozenset(),
    Stage.DONE: frozenset(),
    Stage.LEFT: frozenset(),
}
OVER = frozenset({Stage.GIVEN_UP, Stage.DONE, Stage.LEFT})


class Machine(Protocol):
    """vLLM's ElasticEPScalingState, as far as we need it."""

    worker_type: str
    commit_requested: bool

    def progress(self) -> bool: ...

    def is_complete(self) -> bool: ...

    def is_ready_for_switch(self) -> bool: ...


class Undo(Protocol):
    """What a guarded operation needs of its rank."""

    def failure(self) -> str | None:
        """Why the operation is over for everybody, if it is; looked at now and then."""
        ...

    def undo(self, reason: str) -> None:
        """Nothing of the operation is left on this rank, and the others know that it is over."""
        ...


class Guard:
    """Drives a Machine; `parks` says whether a rank that leaves lives on."""

    def __init__(self, machine: Machine, rank: Undo, *, parks: bool = False) -> None:
        self._machine = machine
        self._rank = rank
        self._parks = parks
        self._looked_s = 0.0
        self.stage = Stage.PREPARING
        self.reason = ""

    def move(self, stage: Stage) -> None:
        """Raises IllegalTransition."""
        if stage not in MOVES[self.stage]:
            raise IllegalTransition("scale operation of a rank", self.stage, stage)
        self.stage = stage

    def commit(self) -> None:
        """From here on it only goes forward."""
        self.move(Stage.COMMITTED)

    def give_up(self, reason: str) -> Stage:
        """Undo the operation if it can be; the stage that it is in after that. Idempotent."""
        if Stage.GIVEN_UP in MOVES[self.stage]:
            self.move(Stage.GIVEN_UP)
            self.reason = reason
            _log.warning("scale operation given up: %s", reason)
            self._rank.undo(reason)
        return self.stage

    def progress(self, step: Any) -> bool:
        """One look at the operation; `step` is vLLM's own. Raises what `step` raises after the
        commit, and nothing before it."""
        if self.stage in OVER:
            return True
        try:
            self._look()
            moved: bool = step()
        except Exception as exc:
            if self.stage is Stage.COMMITTED:
                raise
            self.give_up(exc.reason if isinstance(exc, GivenUp) else f"{exc!r}"[:300])
            return True
        self._follow()
        return moved

    def _look(self) -> None:
        now_s = time.monotonic()
        if self.stage is Stage.COMMITTED or now_s - self._looked_s < _LOOK_EVERY_S:
            return
        self._looked_s = now_s
        failure = self._rank.failure()
        if failure is not None:
            raise GivenUp(failure)

    def _follow(self) -> None:
        if self.stage is Stage.PREPARING and self._machine.is_ready_for_switch():
            self.move(Stage.READY)
        if self.stage is Stage.COMMITTED and self._machine.is_complete():
            leaves = self._machine.worker_type == "removing"
            self.move(Stage.LEFT if leaves and self._parks else Stage.DONE)
