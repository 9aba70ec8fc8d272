"""The worker side of a scale operation: one method a step."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter

from dynamo_elastic.agent.base import BOOTED, StartedEngine, Tier
from dynamo_elastic.coordinator.records import (
    CommandRecord,
    EndpointRecord,
    MemberState,
    OperationRecord,
    decode,
)
from dynamo_elastic.dynamo.base import Load
from dynamo_elastic.engine.base import Engine, EngineStatus
from dynamo_elastic.errors import (
    EngineError,
    EngineGone,
    RegistrationFailed,
    SessionLost,
    StoreError,
)
from dynamo_elastic.failpoints import failpoint
from dynamo_elastic.phases import Step
from dynamo_elastic.topology import ExpertMove, Topology
from dynamo_elastic.types import (
    NO_INCARNATION,
    Epoch,
    Incarnation,
    Rank,
    WorkerId,
)
from dynamo_elastic.worker.base import ShellParts
from dynamo_elastic.worker.engine_slot import EngineSlot
from dynamo_elastic.worker.presence import Presence
from dynamo_elastic.worker.requests import RequestDesk
from dynamo_elastic.worker.traffic import TokenMeter

log = logging.getLogger(__name__)

Payload = dict[str, Any]

KV_BLOCK_TOKENS = 16
"""What Dynamo is told that a block of the KV cache holds."""

_REFRESH_TIMEOUT_S = 10.0
"""For the switch that a new card waits for."""

_SWITCH_SHARE = 0.8
"""Of a step's time, what is waited for others: who has not switched then says so in the rest."""

_PARK_SHARE = 0.7
"""Of a step's time, what parking may take: the rest is for ending what could not be parked."""

_TOPOLOGY = TypeAdapter(Topology)
_ENDPOINTS = TypeAdapter(dict[WorkerId, dict[str, Any]])
_MOVES = TypeAdapter(tuple[ExpertMove, ...])
_WORKERS = TypeAdapter(tuple[WorkerId, ...])


