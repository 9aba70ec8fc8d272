"""The step loop: one rank in lockstep with its group, from step to step and from epoch to epoch.

It owns the main thread. Other threads put functions into `calls`, which run between two steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from dynamo_elastic.engine.base import EngineState, Finish, Output, Request, SwitchReport
from dynamo_elastic.engine.reference.calls import CallQueue
from dynamo_elastic.engine.reference.device import Executor
from dynamo_elastic.engine.reference.membership import (
    ControlRecord,
    Membership,
    all_ready,
    decode_records,
    encode_record,
    placement_digest,
)
from dynamo_elastic.engine.reference.sampling import sample
from dynamo_elastic.engine.reference.scheduler import Batch, Chunk, Scheduler
from dynamo_elastic.errors import EngineError, PeerLost
from dynamo_elastic.failpoints import failpoint
from dynamo_elastic.topology import Topology
from dynamo_elastic.types import Epoch, Rank

IDLE_S = 0.01
"""How long an idle rank waits for something to do before the next round."""

_FIRST_ROUND_TIMEOUT_S = 60.0
"""A joiner has seen the decision; the ranks in force switch when all of them have."""

EXPERTS_AWAITED_S = 30.0
"""Experts that were lost with their rank are read from disk; for so long requests wait for that."""

MOVED_REQUESTS = "requests go on elsewhere:"
"""Begins the log message that lists them."""

_log = logging.getLogger(__name__)


class StepLoop:
    """Steps of one rank. Attributes may be read by any thread; the loop's thread writes them."""

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        emit: Callable[[list[Output]], None],
        *,
        peer_timeout_s: float,
        experts_awaited_s: float = EXPERTS_AWAITED_S,
    ) -> None:
        self.current: Membership | None = None
        self.pending: Membership | None = None
        self.old: Membership | None = None
        """The group before `current`; kept until a step of `current` was right, or, by a rank
        that left, until it is told to disconnect."""
        self.step = 0
        self.draining = False
        self.scheduler = scheduler
        self.calls = CallQueue()
        """What other threads have run here, between two steps."""
        self._executor = executor
        self._emit = emit
        self._peer_timeout_s = peer_timeout_s
        self._experts_awaited_s = experts_awaited_s
        self._incomplete_since_s: float | None = None
        self._switched: dict[Epoch, Future[SwitchReport]] = {}
        self._go = False
        self._commit = Epoch(0)
        self._round_ended_s = time.monotonic()
        self._over = False
        self._asked: dict[str, Future[NDArray[np.float32]]] = {}
        """Who wants to see the logits after a request's prompt, by its id."""

    @property
    def state(self) -> EngineState:
        if self.current is not None and (self.current.proven or self.old is not None):
            return EngineState.SERVING
        if self.current is not None or self.pending is not None:
            return EngineState.JOINING
        return EngineState.LEFT if self.old is not None else EngineState.ATTACHED

    def run(self) -> None:
        """Step until detach()."""
        while not self._over:
            # An idle rank waits for something to come; a busy one takes what is there.
            busy = self._go or self._commit or self._works
            self.calls.run(wait_s=0.0 if self.current is not None and busy else IDLE_S)
            try:
                self.round()
            except PeerLost:
                self._step_out("its group was closed")

    def round(self) -> None:
        """One round of the group in force: hear what all say, then do what was announced. Raises
        PeerLost if the group was closed."""
        if self.current is None:
            if self.pending is not None and self.pending.may_be_entered:
                self._enter(self.pending)
            return
        current = self.current
        records = self._control(current)
        current.agree(records)
        if current.rank in current.masked:
            self._step_out(f"its peers masked it: {sorted(records)}")
            return
        if self._first_round and current.alone:
            self._step_out("nobody else came into it")
            return
        self._look_for_experts(current)
        commit = max(r.commit for r in records.values())
        go = any(r.go for r in records.values())
        self._announce(current, records)
        if commit > current.epoch:
            self._switch(commit)
            return
        if self.pending is not None and self.pending.withdrawn:
            # All have heard that this rank is not ready, and nobody had announced the switch.
            self._close_pending()
        if go:
            self._step(current)
        self._round_ended_s = time.monotonic()

    def _control(self, current: Membership) -> dict[Rank, ControlRecord]:
        record = ControlRecord(
            work=self._works or not current.proven,
            go=self._go,
            ready=self._ready_epoch(current),
            commit=self._commit,
            placement=placement_digest(current.installed),
            masked=tuple(sorted(current.masked | current.group.masked)),
        )
        timeout_s = _FIRST_ROUND_TIMEOUT_S if self._first_round else self._peer_timeout_s
        return decode_records(current.group.control(encode_record(record), timeout_s=timeout_s))

    @property
    def _first_round(self) -> bool:
        """True of a joiner that waits for the ranks in force to switch to its group."""
        return self.current is not None and not self.current.proven and self.old is None

    def _ready_epoch(self, current: Membership) -> Epoch:
        """The pending epoch, once it is decided and nobody would have to wait for a joiner."""
        pending = self.pending
        if pending is None or not pending.may_be_entered:
            return current.epoch
        retained, _ = pending.shared_with(current)
        joiners = [Rank(r) for r in range(pending.group.world_size) if r not in retained]
        return pending.epoch if pending.all_here(joiners) else current.epoch

    def _announce(self, current: Membership, records: dict[Rank, ControlRecord]) -> None:
        """What to do in the next round, from what all said in this one."""
        self._go = any(r.work for r in records.values())
        self._commit = Epoch(0)
        if self.pending is not None:
            retained = [r for r in current.shared_with(self.pending)[0] if r not in current.masked]
            if all_ready(records, retained, self.pending.epoch):
                self._commit = self.pending.epoch

    def _step(self, current: Membership) -> None:
        """One step. If a peer was lost in it, nothing happened: the same rows run again."""
        if not current.proven:
            failpoint("engine.before_first_step")
        # Without all experts in lockstep with the others, but for nobody.
        batch = Batch([], []) if current.lost_experts else self.scheduler.plan()
        result = self._executor.step(batch.rows, current)
        if result.lost:
            _log.warning("step discarded: lost ranks %s", sorted(current.group.masked))
            return
        tokens = [_sample(c, result.logits) if c.samples else None for c in batch.chunks]
        for chunk in (c for c in batch.chunks if c.samples):
            asked = self._asked.pop(chunk.sequence.request.request_id, None)
            if asked is not None:
                asked.set_result(_logits_of(chunk, result.logits))
        self.step += 1
        self._send(self.scheduler.commit(batch, tokens))
        if not current.proven:
            self._prove(current)

    def _prove(self, current: Membership) -> None:
        """The first step of a new group was right: the old one is not needed any more."""
        current.proven = True
        now = time.monotonic()
        gap_s = now - self._round_ended_s if self.old is not None else 0.0
        if self.old is not None:
            self.old.group.close()
            self.old = None
        report = SwitchReport(current.epoch, gap_s, now - current.decided_s)
        self.switched(current.epoch).set_result(report)
        self._switched = {current.epoch: self._switched[current.epoch]}
        _log.info("epoch %d in force, gap %.1f ms", current.epoch, gap_s * 1e3)

    def _switch(self, epoch: Epoch) -> None:
        """All ranks of the group in force do this after the same round."""
        if self.pending is not None and self.pending.epoch == epoch:
            failpoint("engine.before_switch")
            self.old = self.current
            self._enter(self.pending)
            failpoint("engine.after_switch")
        else:
            self.old, self.current = self.current, None
            self._send(self.scheduler.end(Finish.MOVED, "the rank left its group"))

    def _enter(self, pending: Membership) -> None:
        self._executor.enter(pending.group)
        self.current, self.pending = pending, None
        # All ranks of a new group run a step at once: it is what proves the group.
        self._go, self._commit = True, Epoch(0)

    def _step_out(self, reason: str) -> None:
        """Go on without a group; what ran here may be tried elsewhere."""
        _log.error("rank leaves its group: %s", reason)
        if self.current is not None and not self.current.proven:
            # Whoever waits for this switch would wait to the end of its own time.
            gone = EngineError(f"the rank left the group of epoch {self.current.epoch}: {reason}")
            waited_for = self.switched(self.current.epoch)
            if not waited_for.done():
                waited_for.set_exception(gone)
        for membership in (self.current, self.old):
            if membership is not None:
                membership.group.close()
        self.current = self.old = None
        if self.pending is not None and self.pending.withdrawn:
            self._close_pending()
        self._send(self.scheduler.end(Finish.FAILED, f"retry: the rank left its group ({reason})"))

    @property
    def _works(self) -> bool:
        """There are rows to compute, and every expert to do it with."""
        whole = self.current is None or not self.current.lost_experts
        return self.scheduler.busy and whole

    def _look_for_experts(self, current: Membership) -> None:
        """While experts are lost requests wait; when they do not come back, they end."""
        if not current.lost_experts:
            self._incomplete_since_s = None
        elif self._incomplete_since_s is None:
            _log.error("experts %s are lost with their rank", list(current.lost_experts))
            self._incomplete_since_s = time.monotonic()
        elif self._gave_up_experts:
            reason = f"retry: experts {list(current.lost_experts)} were lost with their rank"
            self._send(self.scheduler.end(Finish.FAILED, reason))

    @property
    def _gave_up_experts(self) -> bool:
        since_s = self._incomplete_since_s
        return since_s is not None and time.monotonic() - since_s >= self._experts_awaited_s

    def _send(self, outputs: list[Output]) -> None:
        moved = [o.request_id for o in outputs if o.finish is Finish.MOVED]
        if moved:
            _log.info("%s %s", MOVED_REQUESTS, " ".join(moved))
        if outputs:
            self._emit(outputs)

    def switched(self, epoch: Epoch) -> Future[SwitchReport]:
        """Done once a step of `epoch`'s group was right."""
        future = self._switched.setdefault(epoch, Future())
        # Running futures can't be cancelled by those who wait for them.
        if not future.running() and not future.done():
            future.set_running_or_notify_cancel()
        return future

    # What follows is run through `calls`.

    def submit(self, request: Request) -> None:
        """Queue a generation. Raises EngineError if this rank takes none."""
        if self.draining:
            raise EngineError("the rank drains; send the request to another worker")
        self.submit_always(request)

    def submit_always(self, request: Request) -> None:
        """As submit(), on a draining rank too."""
        if self.current is None:
            raise EngineError(f"the rank serves nobody: it is {self.state.value}")
        if self.current.lost_experts and self._gave_up_experts:
            raise EngineError(
                f"experts {list(self.current.lost_experts)} were lost with their rank; retry later"
            )
        self.scheduler.submit(request)

    def logits(self, request: Request) -> Future[NDArray[np.float32]]:
        """As submit_always(); the logits after its prompt, once a step has computed them."""
        self.submit_always(request)
        asked = self._asked[request.request_id] = Future[NDArray[np.float32]]()
        return asked

    def forget_logits(self, request_id: str) -> None:
        """Nobody waits for them any more."""
        self._asked.pop(request_id, None)

    def end(self, finish: Finish, *, longer_than: int) -> int:
        """End every generation with more than `longer_than` tokens to go; returns how many."""
        outputs = self.scheduler.end(finish, longer_than=longer_than)
        self._send(outputs)
        return len(outputs)

    @property
    def over(self) -> bool:
        """It was detached: no step is made any more, and no call taken."""
        return self._over

    def detach(self) -> None:
        """Close the group that this rank left; run() ends. Raises EngineError of a rank that is in
        a group, or about to be."""
        if self.state not in (EngineState.ATTACHED, EngineState.LEFT):
            raise EngineError(f"the rank is {self.state.value}: it has to leave its group first")
        if self.old is not None:
            self.old.group.close()
            self.old = None
        self._over = True

    def cancel(self, request_id: str) -> None:
        self._send(self.scheduler.cancel(request_id))

    def set_pending(self, membership: Membership) -> None:
        """Make a connected group the next one. Raises EngineError while there is another."""
        if self.pending is not None:
            raise EngineError(f"epoch {self.pending.epoch} is pending: abort it first")
        self.pending = membership

    def withdraw(self, epoch: Epoch) -> None:
        """Begin to drop the pending group of `epoch` or older. It is `pending` no longer when that
        is done: dropped, or in force, if the switch had been announced."""
        if self.pending is None or self.pending.epoch > epoch:
            return
        if self.current is not None and self.pending.may_be_entered:
            # Another rank may have heard that we are ready: the next round takes that back.
            self.pending.withdrawn = True
        else:
            self._close_pending()

    def _close_pending(self) -> None:
        if self.pending is not None:
            self.pending.group.close()
            self.pending = None

    def decide(self, epoch: Epoch) -> None:
        """The switch to the pending group of `epoch` may happen. Raises EngineError if there is no
        such group; one that is in force is fine."""
        if self.current is not None and self.current.epoch == epoch:
            return
        if self.pending is None or self.pending.epoch != epoch or self.pending.withdrawn:
            raise EngineError(f"epoch {epoch} is not connected here")
        self.pending.decided_s = self.pending.decided_s or time.monotonic()

    def install(self, topology: Topology) -> None:
        """Route by the placement of `topology` once every rank of its group has it."""
        for membership in (self.current, self.pending):
            if membership is not None and membership.epoch == topology.epoch:
                if membership.topology.worker_ids != topology.worker_ids:
                    raise EngineError(f"epoch {topology.epoch} has other members than that")
                if placement_digest(membership.installed) != placement_digest(topology):
                    membership.installed = topology
                return
        raise EngineError(f"epoch {topology.epoch} is neither in force nor pending")

    def disconnect(self, epoch: Epoch) -> None:
        """Close the group before the one in force, if it is older than `epoch`."""
        if self.old is not None and self.old.epoch < epoch:
            self.old.group.close()
            self.old = None


def _logits_of(chunk: Chunk, logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """After the last row of `chunk`; `logits` are those of the whole tile."""
    last: NDArray[np.float32] = logits[chunk.first + chunk.count - 1]
    return last


def _sample(chunk: Chunk, logits: NDArray[np.float32]) -> int:
    """The token after `chunk`; `logits` are those of the whole tile."""
    request = chunk.sequence.request
    return sample(
        _logits_of(chunk, logits),
        seed=request.seed,
        position=len(chunk.sequence.tokens),
        temperature=request.temperature,
    )
