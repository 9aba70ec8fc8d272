"""Preparing epochs beside the step loop: groups, peers and weights. Used by one worker thread."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dynamo_elastic.comm.base import ExpertGroup
from dynamo_elastic.comm.transfer_plan import Chunk, plan_copies, plan_dense
from dynamo_elastic.engine.base import EngineState, PushReport
from dynamo_elastic.engine.reference.checkpoint import load_weights
from dynamo_elastic.engine.reference.device import Executor
from dynamo_elastic.engine.reference.kv import BLOCK_TOKENS, KvCache
from dynamo_elastic.engine.reference.loop import StepLoop
from dynamo_elastic.engine.reference.membership import Membership
from dynamo_elastic.engine.reference.model import Model, Row, no_experts
from dynamo_elastic.engine.reference.transfers import Transfers
from dynamo_elastic.errors import EngineError, PeerLost
from dynamo_elastic.failpoints import failpoint
from dynamo_elastic.topology import DISK, EMPTY, ExpertMove, Topology
from dynamo_elastic.types import Epoch, Rank, Region, WorkerId

_CALL_TIMEOUT_S = 15.0
"""For the step loop to take in what was prepared; a step may wait for a silent peer meanwhile."""

_STUCK = "the step loop is stuck in a step"

_UNUSED_TIMEOUT_S = 5.0
_POLL_S = 0.002


class Epochs:
    """The epochs of one engine, from open() to disconnect()."""

    def __init__(
        self,
        loop: StepLoop,
        executor: Executor,
        model: Model,
        scratch: KvCache,
        model_dir: Path,
        worker_id: WorkerId,
        own: Transfers,
    ) -> None:
        """`scratch` holds the context of one sequence; the steps of `loop` don't use it."""
        self._loop = loop
        self._executor = executor
        self._model = model
        self._scratch = scratch
        self._model_dir = model_dir
        self._worker_id = worker_id
        self._own = own
        self._opened: dict[Epoch, ExpertGroup] = {}
        self._proven: str | None = None
        """What probe() said of the dense weights when they had come: they stay as they are."""
        self._over = Epoch(0)
        """Epochs up to this one were aborted or superseded; one of them may still be in force."""

    def open(self, epoch: Epoch, rank: Rank, world_size: int) -> dict[str, Any]:
        """See Engine.open_epoch; interrupt() of the epoch below comes before."""
        self._refuse_old(epoch)
        self._drop(Epoch(epoch - 1))
        group = self._group(epoch)
        if group is None:
            group = self._opened[epoch] = self._executor.group(epoch, rank, world_size)
            failpoint("engine.after_open")
        if (group.rank, group.world_size) != (rank, world_size):
            raise EngineError(f"epoch {epoch} is open here as {group.rank} of {group.world_size}")
        kernels = dict(self._executor.kernels)
        return {"group": group.address, "kernels": kernels, **self._own.endpoint()}

    def _group(self, epoch: Epoch) -> ExpertGroup | None:
        """The group of `epoch`, connected or not."""
        memberships = (self._loop.pending, self._loop.current)
        connected = (m.group for m in memberships if m is not None and m.epoch == epoch)
        return self._opened.get(epoch) or next(connected, None)

    def _refuse_old(self, epoch: Epoch) -> None:
        current = self._loop.current
        floor = max(self._over + 1, current.epoch if current else 0)
        if epoch < floor and not self._in_force(epoch):
            raise EngineError(
                f"epoch {epoch} is over: it was aborted, or a newer one is open or in force"
            )

    def _in_force(self, epoch: Epoch) -> bool:
        current = self._loop.current
        serving = self._loop.state is EngineState.SERVING
        return serving and current is not None and current.epoch == epoch

    def connect(
        self,
        topology: Topology,
        endpoints: dict[WorkerId, dict[str, Any]],
        *,
        timeout_s: float,
    ) -> None:
        """See Engine.connect_epoch. After a failure the epoch can only be aborted."""
        epoch = topology.epoch
        self._refuse_old(epoch)
        if self._is_pending_or_current(epoch):
            return
        group = self._opened.get(epoch)
        if group is None:
            raise EngineError(f"epoch {epoch} is not open here")
        if topology.rank_of(self._worker_id) != group.rank:
            raise EngineError(f"{self._worker_id} has another rank in the topology")
        others = [w for w in topology.worker_ids if w != self._worker_id]
        missing = [w for w in others if w not in endpoints]
        if missing:
            raise EngineError(f"endpoints of {missing} are missing")
        addresses = {
            Rank(rank): str(endpoints[w]["group"])
            for rank, w in enumerate(topology.worker_ids)
            if w in others
        }
        if others:
            self._agree_on_kernels(topology, endpoints)
        try:
            group.connect(addresses, timeout_s=timeout_s)
        except PeerLost as exc:
            raise EngineError(
                f"epoch {epoch}: ranks {sorted(exc.ranks)} did not come: {exc}"
            ) from exc
        for worker_id in others:
            self._own.add(worker_id, endpoints[worker_id])
        membership = Membership(group, topology, self._model.shape.num_experts)
        self._in_loop(lambda: self._loop.set_pending(membership))
        del self._opened[epoch]
        failpoint("engine.after_connect")

    def _agree_on_kernels(
        self, topology: Topology, endpoints: dict[WorkerId, dict[str, Any]]
    ) -> None:
        """All ranks compute with the kernels of the first, so that a request gets the same tokens
        on each of them. Raises EngineError if this one serves with others, or has not got them."""
        first = topology.worker_ids[0]
        theirs = endpoints.get(first, {}).get("kernels", {})
        ours = dict(self._executor.kernels)
        if first == self._worker_id or theirs == ours:
            return
        if self._loop.current is not None:
            raise EngineError(f"this rank serves with kernels {ours}, {first} has {theirs}")
        self._in_loop(lambda: self._executor.adopt(theirs))

    def _in_loop(self, function: Callable[[], None]) -> None:
        try:
            self._loop.calls.put(function).result(_CALL_TIMEOUT_S)
        except TimeoutError as exc:
            raise EngineError(_STUCK, took_effect=True) from exc

    def _is_pending_or_current(self, epoch: Epoch) -> bool:
        memberships = (self._loop.pending, self._loop.current)
        return any(m is not None and m.epoch == epoch for m in memberships)

    def load(self, experts: Sequence[int]) -> PushReport:
        """See Engine.load_weights."""
        if len(experts) > self._model.weights.slots:
            raise EngineError(f"{len(experts)} experts for {self._model.weights.slots} slots")
        began = time.monotonic()
        serves = self._loop.current is not None
        for slot, expert in enumerate(experts) if serves else ():
            if expert != EMPTY:
                self._wait_unused(ExpertMove(expert, DISK, self._worker_id, slot))
        filled = load_weights(self._model_dir, self._model.weights, experts, dense=not serves)
        if not serves:
            self._proven = self.probe()
        digests = self._own.digests(filled)
        size_bytes = sum(self._region(name).size_bytes for name in filled)
        return PushReport(size_bytes, time.monotonic() - began, {self._worker_id: digests})

    def push_dense(
        self, epoch: Epoch, sources: Sequence[WorkerId], joiners: Sequence[WorkerId]
    ) -> PushReport:
        """See Engine.push_dense."""
        self._refuse_old(epoch)
        failpoint("engine.before_push")
        regions = self._own.dense_regions()
        plan = plan_dense(regions, sources, joiners, chunk_bytes=self._own.chunk_bytes)
        report = self._write([c for c in plan if c.source == self._worker_id])
        digests = self._own.digests(r.name for r in regions)
        # Beside the steps that are served a probe would take seconds.
        probe = self._proven or self.probe()
        return replace(report, digests=dict.fromkeys(joiners, digests), probe=probe)

    def push_experts(
        self, epoch: Epoch, worker_id: WorkerId, moves: Sequence[ExpertMove]
    ) -> PushReport:
        """See Engine.push_experts. Waits until no rank reads the slots that it writes."""
        self._refuse_old(epoch)
        failpoint("engine.before_push")
        chunks: list[Chunk] = []
        copies: list[tuple[WorkerId, str, str]] = []
        for move in (m for m in moves if m.from_worker == worker_id == self._worker_id):
            self._wait_unused(move)
            weights = self._model.weights
            ours, theirs = weights.slot(self._slot_of(move.expert)), weights.slot(move.to_slot)
            chunks += plan_copies(
                worker_id, move.to_worker, [(ours, theirs)], chunk_bytes=self._own.chunk_bytes
            )
            copies.append((move.to_worker, ours.name, theirs.name))
        report = self._write(chunks)
        sent = self._own.digests({name for _, name, _ in copies})
        digests: dict[WorkerId, dict[str, str]] = {}
        for target, from_slot, to_slot in copies:
            digests.setdefault(target, {})[to_slot] = sent[from_slot]
        return replace(report, digests=digests)

    def _write(self, chunks: list[Chunk]) -> PushReport:
        began = time.monotonic()
        size_bytes = self._own.write(chunks)
        links = Counter[WorkerId]()
        for chunk in chunks:
            links[chunk.target] += chunk.size_bytes
        return PushReport(size_bytes, time.monotonic() - began, links=dict(links))

    def _slot_of(self, expert: int) -> int:
        current = self._loop.current
        if current is None:
            raise EngineError("this rank is member of no group: it has no experts to send")
        held = current.topology.members[current.rank].experts
        if expert not in held:
            raise EngineError(f"{self._worker_id} does not hold expert {expert}")
        return held.index(expert)

    def _region(self, name: str) -> Region:
        try:
            return self._model.weights.arena.region(name)
        except KeyError as exc:
            raise EngineError(f"there is no region {name}") from exc

    def _wait_unused(self, move: ExpertMove) -> None:
        """Return once the group in force does not route to the slot that `move` writes.

        It does so in lockstep, so a placement that this rank routes by is one that every rank
        routes by, and the step before is over everywhere.
        """
        deadline = time.monotonic() + _UNUSED_TIMEOUT_S
        while self._used(move):
            if time.monotonic() > deadline:
                raise EngineError(
                    f"slot {move.to_slot} of {move.to_worker} is in use: every rank of the group "
                    "in force must install a placement without it first"
                )
            time.sleep(_POLL_S)

    def _used(self, move: ExpertMove) -> bool:
        current = self._loop.current
        rank = current.topology.rank_of(move.to_worker) if current else None
        if current is None or rank is None or rank in current.masked:
            return False
        return current.topology.members[rank].experts[move.to_slot] not in (EMPTY, move.expert)

    def check(self, digests: dict[str, str]) -> dict[str, Any]:
        """See Engine.check."""
        missing = [r.name for r in self._own.dense_regions() if r.name not in digests]
        if missing and self._loop.state is not EngineState.SERVING:
            raise EngineError(f"digests of {len(missing)} dense regions are missing: {missing[0]}")
        self._own.require(digests)
        if self._proven is None or not missing:
            self._proven = self.probe()
        return {"probe": self._proven}

    def probe(self) -> str:
        """Digest of the logits of one step with all experts masked, beside whatever else runs."""
        vocabulary = self._model.shape.vocab_size
        count = min(self._model.tile.batch_tokens, vocabulary, BLOCK_TOKENS)
        rows = [Row(token, token, [1]) for token in range(count)]
        with self._executor.beside():
            logits = self._model.forward(rows, self._scratch, no_experts)[: len(rows)].cpu()
        return hashlib.blake2s(logits.numpy().tobytes()).hexdigest()

    def install(self, topology: Topology, digests: dict[str, str]) -> None:
        """See Engine.install."""
        self._own.require(digests)
        self._in_loop(lambda: self._loop.install(topology))

    def interrupt(self, epoch: Epoch) -> None:
        """From any thread: `epoch` and older are over, unless in force, and nobody waits for their
        peers any more."""
        self._over = max(self._over, epoch)
        waiting = [group for e, group in list(self._opened.items()) if e <= epoch]
        if self._loop.state is EngineState.JOINING:
            # In this order: the loop makes the pending one the current one.
            memberships = (self._loop.pending, self._loop.current)
            waiting += [m.group for m in memberships if m is not None and m.epoch <= epoch]
        for group in waiting:
            group.close()

    def abort(self, epoch: Epoch) -> None:
        """See Engine.abort_epoch; interrupt() comes before."""
        self._drop(epoch)
        if self._in_force(epoch):
            raise EngineError(f"epoch {epoch} is in force")

    def _drop(self, epoch: Epoch) -> None:
        """No group of `epoch` or older is open, or pending: if the switch to one had been
        announced, it is in force."""
        for opened in [e for e in self._opened if e <= epoch]:
            self._opened.pop(opened).close()
        self._in_loop(lambda: self._loop.withdraw(epoch))
        deadline = time.monotonic() + _CALL_TIMEOUT_S
        while (pending := self._loop.pending) is not None and pending.epoch <= epoch:
            if time.monotonic() > deadline:
                raise EngineError(_STUCK, took_effect=True)
            time.sleep(_POLL_S)
        self._forget_strangers()

    def disconnect(self, epoch: Epoch) -> None:
        """See Engine.disconnect."""
        self._in_loop(lambda: self._loop.disconnect(epoch))
        self._forget_strangers()

    def close(self) -> None:
        """After the loop has ended: no group, no peer and no agent is left."""
        for group in self._opened.values():
            group.close()
        self._opened.clear()
        self._own.close()
        self._executor.close()

    def _forget_strangers(self) -> None:
        memberships = [m for m in (self._loop.current, self._loop.pending) if m is not None]
        self._own.keep_only({w for m in memberships for w in m.topology.worker_ids})
        self._in_loop(self._keep_groups)

    def _keep_groups(self) -> None:
        """In the step loop's thread: peers come and go between two steps."""
        memberships = [m for m in (self._loop.current, self._loop.pending) if m is not None]
        self._executor.keep_only([*(m.group for m in memberships), *self._opened.values()])
