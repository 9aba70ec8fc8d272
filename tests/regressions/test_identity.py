"""Public reports about restored workers that are taken for somebody else, or for nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from dynamo_elastic.comm.transfer_plan import plan_dense
from dynamo_elastic.coordinator.records import (
    CommandRecord,
    EndpointRecord,
    Keys,
    MemberRecord,
    MemberState,
    encode,
    to_json,
)
from dynamo_elastic.coordinator.session import Session
from dynamo_elastic.coordinator.store import Put
from dynamo_elastic.dynamo.registrations import Registrations
from dynamo_elastic.engine.base import EngineState, Request
from dynamo_elastic.engine.reference.model import Weights
from dynamo_elastic.engine.reference.transfers import Transfers
from dynamo_elastic.errors import EngineError, RequestMoved, ScaleAborted, TransferError
from dynamo_elastic.phases import Step
from dynamo_elastic.testing.agent import FakeAgent
from dynamo_elastic.testing.coordination import world
from dynamo_elastic.testing.engine import FakeEngine, fake_tokens
from dynamo_elastic.testing.engine_process import SMALL_SHAPE
from dynamo_elastic.testing.participants import FakeShell
from dynamo_elastic.testing.store import FakeStore
from dynamo_elastic.testing.transfer import FakeFabric, FakeTransferAgent
from dynamo_elastic.testing.virtual_time import run
from dynamo_elastic.topology import Member, Topology
from dynamo_elastic.types import Epoch, FencingToken, Incarnation, OperationId, WorkerId
from dynamo_elastic.worker.base import ShellParts
from dynamo_elastic.worker.participant import Participant
from dynamo_elastic.worker.presence import Presence
from dynamo_elastic.worker.requests import RequestDesk

ME, OTHER = WorkerId("slot1"), WorkerId("slot0")
KEYS = Keys("test")
EPOCH = Epoch(1)


class Cards:
    """Dynamo, which keeps every card that it was given."""

    def __init__(self) -> None:
        self.seen: list[dict[str, str]] = []

    async def register(self, runtime_data: Any) -> int:
        self.seen.append(dict(runtime_data))
        return 1

    async def unregister(self) -> None:
        return

    def owns(self, instance_id: int) -> bool:
        return instance_id == 1

    def visible(self) -> bool:
        return True

    def report(self, load: Any) -> None:
        return


class Bench:
    """The participant of slot1 on a store in memory, and commands for it."""

    def __init__(self) -> None:
        self.store, self.cards = FakeStore(), Cards()
        self.engines: dict[str, FakeEngine] = {}
        self.agent = FakeAgent(2, self._boot)
        parts = ShellParts(
            ME,
            1,
            self.store,
            KEYS,
            self.agent,
            self.cards,
            Registrations(self.store, "ns"),
            lambda path: self.engines[path],
        )
        member = MemberRecord(ME, 1, "host", 1, MemberState.STANDBY)
        self.presence = Presence(self.store, KEYS, member)
        self.desk = RequestDesk(100)
        self.participant = Participant(parts, self.presence, self.desk)

    def _boot(self, slot: int, incarnation: Incarnation) -> str:
        self.engines[incarnation] = FakeEngine(ME, incarnation)
        return incarnation

    @property
    def engine(self) -> FakeEngine:
        return list(self.engines.values())[-1]

    def topology(self, other: str) -> Topology:
        mine = Member(ME, self.engine.incarnation, (0,))
        return Topology(EPOCH, (Member(OTHER, Incarnation(other), (1,)), mine))

    async def run(self, step: Step, **payload: Any) -> dict[str, Any]:
        if step is not Step.RESTORE and "topology" not in payload:
            payload["topology"] = to_json(self.topology("second-life"))
        command = CommandRecord(
            OperationId("op"), EPOCH, FencingToken(1), 1, step, 10.0, payload, ""
        )
        return await self.participant.run(command)

    async def other_says(self, incarnation: str) -> None:
        record = EndpointRecord(OTHER, Incarnation(incarnation), EPOCH, {"of": incarnation})
        await self.store.txn([], [Put(KEYS.endpoint(EPOCH, OTHER), encode(record))])


@asynccontextmanager
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    session = await Session.open(made.store, 5)
    await made.presence.claim(session)
    try:
        yield made
    finally:
        await made.participant.close()
        await session.close()


def scenario(main: Callable[[Bench], Any]) -> Callable[[], None]:
    """A test that gets a bench, in virtual time."""

    def test() -> None:
        async def body() -> None:
            async with bench() as made:
                await main(made)

        run(body())

    test.__name__, test.__doc__ = main.__name__, main.__doc__
    return test


@scenario
async def test_an_endpoint_of_an_earlier_life_is_not_connected_to(here: Bench) -> None:
    """modelexpress#502: a source that was restarted in place leaves a READY record behind, of the
    same worker at the same address; nobody connects to it, nor takes weights from it."""
    await here.run(Step.RESTORE)
    await here.run(Step.OPEN)
    given: list[dict[str, Any]] = []
    connect = here.engine.connect_epoch

    async def note(topology: Topology, endpoints: Any, *, timeout_s: float) -> None:
        given.append(endpoints[OTHER])
        await connect(topology, endpoints, timeout_s=timeout_s)

    here.engine.connect_epoch = note  # type: ignore[method-assign]
    await here.other_says("first-life")
    connecting = asyncio.create_task(here.run(Step.CONNECT))
    await asyncio.sleep(5.0)
    assert given == []
    await here.other_says("second-life")
    await connecting
    assert given == [{"of": "second-life"}]


@scenario
async def test_who_is_restored_says_who_it_is(here: Bench) -> None:
    """dynamo#12591: no part of what a restored worker publishes is empty: a planner that finds an
    empty worker id counts nobody, and stands still."""
    answer = await here.run(Step.RESTORE)
    assert answer["incarnation"] == here.engine.incarnation
    await here.run(Step.OPEN)
    topology = here.topology("second-life")
    await here.store.txn([], [Put(KEYS.topology, encode(topology))])
    await here.run(Step.SERVE)
    (card,) = here.cards.seen
    assert card == {
        "deployment": KEYS.deployment,
        "epoch": "1",
        "rank": "1",
        "width": "2",
        "incarnation": here.engine.incarnation,
    }
    assert all(card.values())
    assert (here.presence.record.worker_id, here.presence.record.incarnation) == (
        ME,
        here.engine.incarnation,
    )


def test_a_joiner_without_an_identity_is_no_member() -> None:
    """dynamo#12591: a restored engine that does not say which life it is fails its operation with
    that reason, instead of being served as nobody."""

    async def nobody(self: FakeShell, command: CommandRecord) -> dict[str, Any]:
        return {"incarnation": "", "tier": "image", "ready_s": 0.1, "pid": 1}

    async def main() -> None:
        async with world(FakeStore()) as here:
            scaler = await here.lead()
            await here.scale(scaler, 2)
            here[2]._restore = nobody.__get__(here[2])  # type: ignore[method-assign]
            with pytest.raises(ScaleAborted, match="no incarnation"):
                await here.scale(scaler, 3)
            assert (await here.status()).width == 2, "the width before is served on"

    run(main())


def test_a_peer_that_came_back_is_written_to_and_its_dead_life_is_forgotten() -> None:
    """dynamo#13500: a worker that was restored at the address of its dead life is another agent:
    peers forget the old one and write to the new one, by its incarnation."""
    fabric = FakeFabric()

    def rank(name: str) -> tuple[Transfers, FakeTransferAgent, Weights]:
        weights, agent = Weights(SMALL_SHAPE, 1), FakeTransferAgent(name, fabric)
        return Transfers(weights, agent), agent, weights

    ours, mine, weights = rank("slot0-a")
    first, first_agent, _ = rank("slot1-a")
    ours.add(ME, first.endpoint())
    first.close()
    second, second_agent, theirs = rank("slot1-b")
    ours.add(ME, second.endpoint())

    for name, tensor in weights.tensors.items():
        tensor.fill_(0.5 if name.startswith("dense/") else 0.0)
    plan = plan_dense(ours.dense_regions(), [OTHER], [ME], chunk_bytes=1 << 20)
    assert ours.write(list(plan)) > 0
    assert all((t == 0.5).all() for n, t in theirs.tensors.items() if n.startswith("dense/"))
    assert first_agent.bytes_received == 0
    assert second_agent.bytes_received > 0
    with pytest.raises(TransferError):
        mine.write("slot1-a", [], [], ours.weights.store.kind)
    ours.keep_only(())
    with pytest.raises(EngineError, match="not connected"):
        ours.write(list(plan))


@scenario
async def test_a_leaver_fails_no_request(here: Bench) -> None:
    """dynamo#13559: a rank that leaves aborts nothing: what is under way moves to another rank with
    all of its tokens so far, and goes on with the same ones, however long it takes."""
    await here.run(Step.RESTORE)
    engine = here.engine
    engine.state = EngineState.SERVING
    here.desk.open(engine)

    class Context:
        def __init__(self) -> None:
            self.stopped: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def id(self) -> str:
            return "r"

        def async_killed_or_stopped(self) -> asyncio.Future[bool]:
            return self.stopped

    request = {
        "token_ids": [1, 2, 3],
        "sampling_options": {"seed": 7},
        "stop_conditions": {"max_tokens": 40},
        "output_options": {},
        "eos_token_ids": [],
    }
    told: list[int] = []

    async def stream() -> None:
        async for item in here.desk.handle(request, Context()):
            told.extend(item["token_ids"])

    streaming = asyncio.create_task(stream())
    await asyncio.sleep(0.1)
    for _ in range(5):
        engine.step()
        await asyncio.sleep(0.01)
    here.desk.close()
    await engine.drain(short_tokens=4, timeout_s=0.1)
    with pytest.raises(RequestMoved):
        await streaming
    assert tuple(told) == fake_tokens(Request("r", (1, 2, 3), 40, seed=7), 5)
