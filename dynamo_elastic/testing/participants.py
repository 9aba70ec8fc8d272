"""Worker shells without engines: they obey the command protocol over any Store, and misbehave
where a test says so.

A FakeShell keeps the state that a real one would change (group in force, pending group, routing,
drained, frozen), so that a test can ask whether all agree with what is stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from dynamo_elastic.coordinator.payloads import CommonPayloads
from dynamo_elastic.coordinator.records import (
    AckRecord,
    AckStatus,
    CommandRecord,
    EndpointRecord,
    Keys,
    MemberRecord,
    MemberState,
    decode,
    encode,
    from_json,
)
from dynamo_elastic.coordinator.session import Session
from dynamo_elastic.coordinator.store import Delete, Put, Store
from dynamo_elastic.errors import (
    ElasticError,
    OutcomeUnknown,
    SessionLost,
    StaleCommand,
    StoreUnavailable,
)
from dynamo_elastic.phases import Step
from dynamo_elastic.topology import EMPTY, Topology
from dynamo_elastic.types import NO_INCARNATION, Epoch, FencingToken, Incarnation, WorkerId

_PAUSE_S = 0.05


class Misbehaviour(StrEnum):
    """What a shell does instead of obeying one command."""

    FAIL = "fail"
    """Answers FAILED, without having done it."""
    SILENT = "silent"
    """Does it, and never answers."""
    DIE = "die"
    """The shell is gone before it does anything."""
    DIE_AFTER = "die_after"
    """The shell does it, answers, and is gone."""
    ENGINE_DIES = "engine_dies"
    """The shell lives, its engine is gone."""
    DUPLICATE = "duplicate"
    """Answers twice."""
    LATE = "late"
    """Answers after a second."""
    WRONG = "wrong"
    """Answers DONE with other bytes, probes or tokens than the rest."""


@dataclass(slots=True)
class Script:
    """Misbehaviours of one shell by step, each used once."""

    acts: dict[Step, Misbehaviour]

    def next(self, step: Step) -> Misbehaviour | None:
        return self.acts.pop(step, None)


class FakeShell:
    """One worker shell. run() lives until it is cancelled or dies by its script."""

    def __init__(self, store: Store, keys: Keys, slot: int, *, ttl_s: int = 5) -> None:
        self.worker_id = WorkerId(f"slot{slot}")
        self.script = Script({})
        self.in_force: Topology | None = None
        self.pending: Topology | None = None
        self.routing: Topology | None = None
        self.drained = False
        self.frozen = False
        self.ran: list[tuple[str, int, Step]] = []
        self.alive = False
        self._proven: set[str] = set()
        self._store = store
        self._keys = keys
        self._ttl_s = ttl_s
        self._token = FencingToken(0)
        self._member = MemberRecord(self.worker_id, slot, "host", 1, MemberState.STANDBY)
        self._session: Session | None = None
        self._payloads = CommonPayloads(store, keys)

    @property
    def incarnation(self) -> Incarnation:
        return self._member.incarnation

    async def run(self) -> None:
        """Join as a standby member and obey commands."""
        self._session = await Session.open(self._store, self._ttl_s)
        self.alive = True
        try:
            await self._publish()
            await self._session.run(self._obey())
        except (_Died, SessionLost):
            return
        finally:
            self.alive = False
            await self._session.close()

    async def die(self) -> None:
        """The shell is gone, and its lease with it."""
        if self._session is not None:
            await self._session.close()

    async def lose_engine(self, reason: str = "engine died") -> None:
        """The engine is gone; the shell says so."""
        self.in_force = self.pending = self.routing = None
        await self._publish(lost_reason=reason)

    async def _obey(self) -> None:
        key = self._keys.command(self.worker_id)
        while True:
            try:
                async with self._store.watch(key) as watch:
                    for stored in watch.snapshot:
                        await self._take(decode(CommandRecord, stored.value))
                    async for event in watch:
                        if event.key == key and event.value is not None:
                            await self._take(decode(CommandRecord, event.value))
            except StoreUnavailable:
                await asyncio.sleep(_PAUSE_S)

    async def _take(self, command: CommandRecord) -> None:
        """Run a command that is new, as scripted."""
        identity = (command.operation_id, command.seq, command.step)
        if identity[:2] in {known[:2] for known in self.ran}:
            return
        if command.token < self._token:
            raise StaleCommand(f"{command.step} with token {command.token}")
        self._token = command.token
        self.ran.append(identity)
        act = self.script.next(command.step)
        if act is Misbehaviour.DIE:
            raise _Died
        if act is Misbehaviour.ENGINE_DIES:
            return await self.lose_engine()
        if act is Misbehaviour.FAIL:
            return await self._ack(command, AckStatus.FAILED, {}, "scripted")
        if act is Misbehaviour.LATE:
            await asyncio.sleep(1.0)
        try:
            payload = await self._handle(await self._payloads.completed(command))
        except ElasticError as exc:
            return await self._ack(command, AckStatus.FAILED, {}, str(exc))
        if act is Misbehaviour.WRONG:
            payload = _wrong(payload)
        if act is not Misbehaviour.SILENT:
            await self._ack(command, AckStatus.DONE, payload, "")
        if act is Misbehaviour.DUPLICATE:
            await self._ack(command, AckStatus.FAILED, {}, "a second answer")
        if act is Misbehaviour.DIE_AFTER:
            raise _Died

    async def _handle(self, command: CommandRecord) -> dict[str, Any]:
        handlers: dict[Step, Callable[[CommandRecord], Awaitable[dict[str, Any]]]] = {
            Step.RESTORE: self._restore,
            Step.OPEN: self._open,
            Step.CONNECT: self._connect,
            Step.INSTALL: self._install,
            Step.SWITCH: self._switch,
            Step.WITHDRAW: self._withdraw,
            Step.SERVE: self._serve,
            Step.PARK: self._park,
            Step.ABORT: self._abort,
        }
        if command.step in handlers:
            return await handlers[command.step](command)
        self.frozen = {Step.FREEZE: True, Step.THAW: False}.get(command.step, self.frozen)
        self.drained = command.step is Step.DRAIN or self.drained
        return _measured(command)

    async def _restore(self, command: CommandRecord) -> dict[str, Any]:
        incarnation = Incarnation(f"{self.worker_id}@{command.operation_id}")
        await self._publish(state=MemberState.JOINING, incarnation=incarnation)
        return {"incarnation": incarnation, "tier": "cold", "ready_s": 0.1, "pid": 1}

    async def _open(self, command: CommandRecord) -> dict[str, Any]:
        endpoint = EndpointRecord(self.worker_id, self.incarnation, command.epoch, {"address": "a"})
        await self._write(Put(self._endpoint(command.epoch), encode(endpoint), self._lease))
        return {}

    async def _connect(self, command: CommandRecord) -> dict[str, Any]:
        topology = from_json(Topology, command.payload["topology"])
        there = set(command.payload.get("endpoints", {})) or await self._published(command.epoch)
        if missing := set(topology.worker_ids) - there:
            raise ElasticError(f"no endpoint of {sorted(missing)}")
        self.pending = topology
        return {}

    async def _published(self, epoch: Epoch) -> set[str]:
        prefix = self._keys.endpoints(epoch)
        return {v.key.removeprefix(prefix) for v in await self._store.get_prefix(prefix)}

    async def _install(self, command: CommandRecord) -> dict[str, Any]:
        topology = from_json(Topology, command.payload["topology"])
        in_force = self.in_force.epoch if self.in_force else None
        if topology.epoch != in_force:
            raise ElasticError(f"epoch {topology.epoch} is not in force here ({in_force})")
        self._proven |= set(command.payload["digests"])
        for slot, expert in enumerate(self._experts(topology)):
            known = expert in (EMPTY, *self._experts(self.routing)[slot : slot + 1])
            if not known and f"slot{slot}/w" not in self._proven:
                raise ElasticError(f"routed to a copy of expert {expert} that nobody has proven")
        self.routing = topology
        return {}

    def _experts(self, topology: Topology | None) -> tuple[int, ...]:
        rank = topology.rank_of(self.worker_id) if topology else None
        return topology.members[rank].experts if topology and rank is not None else ()

    async def _switch(self, command: CommandRecord) -> dict[str, Any]:
        stored = await self._store.get(self._keys.decided)
        if stored is None or decode(int, stored.value) != command.epoch:
            raise ElasticError("told to switch without a durable decision")
        if self.in_force is None or self.in_force.epoch != command.epoch:
            self.in_force = self.routing = self.pending
            self.pending = None
        return {"gap_s": 0.001, "decided_to_first_step_s": 0.002}

    async def _withdraw(self, command: CommandRecord) -> dict[str, Any]:
        switched = self.in_force is not None and self.in_force.epoch == command.epoch
        if not switched:
            self.pending = None
        return {"switched": switched}

    async def _serve(self, command: CommandRecord) -> dict[str, Any]:
        await self._publish(state=MemberState.SERVING)
        return {"instance_id": 1}

    async def _park(self, command: CommandRecord) -> dict[str, Any]:
        await self.stand_by()
        return {}

    async def _abort(self, command: CommandRecord) -> dict[str, Any]:
        epoch = Epoch(command.payload["epoch"])
        await self._write(Delete(self._endpoint(epoch)))
        self.pending = None
        self.drained = self.frozen = False
        if self.in_force is None:
            await self.stand_by()
        return {}

    async def stand_by(self) -> None:
        """End the engine, if there is one, and be free to join."""
        self.in_force = self.pending = self.routing = None
        self.drained = self.frozen = False
        await self._publish(state=MemberState.STANDBY, incarnation=NO_INCARNATION)

    async def _ack(
        self, command: CommandRecord, status: AckStatus, payload: dict[str, Any], reason: str
    ) -> None:
        ack = AckRecord(
            command.operation_id, command.token, command.seq, command.step, status, reason
        )
        record = replace(ack, payload=payload)
        await self._write(Put(self._keys.ack(self.worker_id), encode(record), self._lease))

    async def _publish(
        self,
        *,
        state: MemberState | None = None,
        incarnation: Incarnation | None = None,
        lost_reason: str = "",
    ) -> None:
        self._member = replace(
            self._member,
            state=state or self._member.state,
            incarnation=self.incarnation if incarnation is None else incarnation,
            lost_reason=lost_reason,
        )
        key = self._keys.member(self.worker_id)
        await self._write(Put(key, encode(self._member), self._lease))

    async def _write(self, op: Put | Delete) -> None:
        while True:
            try:
                await self._store.txn([], [op])
                return
            except (StoreUnavailable, OutcomeUnknown):
                await asyncio.sleep(_PAUSE_S)

    def _endpoint(self, epoch: Epoch) -> str:
        return self._keys.endpoint(epoch, self.worker_id)

    @property
    def _lease(self) -> Any:
        return self._session.lease if self._session else None


class _Died(Exception):
    """The shell's script let it die."""


