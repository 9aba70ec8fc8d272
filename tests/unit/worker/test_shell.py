"""A shell against a scripted coordinator: steps, acknowledgements, losses, evictions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest

from dynamo_elastic.agent.base import SlotState, Tier
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
    to_json,
)
from dynamo_elastic.coordinator.store import Delete, Put
from dynamo_elastic.dynamo.base import Load
from dynamo_elastic.dynamo.registrations import Registrations
from dynamo_elastic.errors import EngineError, IllegalTransition, RegistrationFailed
from dynamo_elastic.phases import Step
from dynamo_elastic.testing.agent import FakeAgent
from dynamo_elastic.testing.engine import DENSE_DIGESTS, FakeEngine
from dynamo_elastic.testing.store import FakeStore
from dynamo_elastic.testing.virtual_time import run
from dynamo_elastic.topology import Member, Topology
from dynamo_elastic.types import (
    Epoch,
    FencingToken,
    Incarnation,
    LeaseId,
    OperationId,
    Rank,
    WorkerId,
)
from dynamo_elastic.worker.base import ShellParts
from dynamo_elastic.worker.participant import Participant
from dynamo_elastic.worker.presence import Presence, check_member_move
from dynamo_elastic.worker.requests import RequestDesk
from dynamo_elastic.worker.shell import Shell

ME, OTHER = WorkerId("slot1"), WorkerId("slot0")
KEYS = Keys("test")
TTL_S = 5


class FakeRegistrar:
    """Dynamo in memory: `data` is the card, None while unregistered."""

    def __init__(self) -> None:
        self.data: Mapping[str, str] | None = None
        self.loads: list[Load] = []
        self.registrations = 0
        self.failures = 0
        """So many registrations fail from now on."""
        self.instance_id = 42

    async def register(self, runtime_data: Mapping[str, str]) -> int:
        self.registrations += 1
        if self.failures:
            self.failures -= 1
            self.data = None
            raise RegistrationFailed("Dynamo does not answer")
        self.data = runtime_data
        return self.instance_id

    async def unregister(self) -> None:
        self.data = None

    def owns(self, instance_id: int) -> bool:
        return instance_id == self.instance_id

    def visible(self) -> bool:
        return self.data is not None

    def report(self, load: Load) -> None:
        self.loads.append(load)


class Bench:
    """One shell on fakes, and the hand of a coordinator."""

    def __init__(self) -> None:
        self.store = FakeStore()
        self.engines: dict[str, FakeEngine] = {}
        self.agent = FakeAgent(2, self._boot, {1: "image"}, parks=True)
        self.registrar = FakeRegistrar()
        parts = ShellParts(
            ME,
            1,
            self.store,
            KEYS,
            self.agent,
            self.registrar,
            Registrations(self.store, "ns"),
            lambda path: self.engines[path],
        )
        member = MemberRecord(ME, 1, "host", 1, MemberState.STANDBY)
        self.presence = Presence(self.store, KEYS, member)
        self.desk = RequestDesk(100)
        self.participant = Participant(parts, self.presence, self.desk)
        self.shell = Shell(parts, self.presence, self.participant, lease_ttl_s=TTL_S)
        self.task: asyncio.Task[None]
        self._parts, self._record = parts, member
        self.operation_id = OperationId("op")
        self.seq = 0

    def _boot(self, slot: int, incarnation: Incarnation) -> str:
        path = f"/{incarnation}"
        self.engines[path] = FakeEngine(ME, incarnation)
        return path

    def another_shell(self) -> Shell:
        """Of the same slot, for when `task` was cancelled."""
        presence = Presence(self.store, KEYS, self._record)
        participant = Participant(self._parts, presence, RequestDesk(100))
        return Shell(self._parts, presence, participant, lease_ttl_s=TTL_S)

    @property
    def engine(self) -> FakeEngine:
        return list(self.engines.values())[-1]

    @property
    def member(self) -> MemberRecord:
        return decode(MemberRecord, self.store.data[KEYS.member(ME)].value)

    def calls(self) -> list[str]:
        """What the engine was asked, the planner's load apart."""
        return [call for call in self.engine.calls if call != "status"]

    def state(self) -> MemberState:
        return self.member.state

    def shell_lease(self) -> LeaseId:
        """The lease that the member key is on."""
        key = KEYS.member(ME)
        return next(id_ for id_, lease in self.store._leases.items() if key in lease.keys)

    def topology(self, epoch: int, *, me: bool = True) -> Topology:
        incarnation = self.engine.incarnation if self.engines else Incarnation("")
        mine = (Member(ME, incarnation, (0,)),) if me else ()
        return Topology(Epoch(epoch), (Member(OTHER, Incarnation("o"), (1,)), *mine))

    async def send(
        self, step: Step, *, token: int = 1, deadline_s: float = 10.0, **more: Any
    ) -> None:
        self.seq += 1
        payload = {
            "topology": to_json(self.topology(1)),
            "retained": [OTHER],
            "joiners": [ME],
            "epoch": 1,
            "short_tokens": 0,
            "timeout_s": 1.0,
            "digests": DENSE_DIGESTS,
        }
        command = CommandRecord(
            *(self.operation_id, Epoch(1), FencingToken(token), self.seq, step, deadline_s),
            payload
            | {"epoch": 1, "short_tokens": 0, "timeout_s": 1.0, "digests": DENSE_DIGESTS}
            | more,
        )
        await self.store.txn([], [Put(KEYS.command(ME), encode(command))])

    async def command(self, step: Step, **more: Any) -> AckRecord:
        """Send a command and return its acknowledgement."""
        await self.send(step, **more)
        async with self.store.watch(KEYS.ack(ME)) as watch:
            async for change in watch:
                if change.value is not None:
                    ack = decode(AckRecord, change.value)
                    if ack.seq == self.seq:
                        return ack
        raise AssertionError("the watch ended")

    async def must(self, *steps: Step) -> None:
        for step in steps:
            ack = await self.command(step)
            assert ack.status is AckStatus.DONE, ack.reason

    async def commit(self, topology: Topology) -> None:
        decided = Put(KEYS.decided, encode(int(topology.epoch)))
        await self.store.txn([], [Put(KEYS.topology, encode(topology)), decided])

    async def peer_opens(self) -> None:
        key = KEYS.endpoint(Epoch(1), OTHER)
        record = EndpointRecord(OTHER, Incarnation("o"), Epoch(1), {"address": "there"})
        await self.store.txn([], [Put(key, encode(record))])

    async def join(self) -> None:
        """All of a scale-up, seen from this joiner."""
        await self.peer_opens()
        await self.must(Step.RESTORE, Step.OPEN, Step.CONNECT, Step.CHECK)
        await self.commit(self.topology(1))
        await self.must(Step.SWITCH, Step.CANARY, Step.SERVE)


