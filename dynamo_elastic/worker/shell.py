"""One worker shell: holds a session, obeys the coordinator, follows the topology."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from dynamo_elastic.coordinator.payloads import CommonPayloads
from dynamo_elastic.coordinator.records import (
    AckRecord,
    AckStatus,
    CommandRecord,
    MemberState,
    RecordError,
    RecordNewer,
    decode,
    from_json,
    plain,
)
from dynamo_elastic.coordinator.session import Session
from dynamo_elastic.coordinator.store import Store
from dynamo_elastic.errors import (
    ElasticError,
    EngineError,
    RegistrationFailed,
    SessionLost,
    StaleCommand,
    StoreError,
)
from dynamo_elastic.logs import change_log_fields, log_fields
from dynamo_elastic.types import Epoch, FencingToken, WorkerId
from dynamo_elastic.worker.base import ShellParts
from dynamo_elastic.worker.participant import Participant
from dynamo_elastic.worker.presence import Presence
from dynamo_elastic.worker.teller import TrafficTeller

log = logging.getLogger(__name__)

_RETRY_S = 0.5
_NOT_NOW = (EngineError, StoreError, RegistrationFailed, RecordError)
"""What may go away by itself, or by somebody's upgrade of this process."""
_REPORT_EVERY_S = 0.5
_LEAVE_TIMEOUT_S = 2.0