@asynccontextmanager
async def running(shells: Iterable[FakeShell]) -> AsyncIterator[Sequence[FakeShell]]:
    """Run `shells` and return once all are members; end them on leaving."""
    listed = list(shells)
    tasks = [asyncio.create_task(shell.run()) for shell in listed]
    try:
        while not all(shell.alive for shell in listed):
            await asyncio.sleep(0.01)
        yield listed
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _measured(command: CommandRecord) -> dict[str, Any]:
    """What an engine would report of a step that changes nothing here."""
    digests: dict[str, dict[str, str]] = {}
    if command.step is Step.STREAM:
        digests = {w: {"dense/a": "d1"} for w in command.payload["joiners"]}
    if command.step is Step.PUSH_EXPERTS:
        for move in command.payload["moves"]:
            digests.setdefault(move["to_worker"], {})[f"slot{move['to_slot']}/w"] = "d"
    by_step: dict[Step, dict[str, Any]] = {
        Step.LOAD: {"size_bytes": 1, "elapsed_s": 0.1},
        Step.STREAM: {"size_bytes": 1, "elapsed_s": 0.1, "digests": digests},
        Step.PUSH_EXPERTS: {"size_bytes": 1, "elapsed_s": 0.1, "digests": digests},
        Step.CHECK: {"probe": "5eed"},
        Step.CANARY: {"tokens": [1, 2, 3]},
        Step.DRAIN: {"moved": 0},
    }
    return by_step.get(command.step, {})


def _wrong(payload: dict[str, Any]) -> dict[str, Any]:
    """The same kind of answer with other content."""
    wrong = dict(payload)
    if "digests" in wrong:
        wrong["digests"] = {
            w: dict.fromkeys(regions, "bad") for w, regions in wrong["digests"].items()
        }
    return wrong | {k: "wrong" for k in ("probe", "tokens", "incarnation") if k in wrong}