@asynccontextmanager
async def running() -> AsyncIterator[Bench]:
    bench, stop = Bench(), asyncio.Event()
    bench.task = asyncio.create_task(bench.shell.run(stop))
    await asyncio.sleep(0.1)
    try:
        yield bench
    finally:
        stop.set()
        with suppress(asyncio.CancelledError):
            await bench.task


def scenario(main: Any) -> Any:
    """A test that gets a running shell, in virtual time."""

    def test() -> None:
        async def body() -> None:
            async with running() as bench:
                await main(bench)

        run(body())

    test.__name__, test.__doc__ = main.__name__, main.__doc__
    return test


@scenario
async def test_a_joiner_comes_to_serve(bench: Bench) -> None:
    assert bench.state() is MemberState.STANDBY
    await bench.join()
    assert bench.state() is MemberState.SERVING
    assert bench.member.incarnation == bench.engine.incarnation
    assert bench.registrar.data is not None
    assert bench.registrar.data["epoch"] == "1"
    assert bench.registrar.data["rank"] == "1"


def card(bench: Bench) -> tuple[str, ...]:
    data = bench.registrar.data or {}
    return tuple(data.get(name, "") for name in ("epoch", "rank", "width"))


@scenario
async def test_the_card_of_a_rank_that_stays_names_the_new_epoch(bench: Bench) -> None:
    await bench.join()
    assert card(bench) == ("1", "1", "2")
    await bench.commit(bench.topology(2))
    await asyncio.sleep(1.0)
    assert card(bench) == ("1", "1", "2"), "its engine has not switched yet"
    bench.engine.topology = bench.topology(2)
    await asyncio.sleep(1.0)
    assert card(bench) == ("2", "1", "2")


