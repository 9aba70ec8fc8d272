"""A vLLM rank that shares experts with others, as an Engine: vLLM prepares in CONNECT, and commits
when the epoch is decided.

Between the two every rank is ready and the old group serves, so an operation that is given up, for
whatever reason, costs nothing. Rank 0 keeps vLLM's store and handshake and never leaves. A rank
that leaves is told nothing of the next topology; once it is drained it does what rank 0 calls for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from dynamo_elastic.dynamo.vllm_service import Replica, VllmEngine
from dynamo_elastic.engine.base import Attach, EngineState, EngineStatus, SwitchReport
from dynamo_elastic.engine.vllm.epochs import Membership
from dynamo_elastic.engine.vllm.group import GroupEpochs, RankGroup, Stage
from dynamo_elastic.engine.vllm.leave import leave
from dynamo_elastic.engine.vllm.requests import Requests
from dynamo_elastic.errors import EngineError
from dynamo_elastic.topology import Topology
from dynamo_elastic.types import Epoch, Rank, WorkerId

_LEAVE_TIMEOUT_S = 20.0
"""For a leaver to be out of its group, and then for it to let go of its memory."""
_GIVE_UP_TIMEOUT_S = 10.0
_log = logging.getLogger(__name__)


class GroupEngine(VllmEngine):
    """One attached rank (see engine.base.Engine). Experts are vLLM's to place and to move, so
    topologies name none, and the calls that move weights have nothing to do."""

    def __init__(
        self,
        attach: Attach,
        group: RankGroup,
        replica: Replica,
        requests: Requests,
        kv_blocks: int,
        detach: Callable[[], Awaitable[None]],
        *,
        leave_timeout_s: float = _LEAVE_TIMEOUT_S,
    ) -> None:
        """`detach` brings the process back to where it polls for an identity; see detach()."""
        super().__init__(attach, replica, requests, kv_blocks)
        self._group = group
        self._detach = detach
        self._leave_timeout_s = leave_timeout_s
        self._epochs: GroupEpochs = GroupEpochs()  # type: ignore[assignment]
        self._was_member = False
        self._work: asyncio.Future[None] | None = None
        """The preparation or the commit of the pending epoch, the last one that there was."""
        self._following: asyncio.Task[None] | None = None
        self._switch = SwitchReport(Epoch(0), 0.0, 0.0)

    def _state(self) -> EngineState:
        if self._was_member and not self._group.size:
            return EngineState.LEFT
        return super()._state()

    async def status(self) -> EngineStatus:
        """As a replica's; `masked` are ranks of the epoch in force without which the group has gone
        on by itself, dead or alive."""
        said, size = await super().status(), self._group.size
        if not size or self._epochs.pending is not None:
            return said
        return replace(said, masked=tuple(map(Rank, range(size, said.world_size))))

    async def open_epoch(self, epoch: Epoch, rank: Rank, world_size: int) -> dict[str, Any]:
        """Raises EngineError for another rank than it has in its group."""
        if self._group.size and rank != self._group.rank:
            raise EngineError(
                f"this engine is rank {self._group.rank} of its group, and can't be {rank}"
            )
        pending = self._epochs.pending
        if pending is not None and pending.epoch < epoch:
            await self._end_pending(f"epoch {epoch} supersedes {pending.epoch}")
        self._epochs.open(Membership(epoch, rank, world_size))
        return {}

    async def connect_epoch(
        self, topology: Topology, endpoints: dict[WorkerId, dict[str, Any]], *, timeout_s: float
    ) -> None:
        """Everything but the switch itself: groups, buffer, weights and graphs of the next group.
        What does not end in time is given up. Asked again, it goes on waiting."""
        if self._epochs.is_in_force(topology.epoch):
            return
        member = self._epochs.expect(topology.epoch)
        if self._epochs.stage is Stage.OPEN:
            self._epochs.move(Stage.PREPARING)
            self._work = asyncio.ensure_future(self._prepare(member))
        if self._epochs.stage is Stage.PREPARING and self._work is not None:
            try:
                await asyncio.wait_for(asyncio.shield(self._work), timeout_s)
            except TimeoutError:
                reason = f"rank {member.rank} was not ready in {timeout_s:g} s"
                await self._end_pending(reason)
                raise EngineError(reason) from None

    async def _prepare(self, member: Membership) -> None:
        """The group of `member` is ready, or the epoch is over."""
        try:
            if not self._group.size:
                seconds = await self._group.attach(member.rank, member.world_size)
                _log.info("ready to join as rank %d: %s", member.rank, dict(seconds))
            elif self._group.size != member.world_size:
                if self._group.size > member.world_size and not self._requests.running:
                    # Whoever died while nobody had work is found out by a step, and done without.
                    await self._replica.probe()
                await self._group.prepare(member.world_size)
            self._epochs.move(Stage.READY)
        except BaseException:
            self._epochs.move(Stage.OVER)
            raise

    async def check(self, digests: dict[str, str]) -> dict[str, Any]:
        """The weights that ranks have alike are those of the rank that it is compared with."""
        return {"probe": await self._group.digest()}

    async def decide(self, epoch: Epoch) -> None:
        if self._epochs.is_in_force(epoch) or self._commits(epoch):
            return
        member = self._epochs.expect(epoch)
        if self._epochs.stage is not Stage.READY:
            raise EngineError(f"epoch {epoch} is {self._epochs.stage} here, and can't be decided")
        self._epochs.move(Stage.COMMITTING)
        self._work = asyncio.ensure_future(self._commit(member))
        # Who withdraws it may never ask how it ended.
        self._work.add_done_callback(lambda work: work.cancelled() or work.exception())

    async def _commit(self, member: Membership) -> None:
        """`member` is in force, or over: then the ranks went on in the group that they had."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            if not self._group.size:
                await self._group.serving()
            elif self._group.size != member.world_size:
                await self._group.commit()
        except BaseException:
            self._epochs.move(Stage.OVER)
            raise
        elapsed_s = loop.time() - began_s
        # vLLM does not say how long it paused; it was no longer than all of the commit.
        self._switch = SwitchReport(member.epoch, elapsed_s, elapsed_s)
        self._was_member = True
        self._epochs.move(Stage.IN_FORCE)

    async def wait_switched(self, epoch: Epoch, *, timeout_s: float) -> SwitchReport:
        if self._commits(epoch) and self._work is not None:
            try:
                await asyncio.wait_for(asyncio.shield(self._work), timeout_s)
            except TimeoutError:
                raise EngineError(f"no switch to epoch {epoch} in {timeout_s:g} s") from None
        if not self._epochs.is_in_force(epoch):
            raise EngineError(f"epoch {epoch} is not in force here")
        return self._switch

    def _commits(self, epoch: Epoch) -> bool:
        pending = self._epochs.pending
        committing = self._epochs.stage is Stage.COMMITTING
        return committing and pending is not None and pending.epoch == epoch

    async def abort_epoch(self, epoch: Epoch) -> None:
        """Raises EngineError if it is in force, or if all ranks have come to switch to it."""
        pending, reason = self._epochs.pending, f"epoch {epoch} was aborted"
        # Asked twice: what it commits may fail by itself while it is withdrawn.
        withdrawn = not self._commits(epoch) or await self._group.withdraw(reason)
        if self._epochs.is_in_force(epoch) or (self._commits(epoch) and not withdrawn):
            raise EngineError(f"epoch {epoch} is in force, or about to be")
        if pending is not None and pending.epoch <= epoch:
            await self._end_pending(reason)
        self._epochs.end(epoch)

    async def _end_pending(self, reason: str) -> None:
        """Nothing is pending: what is being committed is in force or over, all else is over."""
        work = self._work
        if self._epochs.stage is Stage.COMMITTING and work is not None:
            await asyncio.gather(asyncio.shield(work), return_exceptions=True)
        if self._epochs.pending is None:
            return
        if self._epochs.stage is Stage.PREPARING and work is not None:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        if self._epochs.pending is not None:
            self._epochs.move(Stage.OVER)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._group.give_up(reason), _GIVE_UP_TIMEOUT_S)

    async def drain(self, *, short_tokens: int, timeout_s: float) -> int:
        """As a replica's; and from then on this rank leaves when rank 0 calls for a group without
        it. Raises EngineError of rank 0, which keeps the group."""
        if self._group.rank == 0:
            raise EngineError("rank 0 keeps the group, and never leaves")
        moved = await super().drain(short_tokens=short_tokens, timeout_s=timeout_s)
        if self._following is None:
            self._following = asyncio.create_task(leave(self._group, self._epochs.left))
        return moved

    async def readmit(self) -> None:
        """Raises EngineError if this rank has left."""
        following, self._following = self._following, None
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        if self._was_member and not self._group.size:
            raise EngineError(f"rank {self._group.rank} has left its group")
        await super().readmit()

    async def detach(self) -> None:
        """Of a rank that has left, or was never in a group. Dynamo's runtime stays, unseen: what
        comes back is the same process in the same slot. Raises EngineError if it does not leave,
        or does not let go of its memory, in time."""
        if self._following is not None:
            await self._in_time(asyncio.shield(self._following), "left its group")
        if self._group.size:
            raise EngineError(f"rank {self._group.rank} is in a group: it has to leave first")
        if self._was_member:
            await self._in_time(self._group.released(), "let go of its memory")
        await self._detach()

    async def _in_time(self, act: Awaitable[None], what: str) -> None:
        try:
            await asyncio.wait_for(act, self._leave_timeout_s)
        except TimeoutError:
            raise EngineError(
                f"rank {self._group.rank} has not {what} within {self._leave_timeout_s:g} s"
            ) from None
