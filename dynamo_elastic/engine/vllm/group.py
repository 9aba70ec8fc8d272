"""A vLLM rank that shares experts: what is asked of its group, and how far its next epoch is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from dynamo_elastic.engine.vllm.epochs import Membership
from dynamo_elastic.errors import EngineError, IllegalTransition
from dynamo_elastic.types import Epoch, Rank


@dataclass(frozen=True, slots=True)
class Summons:
    """What rank 0 prepares: a group of `size`. `commits` once it is ready to switch."""

    operation: str
    size: int
    commits: bool


class RankGroup(Protocol):
    """vLLM's elastic group, as one of its ranks. Calls raise EngineError; one that is cancelled is
    undone. The same `prepare` and `commit` are made on every rank that serves, each in its process.
    """

    @property
    def rank(self) -> Rank:
        """Of this process in its group; if it is in none, the rank that it was or booted as."""
        ...

    @property
    def size(self) -> int:
        """Ranks of the group in force here; 0 while this rank is in none."""
        ...

    async def prepare(self, size: int) -> None:
        """All of the next group that can be made while this one serves; returns when every rank of
        it is ready. Of a rank that leaves: when those who stay are. Does nothing if the group has
        that size by now, since it does without ranks that died."""
        ...

    async def attach(self, rank: Rank, size: int) -> Mapping[str, float]:
        """This process, which is in no group, is ready to serve as `rank` in the one of `size` that
        the others prepare; returns the seconds of each part."""
        ...

    async def commit(self) -> None:
        """The prepared group is in force, and serves; or this rank has left. Raises EngineError if
        it was undone: the group before it serves."""
        ...

    async def serving(self) -> None:
        """Of a rank that attached: return once the others have committed."""
        ...

    async def give_up(self, reason: str) -> None:
        """What is being prepared, or is, is over on all ranks. Idempotent."""
        ...

    async def withdraw(self, reason: str) -> bool:
        """give_up() of a commit that not every rank has come to yet, for all ranks: one of them
        that comes now finds it over. False if all have come: then it is made."""
        ...

    def summons(self) -> Summons | None:
        """The operation that rank 0 is at; None if there is none. Raises EngineError if its store
        does not answer."""
        ...

    async def released(self) -> None:
        """Of a rank that has left: return once no peer maps its memory, and it is unmapped."""
        ...

    async def digest(self) -> str:
        """Of all weights that every rank has alike, as they lie on this rank's GPU."""
        ...


class Stage(StrEnum):
    """How far an epoch is on one rank."""

    OPEN = "open"
    PREPARING = "preparing"
    READY = "ready"
    COMMITTING = "committing"
    IN_FORCE = "in force"
    OVER = "over"


_S = Stage
STAGE_MOVES: Mapping[Stage, frozenset[Stage]] = {
    _S.OPEN: frozenset({_S.PREPARING, _S.READY, _S.OVER}),
    _S.PREPARING: frozenset({_S.READY, _S.OVER}),
    _S.READY: frozenset({_S.COMMITTING, _S.OVER}),
    _S.COMMITTING: frozenset({_S.IN_FORCE, _S.OVER}),
    _S.IN_FORCE: frozenset(),
    _S.OVER: frozenset(),
}
"""COMMITTING ends as OVER if the ranks voted for the group that they had."""


class GroupEpochs:
    """Which epoch is in force on this rank, and which one is on its way."""

    def __init__(self) -> None:
        self.current: Membership | None = None
        self.pending: Membership | None = None
        """Not in force, not over."""
        self.stage = Stage.OVER
        """Of the newest epoch that was open here."""
        self._floor = Epoch(0)
        """Lower epochs are over."""

    def open(self, member: Membership) -> bool:
        """`member` is pending; False if it was, or is in force. The caller has ended what was
        pending before. Raises EngineError for an epoch that is over, or in force as another place.
        """
        if member in (self.current, self.pending):
            return False
        if self.current is not None and member.epoch <= self.current.epoch:
            raise EngineError(
                f"epoch {member.epoch} can't be opened: {self.current.epoch} is in force"
            )
        if member.epoch < self._floor:
            raise EngineError(f"epoch {member.epoch} can't be opened: it is over")
        self.pending, self.stage, self._floor = member, Stage.OPEN, member.epoch
        return True

    def move(self, stage: Stage) -> None:
        """Of the pending epoch. Raises IllegalTransition."""
        if stage not in STAGE_MOVES[self.stage]:
            raise IllegalTransition("epoch of a rank", self.stage, stage)
        self.stage = stage
        if stage is Stage.IN_FORCE:
            self.current, self.pending = self.pending, None
        elif stage is Stage.OVER and self.pending is not None:
            self._floor = max(self._floor, Epoch(self.pending.epoch + 1))
            self.pending = None

    def is_in_force(self, epoch: Epoch) -> bool:
        return self.current is not None and self.current.epoch == epoch

    def expect(self, epoch: Epoch) -> Membership:
        """The pending place of `epoch`. Raises EngineError if that is not pending."""
        if self.pending is None or self.pending.epoch != epoch:
            raise EngineError(f"epoch {epoch} is not open here")
        return self.pending

    def end(self, epoch: Epoch) -> None:
        """`epoch` and lower ones are over, should they not be in force."""
        self._floor = max(self._floor, Epoch(epoch + 1))

    def left(self) -> None:
        """This rank is in no group."""
        self.current = None