@scenario
async def test_a_new_placement_of_the_same_epoch_changes_no_card(bench: Bench) -> None:
    await bench.join()
    before = bench.registrar.registrations
    await bench.commit(replace(bench.topology(1), placement=1))
    await asyncio.sleep(1.0)
    assert bench.registrar.registrations == before


@scenario
async def test_a_card_that_dynamo_did_not_take_is_tried_again(bench: Bench) -> None:
    await bench.join()
    bench.engine.topology = bench.topology(2)
    bench.registrar.failures = 2
    await bench.commit(bench.topology(2))
    await asyncio.sleep(3.0)
    assert card(bench) == ("2", "1", "2")


@scenario
async def test_what_dynamo_has_dropped_is_registered_again(bench: Bench) -> None:
    await bench.join()
    before = bench.registrar.registrations
    bench.registrar.data, bench.registrar.failures = None, 1
    await asyncio.sleep(3.0)
    assert card(bench) == ("1", "1", "2")
    assert bench.registrar.registrations == before + 2, "once more after a failure"
    await bench.must(Step.DRAIN)
    await asyncio.sleep(3.0)
    assert bench.registrar.data is None, "a rank that leaves is not brought back"


@scenario
async def test_a_rank_that_leaves_gets_no_new_card(bench: Bench) -> None:
    await bench.join()
    await bench.must(Step.DRAIN)
    bench.engine.topology = bench.topology(2)
    await bench.commit(bench.topology(2))
    await asyncio.sleep(1.0)
    assert bench.registrar.data is None


@scenario
async def test_connect_waits_for_the_peers_endpoint(bench: Bench) -> None:
    await bench.must(Step.RESTORE, Step.OPEN)
    connecting = asyncio.create_task(bench.command(Step.CONNECT))
    await asyncio.sleep(1.0)
    assert "connect_epoch" not in bench.calls()
    await bench.peer_opens()
    assert (await connecting).status is AckStatus.DONE


@scenario
async def test_endpoints_that_the_coordinator_sends_are_not_read(bench: Bench) -> None:
    await bench.must(Step.RESTORE, Step.OPEN)
    endpoints = {ME: {"address": "here"}, OTHER: {"address": "there"}}
    ack = await bench.command(Step.CONNECT, endpoints=endpoints)
    assert ack.status is AckStatus.DONE, "nobody has published any"
    assert "connect_epoch" in bench.calls()


@scenario
async def test_an_endpoint_that_was_left_out_is_a_failure(bench: Bench) -> None:
    await bench.must(Step.RESTORE, Step.OPEN)
    ack = await bench.command(Step.CONNECT, endpoints={ME: {"address": "here"}})
    assert ack.status is AckStatus.FAILED
    assert OTHER in ack.reason


@scenario
async def test_a_step_that_takes_too_long_fails_with_its_reason(bench: Bench) -> None:
    await bench.must(Step.RESTORE, Step.OPEN)
    ack = await bench.command(Step.CONNECT, deadline_s=3.0)
    assert ack.status is AckStatus.FAILED
    assert "longer than 3 s" in ack.reason