class Participant:
    """Runs the steps that the coordinator commands, on this shell's engine, agent and instance.

    Steps come one at a time; a step that fails raises, and what it left behind is undone by ABORT.
    """

    def __init__(self, parts: ShellParts, presence: Presence, desk: RequestDesk) -> None:
        self._parts = parts
        self._presence = presence
        self._desk = desk
        self._slot = EngineSlot(parts, self._read)
        self._registrar_lock = asyncio.Lock()
        self._seated = False  # a topology in force has had this engine
        self._frozen = False  # as far as we know
        self._opened: Epoch | None = None  # the newest epoch that this engine has a place in
        self._card: dict[str, str] | None = None  # what Dynamo was told; None while unregistered
        self._steps: dict[Step, Callable[[CommandRecord], Awaitable[Payload]]] = {
            Step.FREEZE: self.freeze,
            Step.RESTORE: self.restore,
            Step.OPEN: self.open,
            Step.CONNECT: self.connect,
            Step.LOAD: self.load_weights,
            Step.STREAM: self.stream,
            Step.CHECK: self.check,
            Step.DRAIN: self.drain,
            Step.PUSH_EXPERTS: self.push_experts,
            Step.INSTALL: self.install,
            Step.SWITCH: self.switch,
            Step.WITHDRAW: self.withdraw,
            Step.CANARY: self.canary,
            Step.SERVE: self.serve,
            Step.DISCONNECT: self.disconnect,
            Step.PARK: self.park,
            Step.THAW: self.thaw,
            Step.ABORT: self.abort,
        }

    @property
    def meter(self) -> TokenMeter:
        """Sees every token that is handed out here."""
        return self._desk.meter

    async def run(self, command: CommandRecord) -> Payload:
        """Run one step; returns what its acknowledgement carries. Raises ElasticError, or
        ValueError if the payload is not what the step needs."""
        failpoint(f"worker.{command.step}.begin")
        payload = await self._steps[command.step](command)
        failpoint(f"worker.{command.step}.end")
        return payload

    async def freeze(self, command: CommandRecord) -> Payload:
        self._frozen = True
        await self._attached().freeze(True)
        return {}

    async def thaw(self, command: CommandRecord | None = None) -> Payload:
        await self._attached().freeze(False)
        self._frozen = False
        return {}

    async def restore(self, command: CommandRecord) -> Payload:
        """An attached engine of this operation; asked again, the same one."""
        if self._slot.holds_other(command.operation_id):
            await self._release()
        await self._presence.move(MemberState.JOINING)
        tiers = BOOTED if command.payload.get("cold") else tuple(Tier)
        started = await self._slot.start(
            command.operation_id,
            command.epoch,
            tiers=tiers,
            founds=bool(command.payload.get("founds")),
            timeout_s=command.deadline_s,
        )
        await self._presence.move(MemberState.JOINING, started.incarnation)
        return {
            "incarnation": started.incarnation,
            "tier": started.tier.value,
            "ready_s": started.ready_s,
            "fell_through": list(started.fell_through),
            "pid": started.pid,
        }

    async def open(self, command: CommandRecord) -> Payload:
        """The next epoch's group is open here, and peers can read how to reach it."""
        topology = _topology(command)
        rank = self._rank(topology)
        endpoint = await self._attached().open_epoch(topology.epoch, rank, topology.world_size)
        self._opened = topology.epoch
        record = EndpointRecord(self._parts.worker_id, self._incarnation, topology.epoch, endpoint)
        await self._presence.put_endpoint(topology.epoch, record)
        return {}

    async def connect(self, command: CommandRecord) -> Payload:
        """Connected, masked, to every member of the next epoch. Endpoints that the coordinator did
        not send along are waited for."""
        topology = _topology(command)
        sent = _ENDPOINTS.validate_python(command.payload.get("endpoints", {}))
        endpoints = sent or await self._endpoints(topology)
        endpoints = {w: endpoints[w] for w in topology.worker_ids}
        await self._attached().connect_epoch(topology, endpoints, timeout_s=command.deadline_s)
        return {}

    async def load_weights(self, command: CommandRecord) -> Payload:
        topology = _topology(command)
        mine = topology.members[self._rank(topology)]
        report = await self._attached().load_weights(mine.experts)
        return {"size_bytes": report.size_bytes, "elapsed_s": report.elapsed_s}

    async def stream(self, command: CommandRecord) -> Payload:
        sources = _WORKERS.validate_python(command.payload["retained"])
        joiners = _WORKERS.validate_python(command.payload["joiners"])
        report = await self._attached().push_dense(_topology(command).epoch, sources, joiners)
        return asdict(report)

    async def check(self, command: CommandRecord) -> Payload:
        return await self._attached().check(dict(command.payload["digests"]))

    async def push_experts(self, command: CommandRecord) -> Payload:
        moves = _MOVES.validate_python(command.payload["moves"])
        epoch = _topology(command).epoch
        report = await self._attached().push_experts(epoch, self._parts.worker_id, moves)
        return asdict(report)

    async def install(self, command: CommandRecord) -> Payload:
        await self._attached().install(_topology(command), dict(command.payload["digests"]))
        return {}

    async def drain(self, command: CommandRecord) -> Payload:
        """No new request comes here; short ones have finished, the others have been moved."""
        engine = self._attached()
        await self._presence.move(MemberState.LEAVING)
        await self.suspend()
        moved = await engine.drain(
            short_tokens=int(command.payload["short_tokens"]),
            timeout_s=float(command.payload["timeout_s"]),
        )
        return {"moved": moved}

    async def switch(self, command: CommandRecord) -> Payload:
        """The first step of the new group was right; or the engine has seen the decision, and
        waits for others that have not. Raises EngineError without a decision."""
        engine, epoch = self._attached(), _topology(command).epoch
        stored = await self._parts.store.get(self._parts.keys.decided)
        in_force = decode(int, stored.value) if stored is not None else 0
        if in_force != epoch:
            raise EngineError(f"epoch {epoch} is not decided: {in_force} is in force")
        await engine.decide(epoch)
        try:
            report = await engine.wait_switched(epoch, timeout_s=command.deadline_s * _SWITCH_SHARE)
        except EngineGone:
            raise
        except EngineError:
            return {"switched": False}
        return {"switched": True, **asdict(report)}

    async def withdraw(self, command: CommandRecord) -> Payload:
        """This engine never switches to the epoch, unless it has; says which."""
        engine, epoch = self._attached(), Epoch(int(command.payload["epoch"]))
        with suppress(EngineError):  # it refuses if it is there already, or on its way
            await engine.abort_epoch(epoch)
            return {"switched": False}
        await engine.wait_switched(epoch, timeout_s=command.deadline_s * _SWITCH_SHARE)
        return {"switched": True}

    async def canary(self, command: CommandRecord) -> Payload:
        """The tokens of the probe; or that it can't be answered, as experts are lost."""
        engine = self._attached()
        try:
            return {"tokens": list(await engine.canary())}
        except EngineError:
            if not (await engine.status()).lost_experts:
                raise
            return {"incomplete": True}

    async def serve(self, command: CommandRecord) -> Payload:
        """Registered with Dynamo, and the card was read back."""
        instance_id = await self._register(_topology(command))
        await self._presence.move(MemberState.SERVING)
        return {"instance_id": instance_id}

    async def disconnect(self, command: CommandRecord) -> Payload:
        await self._attached().disconnect(_topology(command).epoch)
        return {}

    async def park(self, command: CommandRecord) -> Payload:
        """The GPU is free; this shell is on standby. An engine that left as it should is parked,
        one that was lost or put out is ended."""
        left = self._leaves()
        reason = await self._release(park_s=command.deadline_s * _PARK_SHARE if left else 0.0)
        return {"parked": left and not reason, "not_parked": reason}

    async def abort(self, command: CommandRecord) -> Payload:
        """Everything is as before the operation. Idempotent, whatever the operation had done."""
        epoch = Epoch(int(command.payload["epoch"]))
        if self._presence.state is MemberState.JOINING:
            await self._release()
        elif self._slot.engine is not None and not self._lost:
            await self._slot.engine.abort_epoch(epoch)
            if self._presence.state is MemberState.LEAVING:
                await self._stay(await self.in_force())
            await self.thaw()
        await self._presence.drop_endpoint()
        return {}

    async def decided(self, epoch: Epoch) -> None:
        """`epoch` is in force: an engine that has opened it may switch. Raises EngineError."""
        failpoint("worker.decided")
        if self._slot.engine is not None and self._opened == epoch:
            await self._slot.engine.decide(epoch)

    async def follow(self, topology: Topology) -> None:
        """Give up the engine if `topology`, which is in force, has no place for it any more.

        A leaver that lives is left alone: its operation parks it.
        """
        if self._placed(topology):
            self._seated = True
        elif self._seated and not self._leaves():
            failpoint("worker.evicted")
            log.warning("evicted: epoch %d is in force without this engine", topology.epoch)
            await self._release()

    async def refresh(self, topology: Topology) -> None:
        """The card of a rank that serves names the epoch that its engine is in. Raises EngineError
        or RegistrationFailed, and may be tried again, until the engine has switched."""
        if self._card is None or self._lost or not self._placed(topology):
            return
        await self._attached().wait_switched(topology.epoch, timeout_s=_REFRESH_TIMEOUT_S)
        async with self._registrar_lock:
            card = self._data(topology)
            if self._card is None or self._card == card:
                return  # it has begun to leave, and is not brought back; or nothing has changed
            failpoint("registration.before_refresh")
            await self._parts.registrar.register(card)
            self._card = card

    async def keep_registered(self) -> None:
        """Register again what Dynamo has dropped. Raises RegistrationFailed, and may be tried
        again."""
        if self._card is None or self._parts.registrar.visible():
            return
        async with self._registrar_lock:
            if self._card is not None and not self._parts.registrar.visible():
                log.warning("Dynamo has lost this rank's instance; it is registered again")
                failpoint("registration.before_repair")
                await self._parts.registrar.register(self._card)

    async def expel_the_gone(self, topology: Topology) -> None:
        """Take the instances of processes that are gone away from Dynamo, whose leases last long:
        what an earlier shell of ours has left, and, as rank 0 of `topology`, which is in force,
        what is of no engine in it. Idempotent. Raises StoreError."""
        rank = topology.rank_of(self._parts.worker_id)
        if rank is None or not self._placed(topology):
            return
        failpoint("registration.before_expel")
        in_force = {m.incarnation for m in topology.members}
        for registration in await self._parts.registrations.read(self._parts.keys.deployment):
            if registration.incarnation == self._incarnation:
                gone = not self._parts.registrar.owns(registration.instance_id)
            else:
                older = registration.epoch < topology.epoch
                gone = rank == 0 and older and registration.incarnation not in in_force
            if gone:
                await self._parts.registrations.expel(registration)

    async def adopt(self) -> None:
        """Of a shell that has just started: the engine that an earlier one of this slot left in the
        topology in force serves on, with us. What it was doing for the other's requests ends
        unheard. Raises EngineError or StoreError, and may be tried again.
        """
        if self._slot.engine is not None:
            return
        topology = await self.in_force()
        rank = topology.rank_of(self._parts.worker_id)
        if rank is None or not topology.members[rank].incarnation:
            return
        incarnation = topology.members[rank].incarnation
        if not await self._slot.adopt(incarnation):
            return
        log.info("engine %s is adopted", incarnation)
        self._presence.adopts(incarnation)
        # The other may have begun to leave, or have been told to freeze.
        self._frozen = True
        await self._attached().readmit()

    async def resume(self) -> None:
        """After a new session: serve on if the topology in force still has this engine.

        The operation that it may have been leaving in has given it up: if that is to have its
        rank, it evicts it.
        """
        failpoint("worker.resumes")
        topology = await self.in_force()
        if not self._placed(topology):
            await self._release()
        elif self._lost:
            return
        elif self._presence.state is MemberState.LEAVING:
            await self._stay(topology)
        elif self._presence.state is MemberState.SERVING:
            await self._register(topology)
            await self.expel_the_gone(topology)

    async def settle(self) -> None:
        """No operation is under way: undo what one has left here that could not be told to.

        What it could not undo here raises EngineError or StoreError, and may be tried again.
        """
        failpoint("worker.settles")
        last = await self._parts.store.get(self._parts.keys.last)
        if last is not None and decode(OperationRecord, last.value).served is not None:
            return  # its decision was withdrawn: the operation that supersedes it says what to do
        topology = await self.in_force()
        state, placed = self._presence.state, self._placed(topology)
        if state in (MemberState.JOINING, MemberState.LEAVING) and not placed:
            await self._release()
        elif placed and not self._lost:
            if state is MemberState.LEAVING:
                await self._stay(topology)
            if self._frozen:
                await self.thaw()

    async def suspend(self) -> None:
        """Nothing new comes here; requests under way go on."""
        self._desk.close()
        try:
            async with self._registrar_lock:
                self._card = None
                failpoint("registration.before_unregister")
                await self._parts.registrar.unregister()
        except RegistrationFailed as exc:
            log.warning("the instance goes when its lease does: %s", exc)

    async def load(self) -> Load | None:
        """How busy the engine is; None without one that answers. What it says of its peers goes to
        the coordinator."""
        if self._slot.engine is None or self._lost:
            return None
        try:
            status = await self._slot.engine.status()
        except EngineError:
            return None
        await self._tell_masks(status)
        return Load(status.running, status.waiting, status.kv_blocks_used * KV_BLOCK_TOKENS)

    async def _tell_masks(self, status: EngineStatus) -> None:
        """Others may not know that a peer does not answer: it may live, and its shell as well."""
        if not status.masked and not self._presence.record.masks:
            return
        with suppress(StoreError, SessionLost):
            topology = await self.in_force()
            if topology.epoch == status.epoch:
                masked = tuple(topology.worker_ids[rank] for rank in status.masked)
                await self._presence.mask(topology.epoch, masked)

    async def quiet(self, timeout_s: float) -> None:
        """Return when no request is under way, or after `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._desk.idle()

    async def close(self) -> None:
        """Let go of the engine, which lives on. Idempotent."""
        await self._slot.close()

    @property
    def _lost(self) -> str:
        return self._presence.record.lost_reason

    def _leaves(self) -> bool:
        return self._presence.state is MemberState.LEAVING and not self._lost

    def _placed(self, topology: Topology) -> bool:
        """True if `topology` has this engine. A member without incarnation is any engine's."""
        rank = topology.rank_of(self._parts.worker_id)
        if rank is None or self._slot.engine is None:
            return False
        return topology.members[rank].incarnation in (NO_INCARNATION, self._incarnation)

    @property
    def _incarnation(self) -> Incarnation:
        return self._presence.record.incarnation

    def _attached(self) -> Engine:
        if self._slot.engine is None:
            raise EngineError("this shell has no engine")
        if self._lost:
            raise EngineGone(self._lost)
        return self._slot.engine

    def _rank(self, topology: Topology) -> Rank:
        rank = topology.rank_of(self._parts.worker_id)
        if rank is None:
            raise EngineError(f"{self._parts.worker_id} is not in the topology of {topology.epoch}")
        return rank

    async def _register(self, topology: Topology) -> int:
        self._desk.open(self._attached())
        async with self._registrar_lock:
            self._card = card = self._data(topology)
            failpoint("registration.before_register")
            return await self._parts.registrar.register(card)

    def _data(self, topology: Topology) -> dict[str, str]:
        return {
            "deployment": self._parts.keys.deployment,
            "epoch": str(topology.epoch),
            "rank": str(self._rank(topology)),
            "width": str(topology.world_size),
            "incarnation": self._incarnation,
        }

    async def _stay(self, topology: Topology) -> None:
        """Undo DRAIN."""
        await self._attached().readmit()
        await self._register(topology)
        await self._presence.move(MemberState.SERVING)

    async def in_force(self) -> Topology:
        """The topology that is stored. Raises StoreError."""
        stored = await self._parts.store.get(self._parts.keys.topology)
        return Topology(Epoch(0)) if stored is None else decode(Topology, stored.value)

    async def _endpoints(self, topology: Topology) -> dict[WorkerId, dict[str, Any]]:
        """Those of exactly the engines that `topology` names: an endpoint that another life of the
        same worker left, at the same address, is not one of them."""
        named = {m.worker_id: m.incarnation for m in topology.members}
        found: dict[WorkerId, dict[str, Any]] = {}
        async with self._parts.store.watch(self._parts.keys.endpoints(topology.epoch)) as watch:
            values = [v.value for v in watch.snapshot]
            events = aiter(watch)
            while True:
                for value in values:
                    record = decode(EndpointRecord, value)
                    if named.get(record.worker_id) == record.incarnation:
                        found[record.worker_id] = record.endpoint
                if found.keys() >= set(topology.worker_ids):
                    return found
                value_or_none = (await anext(events)).value
                values = [] if value_or_none is None else [value_or_none]

    async def _release(self, *, park_s: float = 0.0) -> str:
        """No instance, no engine, on standby. Waits for a start under way, to end it as well. With
        `park_s` seconds for it the engine is parked; returns why it was not."""
        await self.suspend()
        reason = await self._slot.end(park_s=park_s)
        self._seated = self._frozen = False
        self._opened = None
        await self._presence.drop_endpoint()
        await self._presence.move(MemberState.STANDBY)
        return reason

    async def _read(self, engine: Engine, started: StartedEngine) -> None:
        """Hand out the engine's outputs; when it is gone, say so and send its requests on."""
        try:
            await self._desk.pump(engine)
        except EngineGone as exc:
            log.error("engine %s is gone: %s", started.incarnation, exc)
            # Without a session the record goes out with the next one.
            with suppress(SessionLost):
                await asyncio.gather(self.suspend(), self._presence.lose(str(exc)))


def _topology(command: CommandRecord) -> Topology:
    """The topology that the operation leads to (or, after it, the placement to settle in)."""
    return _TOPOLOGY.validate_python(command.payload["topology"])
