"""What a shell tells of its tokens takes the last one's place: nobody may collect that."""

from __future__ import annotations

from dynamo_elastic.coordinator.records import CommandRecord, Keys, MemberRecord, MemberState
from dynamo_elastic.coordinator.session import Session
from dynamo_elastic.dynamo.base import Load
from dynamo_elastic.dynamo.registrations import Registrations
from dynamo_elastic.phases import Step
from dynamo_elastic.testing.agent import FakeAgent
from dynamo_elastic.testing.engine import FakeEngine
from dynamo_elastic.testing.store import FakeStore
from dynamo_elastic.testing.virtual_time import run
from dynamo_elastic.types import Epoch, FencingToken, OperationId, WorkerId
from dynamo_elastic.worker.base import ShellParts
from dynamo_elastic.worker.presence import Presence
from dynamo_elastic.worker.teller import TrafficTeller
from dynamo_elastic.worker.traffic import TokenMeter

ME, KEYS = WorkerId("slot0"), Keys("test")


class Nobody:
    async def register(self, runtime_data: object) -> int:
        return 1

    async def unregister(self) -> None:
        return

    def owns(self, instance_id: int) -> bool:
        return instance_id == 1

    def visible(self) -> bool:
        return True

    def report(self, load: Load) -> None:
        return


def test_one_key_a_shell_whoever_collects_it() -> None:
    async def main() -> None:
        store = FakeStore()
        parts = ShellParts(
            ME,
            0,
            store,
            KEYS,
            FakeAgent(1),
            Nobody(),
            Registrations(store, "ns"),
            lambda _: FakeEngine(ME),
        )
        presence = Presence(store, KEYS, MemberRecord(ME, 0, "host", 1, MemberState.STANDBY))
        session = await Session.open(store, 5)
        await presence.claim(session)
        meter = TokenMeter()
        teller = TrafficTeller(parts, presence, meter)
        for number in range(3):
            operation = OperationId(f"up-{number}")
            command = CommandRecord(
                operation, Epoch(1), FencingToken(1), 1, Step.FREEZE, 1.0, {}, ""
            )
            teller.see(command)
            stream = meter.stream(f"r{number}")
            stream.tokens(1)
            stream.tokens(1)
            await teller.tell()
            told = [v.key for v in await store.get_prefix(f"{KEYS.prefix}traffic/")]
            assert told == [KEYS.traffic(operation, ME)]
        await session.close()

    run(main())