@scenario
async def test_the_engines_reason_is_passed_on(bench: Bench) -> None:
    await bench.must(Step.RESTORE)
    bench.engine.failures["open_epoch"] = EngineError("no more sockets")
    ack = await bench.command(Step.OPEN)
    assert (ack.status, ack.reason) == (AckStatus.FAILED, "EngineError: no more sockets")


@scenario
async def test_a_step_without_an_engine_fails(bench: Bench) -> None:
    assert (await bench.command(Step.OPEN)).status is AckStatus.FAILED


@scenario
async def test_a_command_that_is_repeated_runs_once(bench: Bench) -> None:
    await bench.must(Step.RESTORE, Step.OPEN)
    bench.seq -= 1
    again = await bench.command(Step.OPEN, token=2)
    assert (again.status, again.token) == (AckStatus.DONE, 2)
    assert bench.calls().count("open_epoch") == 1


@scenario
async def test_an_older_token_is_refused_in_silence(bench: Bench) -> None:
    await bench.command(Step.RESTORE, token=5)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(5.0):
            await bench.command(Step.OPEN, token=4)
    assert bench.calls() == []


@scenario
async def test_a_newer_command_takes_the_place_of_one_that_hangs(bench: Bench) -> None:
    await bench.must(Step.RESTORE, Step.OPEN)
    await bench.send(Step.CONNECT, deadline_s=1000.0)
    await asyncio.sleep(1.0)
    async with asyncio.timeout(5.0):
        assert (await bench.command(Step.ABORT)).status is AckStatus.DONE
    assert bench.state() is MemberState.STANDBY


@scenario
async def test_an_aborted_joiner_is_on_standby_again(bench: Bench) -> None:
    await bench.must(Step.RESTORE, Step.OPEN, Step.ABORT, Step.ABORT)
    assert bench.member == MemberRecord(ME, 1, "host", 1, MemberState.STANDBY)
    assert not (await bench.agent.slots())[1].incarnation
    assert KEYS.endpoint(Epoch(1), ME) not in bench.store.data
    await bench.join()


@scenario
async def test_another_operation_gets_an_engine_of_its_own(bench: Bench) -> None:
    await bench.must(Step.RESTORE, Step.RESTORE)
    first = bench.member.incarnation
    bench.operation_id = OperationId("next")
    await bench.must(Step.RESTORE)
    assert bench.member.incarnation not in (first, "")
    assert len(bench.engines) == 2


@scenario
async def test_a_rank_has_one_endpoint_at_a_time(bench: Bench) -> None:
    await bench.must(Step.RESTORE, Step.OPEN)
    await bench.command(Step.OPEN, topology=to_json(bench.topology(2)))
    assert KEYS.endpoint(Epoch(1), ME) not in bench.store.data
    assert KEYS.endpoint(Epoch(2), ME) in bench.store.data


@scenario
async def test_an_aborted_retained_rank_serves_on(bench: Bench) -> None:
    await bench.join()
    await bench.must(Step.FREEZE)
    assert (await bench.command(Step.ABORT, epoch=2)).status is AckStatus.DONE
    assert bench.calls()[-2:] == ["abort_epoch", "freeze"]
    assert not bench.engine.frozen
    assert bench.registrar.data is not None


@scenario
async def test_a_leaver_drains_and_is_parked(bench: Bench) -> None:
    await bench.join()
    await bench.must(Step.DRAIN)
    assert (bench.registrar.data, bench.state()) == (None, MemberState.LEAVING)
    await bench.commit(bench.topology(2, me=False))
    await asyncio.sleep(1.0)
    assert bench.state() is MemberState.LEAVING, "its operation parks it, nobody else"
    parked = await bench.command(Step.PARK)
    assert parked.payload == {"parked": True, "not_parked": ""}
    assert bench.state() is MemberState.STANDBY
    slot = (await bench.agent.slots())[1]
    assert (slot.incarnation, slot.state) == ("", SlotState.PARKED)