class Shell:
    """Runs until it is told to stop; outlives sessions that are lost."""

    def __init__(
        self, parts: ShellParts, presence: Presence, participant: Participant, *, lease_ttl_s: int
    ) -> None:
        self._parts = parts
        self._presence = presence
        self._participant = participant
        self._lease_ttl_s = lease_ttl_s
        self._token = FencingToken(0)
        self._acked: AckRecord | None = None
        self._payloads = CommonPayloads(parts.store, parts.keys)
        self._one_at_a_time = asyncio.Lock()
        self._teller = TrafficTeller(parts, presence, participant.meter)

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, then let requests finish for a moment: the frontend moves the
        others. The member key is gone then; the engine lives on."""
        stopping = asyncio.create_task(stop.wait())
        try:
            while not stop.is_set():
                await self._one_session(stopping)
        finally:
            stopping.cancel()
            await self._participant.suspend()
            await self._participant.quiet(_LEAVE_TIMEOUT_S)
            await self._participant.close()

    async def _one_session(self, stopping: asyncio.Task[bool]) -> None:
        try:
            session = await Session.open(self._parts.store, self._lease_ttl_s)
        except StoreError as exc:
            log.warning("no session: %s", exc)
            await asyncio.sleep(_RETRY_S)
            return
        work = asyncio.create_task(self._work(session))
        lost = asyncio.create_task(session.lost.wait())
        try:
            await asyncio.wait({work, lost, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            if lost.done():
                # It serves on: if its rank is given away meanwhile, its engine hears so from its
                # group, and _resume() from the topology.
                log.error("session lost: %s; a new one is opened", session.lost.cause)
        finally:
            lost.cancel()
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            await session.close()

    async def _work(self, session: Session) -> None:
        """Claim this slot and serve in it. Raises only what no retry can mend."""
        try:
            await self._adopt()
            await self._presence.claim(session)
            await self._resume()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._obey(tasks))
                tasks.create_task(self._follow(tasks))
                tasks.create_task(self._report())
        except* SessionLost:
            # _one_session sees it too, as the session's own event.
            await session.lost.wait()

    async def _adopt(self) -> None:
        while self._presence.state is MemberState.STANDBY:
            try:
                return await self._participant.adopt()
            except _NOT_NOW as exc:
                log.warning("it is not known yet whether there is an engine to adopt: %s", exc)
                await asyncio.sleep(_RETRY_S)

    async def _resume(self) -> None:
        while True:
            try:
                async with self._one_at_a_time:
                    return await self._participant.resume()
            except _NOT_NOW as exc:
                log.warning("not ready to serve yet: %s", exc)
                await asyncio.sleep(_RETRY_S)

    async def _obey(self, tasks: asyncio.TaskGroup) -> None:
        """Run the newest command; one that comes while another runs takes its place. Commands go
        with their operation: then what it left here is undone."""
        running: asyncio.Task[None] | None = None
        async for raw in values_of(self._parts.store, self._parts.keys.command(self._worker)):
            try:
                command = None if raw is None else decode(CommandRecord, raw)
                self._check_token(command)
            except (RecordError, StaleCommand) as exc:
                log.warning("command ignored: %s", exc)
                await self._refuse(raw, exc)
                continue
            if running is not None and not running.done():
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
            if command is None:
                tasks.create_task(self._teller.tell())
                running = tasks.create_task(self._settle_down())
            else:
                self._teller.see(command)
                running = tasks.create_task(self._answer(command))

    async def _refuse(self, raw: bytes | None, why: ElasticError) -> None:
        """Tell a coordinator whose command we can't read that we can't, if we can read that much:
        its operation fails at once, with the reason, and not after a deadline."""
        said = plain(raw or b"") if isinstance(why, RecordNewer) else {}
        try:
            ack = from_json(AckRecord, {**said, "payload": {}, "status": "failed"})
            ack = replace(ack, reason=f"{type(why).__name__}: {why}")
        except RecordError:
            return
        await self._presence.put(self._parts.keys.ack(self._worker), ack)

    async def _settle_down(self) -> None:
        while True:
            try:
                async with self._one_at_a_time:
                    return await self._participant.settle()
            except _NOT_NOW as exc:
                log.warning("the last operation is not undone yet: %s", exc)
                await asyncio.sleep(_RETRY_S)

    def _check_token(self, command: CommandRecord | None) -> None:
        if command is None:
            return
        if command.token < self._token:
            raise StaleCommand(
                f"{command.step} of {command.operation_id} has token {command.token}, "
                f"{self._token} was seen"
            )
        self._token = command.token

    async def _answer(self, command: CommandRecord) -> None:
        with log_fields(
            operation_id=command.operation_id,
            epoch=command.epoch,
            phase=command.step,
            worker_id=self._worker,
        ):
            await self._answer_it(command)

    async def _answer_it(self, command: CommandRecord) -> None:
        acked = self._acked
        if acked is None or (acked.operation_id, acked.seq) != (command.operation_id, command.seq):
            self._acked = await self._run(command)
        else:
            # A new coordinator repeats what it does not know to be done.
            self._acked = replace(acked, token=command.token)
        await self._presence.put(self._parts.keys.ack(self._worker), self._acked)

    async def _run(self, command: CommandRecord) -> AckRecord:
        clock = asyncio.get_running_loop().time
        began, began_at_s = clock(), time.time()
        status, reason, payload = AckStatus.FAILED, "", dict[str, Any]()
        try:
            async with asyncio.timeout(command.deadline_s), self._one_at_a_time:
                whole = await self._payloads.completed(command)
                change_log_fields(rank=_rank_of(self._worker, whole))
                payload = await self._participant.run(whole)
            status = AckStatus.DONE
        except SessionLost:
            raise
        except TimeoutError:
            reason = f"{command.step} took longer than {command.deadline_s:g} s"
        except (ElasticError, ValueError, KeyError, TypeError) as exc:
            reason = f"{type(exc).__name__}: {exc}"
        ack = AckRecord(
            operation_id=command.operation_id,
            token=command.token,
            seq=command.seq,
            step=command.step,
            status=status,
            reason=reason,
            elapsed_s=clock() - began,
            payload=payload,
            began_at_s=began_at_s,
        )
        level = logging.INFO if ack.status is AckStatus.DONE else logging.ERROR
        why = f": {ack.reason}" if ack.reason else ""
        log.log(level, "%s %s in %.3f s%s", ack.step, ack.status, ack.elapsed_s, why)
        return ack

    async def _follow(self, tasks: asyncio.TaskGroup) -> None:
        """Tell the engine of decisions, and leave when the topology has no place for it."""
        settling: asyncio.Task[None] | None = None
        async for raw in values_of(self._parts.store, self._parts.keys.decided):
            if settling is not None:
                settling.cancel()
                await asyncio.gather(settling, return_exceptions=True)
            try:
                epoch = None if raw is None else Epoch(decode(int, raw))
            except RecordError as exc:
                log.error("the decision is not followed, this rank serves as it did: %s", exc)
                continue
            if epoch is not None:
                settling = tasks.create_task(self._settle(epoch))

    async def _settle(self, epoch: Epoch) -> None:
        try:
            # Not in turn with the steps: one of them may be waiting for this.
            await self._participant.decided(epoch)
        except EngineError as exc:
            log.warning("the engine does not take epoch %d: %s", epoch, exc)
        while True:
            try:
                topology = await self._participant.in_force()
                async with self._one_at_a_time:
                    await self._participant.follow(topology)
                await self._participant.refresh(topology)
                return await self._participant.expel_the_gone(topology)
            except _NOT_NOW as exc:
                log.warning("epoch %d is not followed yet: %s", epoch, exc)
                await asyncio.sleep(_RETRY_S)

    async def _report(self) -> None:
        """Tell the planner how busy the engine is, and see to it that it can hear us."""
        while True:
            load = await self._participant.load()
            if load is not None:
                self._parts.registrar.report(load)
            try:
                await self._participant.keep_registered()
            except RegistrationFailed as exc:
                log.warning("not registered yet: %s", exc)
            await asyncio.sleep(_REPORT_EVERY_S)

    @property
    def _worker(self) -> WorkerId:
        return self._parts.worker_id


def _rank_of(worker: WorkerId, command: CommandRecord) -> int | None:
    """Of `worker` in the topology that the command's operation makes, for the log."""
    members = command.payload.get("topology", {}).get("members", ())
    return next((k for k, m in enumerate(members) if m.get("worker_id") == worker), None)


async def values_of(store: Store, key: str) -> AsyncIterator[bytes | None]:
    """The value of `key` now and after each change, None while it is absent. Never ends: a watch
    that breaks is made anew, and then the value of that moment comes."""
    while True:
        try:
            async with store.watch(key) as watch:
                held = [v.value for v in watch.snapshot if v.key == key]
                yield held[0] if held else None
                async for change in watch:
                    if change.key == key:
                        yield change.value
        except StoreError as exc:
            log.warning("watch of %s is made anew: %s", key, exc)
            await asyncio.sleep(_RETRY_S)
