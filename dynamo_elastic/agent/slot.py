"""One GPU slot: its state, who holds it, and the process in it, watched until it ends."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace

from dynamo_elastic.agent.base import SLOT_MOVES, Lease, SlotState, SlotStatus
from dynamo_elastic.agent.records import EngineRecord, ParkedRecord
from dynamo_elastic.errors import IllegalTransition, SlotLeased
from dynamo_elastic.snapshot.process import ProcessRef, open_pidfd
from dynamo_elastic.types import Epoch


class Slot:
    """SERVING and PARKING have an `engine`, PARKED and ENDING what they had before. All but the
    state machine itself is up to agent.slots; whoever changes the state holds `lock`."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.state = SlotState.FREE
        self.engine: EngineRecord | None = None
        self.parked: ParkedRecord | None = None
        self.lease: Lease | None = None
        self.starting: asyncio.Task[EngineRecord] | None = None
        self.lock = asyncio.Lock()
        self._fence = Epoch(0)
        self._pidfd: int | None = None

    def adopt(self, found: EngineRecord | ParkedRecord) -> None:
        """Of a slot that is free: what an earlier agent left in it. Its epoch is no fence: the
        deployment may have begun anew, and count from 1 again."""
        if isinstance(found, ParkedRecord):
            self.state, self.parked = SlotState.PARKED, found
        else:
            self.state, self.engine, self.lease = SlotState.SERVING, found, found.lease

    def move(self, state: SlotState) -> None:
        """Raises IllegalTransition, and stays, if the table has no such move."""
        if state not in SLOT_MOVES[self.state]:
            raise IllegalTransition(f"slot {self.number}", self.state, state)
        self.state = state

    def free(self) -> None:
        """No process is here any more. Whose the slot is, is another matter: the next one may have
        claimed it already."""
        self.move(SlotState.FREE)
        self.engine = self.parked = None

    def check(self, lease: Lease) -> None:
        """Return if `lease` holds the slot, or could. Raises SlotLeased."""
        if self.lease == lease:
            return
        if lease.epoch < self._fence:
            raise SlotLeased(
                f"slot {self.number} was leased at epoch {self._fence}, epoch {lease.epoch} is over"
            )
        if self.lease is not None:
            raise SlotLeased(f"slot {self.number} is leased to {self.lease}: stop it first")

    def claim(self, lease: Lease) -> None:
        """The slot is held by `lease`. Raises SlotLeased."""
        self.check(lease)
        self.lease, self._fence = lease, lease.epoch

    def status(self, image_id: str, now_s: float) -> SlotStatus:
        """For people and shells. `now_s`: seconds since the epoch."""
        bare = SlotStatus(self.number, image_id, state=self.state)
        if self.engine is not None:
            return replace(
                bare,
                incarnation=self.engine.incarnation,
                pid=self.engine.process.pid,
                tier=self.engine.tier.value,
                held_by=str(self.engine.lease),
                fell_through=self.engine.fell_through,
            )
        if self.parked is not None:
            return replace(
                bare,
                pid=self.parked.process.pid,
                parked_bytes=self.parked.host_bytes,
                parked_s=max(0.0, now_s - self.parked.parked_at_s),
            )
        return bare

    def watch(self, process: ProcessRef, ended: Callable[[], None]) -> None:
        """Have `ended` called when the process ends, at once if it has."""
        self.unwatch()
        self._pidfd = open_pidfd(process)
        if self._pidfd is None:
            ended()
        else:
            asyncio.get_running_loop().add_reader(self._pidfd, ended)

    def unwatch(self) -> None:
        """Idempotent."""
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