@scenario
async def test_an_engine_that_did_not_leave_by_itself_is_not_parked(bench: Bench) -> None:
    await bench.join()
    await bench.commit(bench.topology(2, me=False))
    ended = await bench.command(Step.PARK)
    assert ended.payload == {"parked": False, "not_parked": ""}
    assert bench.state() is MemberState.STANDBY
    assert (await bench.agent.slots())[1].state is SlotState.FREE


@scenario
async def test_an_aborted_leaver_serves_again(bench: Bench) -> None:
    await bench.join()
    await bench.must(Step.DRAIN)
    for _ in range(2):
        assert (await bench.command(Step.ABORT, epoch=2)).status is AckStatus.DONE
    assert bench.state() is MemberState.SERVING
    assert not bench.engine.draining
    assert bench.registrar.data is not None


@scenario
async def test_a_dead_engine_is_said_at_once_and_given_up_when_evicted(bench: Bench) -> None:
    await bench.join()
    bench.engine.die()
    await asyncio.sleep(0.1)
    assert bench.state() is MemberState.SERVING
    assert "dead" in bench.member.lost_reason
    assert bench.registrar.data is None
    await bench.commit(bench.topology(2, me=False))
    await asyncio.sleep(0.1)
    assert bench.member == MemberRecord(ME, 1, "host", 1, MemberState.STANDBY)


@scenario
async def test_a_serving_rank_that_is_evicted_gives_up_its_engine(bench: Bench) -> None:
    await bench.join()
    await bench.commit(bench.topology(2, me=False))
    await asyncio.sleep(0.1)
    assert (bench.registrar.data, bench.state()) == (None, MemberState.STANDBY)
    assert not (await bench.agent.slots())[1].incarnation


@scenario
async def test_a_rank_serves_on_without_etcd_and_opens_a_new_session_after_it(
    bench: Bench,
) -> None:
    await bench.join()
    bench.store.down = True
    await asyncio.sleep(6 * TTL_S)
    assert bench.registrar.data is not None
    assert bench.desk.is_open
    bench.store.down = False
    bench.store.break_watches()
    await asyncio.sleep(2.0)
    assert bench.state() is MemberState.SERVING
    assert bench.registrar.data is not None


@scenario
async def test_a_leaver_that_loses_its_session_stays_until_it_is_evicted(bench: Bench) -> None:
    await bench.join()
    await bench.must(Step.DRAIN)
    bench.store.expire(bench.shell_lease())
    await asyncio.sleep(2 * TTL_S)
    assert bench.state() is MemberState.SERVING
    assert not bench.engine.draining
    await bench.commit(bench.topology(2, me=False))
    await asyncio.sleep(1.0)
    assert bench.state() is MemberState.STANDBY


@scenario
async def test_a_shell_that_was_evicted_without_a_session_is_on_standby(bench: Bench) -> None:
    await bench.join()
    bench.store.down = True
    await asyncio.sleep(2 * TTL_S)
    bench.store.down = False
    bench.store.break_watches()
    await bench.commit(bench.topology(2, me=False))
    await asyncio.sleep(2.0)
    assert bench.state() is MemberState.STANDBY
    assert not (await bench.agent.slots())[1].incarnation


def test_a_slot_has_one_owner() -> None:
    async def main() -> None:
        async with running() as bench:
            second = Bench()
            second.presence._store = bench.store
            second.store = bench.store
            claiming = asyncio.create_task(_claim(second))
            await asyncio.sleep(3 * TTL_S)
            assert not claiming.done()
        await claiming

    async def _claim(second: Bench) -> None:
        from dynamo_elastic.coordinator.session import Session

        await second.presence.claim(await Session.open(second.store, TTL_S))

    run(main())


