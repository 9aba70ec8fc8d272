"""Epochs of a replica, which shares nothing with its peers: a switch is a word. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_elastic.errors import EngineError
from dynamo_elastic.types import Epoch, Rank


@dataclass(frozen=True, slots=True)
class Membership:
    """A replica's place in the topology of one epoch."""

    epoch: Epoch
    rank: Rank
    world_size: int


class ReplicaEpochs:
    """Which epoch is in force here, and which one is open beside it."""

    def __init__(self) -> None:
        self.current: Membership | None = None
        self.pending: Membership | None = None
        self._floor = Epoch(0)
        """Lower epochs are over."""

    def open(self, member: Membership) -> None:
        """It can be decided; older ones that are not in force are forgotten. Idempotent. Raises
        EngineError for an epoch that is over or in force as another place."""
        if member in (self.current, self.pending):
            return
        if self.current is not None and member.epoch <= self.current.epoch:
            raise EngineError(
                f"epoch {member.epoch} can't be opened: {self.current.epoch} is in force"
            )
        if member.epoch < self._floor:
            raise EngineError(f"epoch {member.epoch} can't be opened: it is over")
        self.pending, self._floor = member, member.epoch

    def decide(self, epoch: Epoch) -> None:
        """It is in force, at once. Idempotent. Raises EngineError if it is not open."""
        if self.pending is not None and self.pending.epoch == epoch:
            self.current, self.pending = self.pending, None
        elif self.current is None or self.current.epoch != epoch:
            raise EngineError(f"epoch {epoch} is not open here")

    def check_in_force(self, epoch: Epoch) -> None:
        """Raises EngineError unless it is."""
        if self.current is None or self.current.epoch != epoch:
            raise EngineError(f"epoch {epoch} is not decided here")

    def abort(self, epoch: Epoch) -> None:
        """It and older ones that are not in force are over. Idempotent. Raises EngineError if it is
        in force."""
        if self.current is not None and self.current.epoch == epoch:
            raise EngineError(f"epoch {epoch} is in force")
        self._floor = max(self._floor, Epoch(epoch + 1))
        if self.pending is not None and self.pending.epoch <= epoch:
            self.pending = None