@scenario
async def test_a_shell_that_starts_again_adopts_the_engine_of_its_rank(bench: Bench) -> None:
    await bench.join()
    await bench.must(Step.FREEZE, Step.DRAIN)
    await bench.store.txn([], [Delete(KEYS.command(ME))])
    again, stop = bench.another_shell(), asyncio.Event()
    bench.task.cancel()
    task = asyncio.create_task(again.run(stop))
    await asyncio.sleep(3.0)
    engine = bench.engine
    assert (bench.member.state, bench.member.incarnation) == (
        MemberState.SERVING,
        engine.incarnation,
    )
    assert (engine.draining, engine.frozen) == (False, False)
    assert len(bench.engines) == 1
    stop.set()
    await task


@scenario
async def test_an_engine_that_its_topology_does_not_know_is_not_adopted(bench: Bench) -> None:
    await bench.join()
    topology = bench.topology(2)
    other = replace(topology.members[1], incarnation=Incarnation("another life"))
    await bench.commit(replace(topology, members=(topology.members[0], other)))
    again, stop = bench.another_shell(), asyncio.Event()
    bench.task.cancel()
    task = asyncio.create_task(again.run(stop))
    await asyncio.sleep(3.0)
    assert bench.member.state is MemberState.STANDBY
    assert not (await bench.agent.slots())[1].incarnation
    stop.set()
    await task


@scenario
async def test_a_canary_without_all_experts_is_nobodys_fault(bench: Bench) -> None:
    await bench.join()
    bench.engine.failures["canary"] = EngineError("experts [3] are lost with their rank")
    ack = await bench.command(Step.CANARY)
    assert ack.status is AckStatus.FAILED
    bench.engine.lost_experts = (3,)
    ack = await bench.command(Step.CANARY)
    assert (ack.status, ack.payload) == (AckStatus.DONE, {"incomplete": True})


@scenario
async def test_peers_that_do_not_answer_are_told_of(bench: Bench) -> None:
    await bench.join()
    bench.engine.masked = (Rank(0),)
    await asyncio.sleep(1.0)
    assert (bench.member.masks, bench.member.masks_in) == ((OTHER,), 1)
    bench.engine.masked = ()
    await asyncio.sleep(1.0)
    assert bench.member.masks == ()


@scenario
async def test_the_engine_of_an_earlier_shell_is_ended(bench: Bench) -> None:
    await bench.agent.start_engine(1, ME, OperationId("old"), Epoch(1), timeout_s=1.0)
    await bench.participant.resume()
    assert not (await bench.agent.slots())[1].incarnation


@scenario
async def test_the_planner_hears_of_the_load(bench: Bench) -> None:
    await bench.join()
    await asyncio.sleep(1.0)
    assert bench.registrar.loads


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (MemberState.STANDBY, MemberState.SERVING),
        (MemberState.STANDBY, MemberState.LEAVING),
        (MemberState.JOINING, MemberState.LEAVING),
        (MemberState.SERVING, MemberState.JOINING),
        (MemberState.LEAVING, MemberState.JOINING),
    ],
)
def test_illegal_moves_are_refused(before: MemberState, after: MemberState) -> None:
    with pytest.raises(IllegalTransition):
        check_member_move(before, after)


async def end_operation(bench: Bench) -> None:
    """What the coordinator does in its last transaction."""
    await bench.store.txn([], [Delete(KEYS.command(ME))])
    await asyncio.sleep(1.0)


@scenario
async def test_a_joiner_that_was_never_told_to_abort_stands_by_again(bench: Bench) -> None:
    await bench.must(Step.RESTORE, Step.OPEN)
    await end_operation(bench)
    assert bench.state() is MemberState.STANDBY
    assert not (await bench.agent.slots())[1].incarnation


@scenario
async def test_a_leaver_that_was_never_told_to_abort_serves_again(bench: Bench) -> None:
    await bench.join()
    await bench.must(Step.FREEZE, Step.DRAIN)
    await end_operation(bench)
    assert bench.state() is MemberState.SERVING
    assert bench.registrar.data is not None
    assert not bench.engine.draining
    assert not bench.engine.frozen


@scenario
async def test_what_is_left_is_undone_as_soon_as_the_engine_can(bench: Bench) -> None:
    await bench.join()
    await bench.must(Step.FREEZE)
    bench.engine.failures["freeze"] = EngineError("busy")
    await end_operation(bench)
    assert bench.engine.frozen
    del bench.engine.failures["freeze"]
    await asyncio.sleep(1.0)
    assert not bench.engine.frozen


@scenario
async def test_an_image_in_quarantine_is_not_used(bench: Bench) -> None:
    assert (await bench.command(Step.RESTORE)).payload["tier"] == Tier.IMAGE
    bench.operation_id = OperationId("next")
    assert (await bench.command(Step.RESTORE, cold=True)).payload["tier"] == Tier.COLD


@scenario
async def test_a_rank_that_waits_for_others_to_switch_says_so(bench: Bench) -> None:
    await bench.peer_opens()
    await bench.must(Step.RESTORE, Step.OPEN, Step.CONNECT)
    await bench.commit(bench.topology(1))
    bench.engine.failures["wait_switched"] = EngineError("no switch")
    ack = await bench.command(Step.SWITCH)
    assert (ack.status, ack.payload) == (AckStatus.DONE, {"switched": False})


@scenario
async def test_a_rank_withdraws_unless_it_has_switched(bench: Bench) -> None:
    await bench.join()
    assert (await bench.command(Step.WITHDRAW)).payload == {"switched": True}
    assert (await bench.command(Step.WITHDRAW, epoch=2)).payload == {"switched": False}


def registered(instance_id: int, **changes: str) -> Put:
    """A card as Dynamo keeps it, on the lease that it is named by."""
    known = {"deployment": KEYS.deployment, "epoch": "1", "incarnation": "gone"}
    data = {"dynamo_elastic": json.dumps(known | changes)}
    card = {"card_json": {"runtime_config": {"runtime_data": data}}}
    key = f"v1/mdc/ns/backend/generate/{instance_id:x}"
    return Put(key, json.dumps(card).encode(), LeaseId(instance_id))


async def cards(bench: Bench) -> set[int]:
    stored = await bench.store.get_prefix("v1/mdc/")
    return {int(v.key.rpartition("/")[2], 16) for v in stored}


def alone(bench: Bench, epoch: int) -> Topology:
    """This shell is rank 0, and the only one."""
    return Topology(Epoch(epoch), (Member(ME, bench.engine.incarnation, (0, 1)),))


@scenario
async def test_rank_0_takes_away_what_the_evicted_have_left_in_dynamo(bench: Bench) -> None:
    await bench.join()
    leases = [await bench.store.grant_lease(60) for _ in range(5)]
    theirs, later, foreign, evicted, mine = leases
    puts = [
        registered(theirs, deployment="another"),
        registered(later, epoch="3"),
        Put(f"v1/mdc/ns/backend/generate/{foreign:x}", b'{"card_json": {}}', foreign),
        registered(evicted),
        registered(mine, incarnation=bench.engine.incarnation),
    ]
    await bench.store.txn([], puts)
    bench.registrar.instance_id = mine
    bench.engine.topology = bench.topology(2)
    await bench.commit(bench.topology(2))
    await asyncio.sleep(1.0)
    assert await cards(bench) == set(leases), "that is for rank 0"
    bench.engine.topology = alone(bench, 2)
    await bench.commit(alone(bench, 2))
    await asyncio.sleep(1.0)
    assert await cards(bench) == set(leases) - {evicted}


@scenario
async def test_a_shell_takes_away_what_the_one_before_it_has_left(bench: Bench) -> None:
    await bench.join()
    before, now = [await bench.store.grant_lease(60) for _ in range(2)]
    mine = bench.engine.incarnation
    await bench.store.txn([], [registered(i, incarnation=mine) for i in (before, now)])
    bench.registrar.instance_id = now
    bench.store.expire(bench.shell_lease())
    await asyncio.sleep(2.0)
    assert bench.state() is MemberState.SERVING
    assert await cards(bench) == {now}
