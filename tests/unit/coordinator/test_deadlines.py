"""Operations end in time: as a whole, when nobody switches, and when an abort can't finish."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from dynamo_elastic.coordinator.decide import Idle, Operate, decide
from dynamo_elastic.coordinator.records import OperationRecord, TargetRecord
from dynamo_elastic.coordinator.scale import Scaler
from dynamo_elastic.coordinator.status import Status
from dynamo_elastic.errors import EngineError, ScaleAborted
from dynamo_elastic.phases import Kind, Phase, Step
from dynamo_elastic.testing import virtual_time
from dynamo_elastic.testing.coordination import CONFIG, SHAPE, World, world
from dynamo_elastic.testing.participants import FakeShell, Misbehaviour, Script
from dynamo_elastic.testing.store import FakeStore
from dynamo_elastic.testing.virtual_time import wall_clock


async def up_to(here: World, ranks: int) -> Scaler:
    scaler = await here.lead()
    await here.scale(scaler, ranks)
    return scaler


def content(status: Status) -> Status:
    """The width in force is what is wanted."""
    return replace(status, target=TargetRecord("", status.width, "test", 0.0))


def test_an_operation_ends_at_its_own_deadline() -> None:
    async def main() -> None:
        async with world(FakeStore()) as here:
            config = CONFIG.model_copy(update={"operation_timeout_s": 12.0})
            scaler = replace(await up_to(here, 2), config=config)
            here[2].script = Script({Step.RESTORE: Misbehaviour.SILENT})
            began_s = asyncio.get_running_loop().time()
            with pytest.raises(ScaleAborted, match="restore: no answer from slot2"):
                await here.scale(scaler, 3)
            assert asyncio.get_running_loop().time() - began_s < 14
            assert await here.faults() == []

    virtual_time.run(main())


def test_past_its_deadline_it_stops_moving_experts_and_they_are_moved_later() -> None:
    async def main() -> None:
        async with world(FakeStore()) as here:
            scaler = await up_to(here, 2)
            late = replace(scaler, config=CONFIG.model_copy(update={"operation_timeout_s": 1.0}))
            here[1].script = Script({Step.SWITCH: Misbehaviour.LATE})
            record = await here.scale(late, 3)
            assert record.phase is Phase.DONE
            assert record.failure.startswith("rebalance stopped: the operation took")
            action = decide(content(await here.status()), SHAPE, CONFIG, wall_clock())
            assert isinstance(action, Operate)
            assert action.request.plan.kind is Kind.REBALANCE
            before = await here.status()
            record = await scaler.scale(action.request, before)
            assert (record.phase, record.failure) == (Phase.DONE, "")
            after = await here.status()
            assert after.epoch == before.epoch, "nothing was decided"
            assert isinstance(decide(content(after), SHAPE, CONFIG, wall_clock()), Idle)
            assert await here.faults() == []

    virtual_time.run(main())


def test_a_rebalance_uses_no_epoch_even_if_others_were_used_up_meanwhile() -> None:
    async def main() -> None:
        async with world(FakeStore()) as here:
            scaler = await up_to(here, 2)
            for shell in here.shells.values():
                shell.script = Script({Step.PUSH_EXPERTS: Misbehaviour.FAIL})
            await here.scale(scaler, 3)
            here[3].script = Script({Step.RESTORE: Misbehaviour.FAIL})
            with pytest.raises(ScaleAborted):
                await here.scale(scaler, 4)
            before = await here.status()
            action = decide(content(before), SHAPE, CONFIG, wall_clock())
            assert isinstance(action, Operate)
            await scaler.scale(action.request, before)
            assert (await here.status()).epoch == before.epoch == 3

    virtual_time.run(main())


def test_a_member_that_can_not_be_told_to_abort_is_lost() -> None:
    async def main() -> None:
        async with world(FakeStore()) as here:
            scaler = await up_to(here, 2)
            here[2].script = Script({Step.RESTORE: Misbehaviour.FAIL})
            here[1].__class__ = Stubborn
            with pytest.raises(ScaleAborted):
                await here.scale(scaler, 3)
            status = await here.status()
            assert status.last is not None
            assert status.last.phase is Phase.ABORTED
            assert list(status.lost_reasons()) == ["slot1"]

    virtual_time.run(main())


def test_an_abort_that_fails_once_is_asked_for_again() -> None:
    async def main() -> None:
        async with world(FakeStore()) as here:
            scaler = await up_to(here, 2)
            here[2].script = Script({Step.RESTORE: Misbehaviour.FAIL})
            here[1].script = Script({Step.ABORT: Misbehaviour.FAIL})
            with pytest.raises(ScaleAborted):
                await here.scale(scaler, 3)
            assert (await here.status()).lost_reasons() == {}
            assert await here.faults() == []

    virtual_time.run(main())


class Stubborn(FakeShell):
    """Never aborts."""

    async def _abort(self, command: object) -> dict[str, object]:
        raise EngineError("the step loop is stuck in a step")


class Waiting(FakeShell):
    """Has seen the decision, and waits for others to switch."""

    async def _switch(self, command: object) -> dict[str, object]:
        return {"switched": False}

    async def _withdraw(self, command: object) -> dict[str, object]:
        return {"switched": False}


class Late(FakeShell):
    """Switches just when it is told to withdraw."""

    asked = False

    async def _switch(self, command: object) -> dict[str, object]:
        return {"switched": self.asked}

    async def _withdraw(self, command: object) -> dict[str, object]:
        Late.asked = True
        return {"switched": True}


async def nobody_switches(here: World, kind: type[FakeShell]) -> OperationRecord:
    """A scale-up from two ranks, in which nobody has switched when SWITCH ends."""
    scaler = await up_to(here, 2)
    for shell in here.shells.values():
        shell.__class__ = kind
    record = await here.scale(scaler, 3)
    ran = {w: [step for *_, step in shell.ran] for w, shell in here.shells.items()}
    asked = [w for w, steps in ran.items() if Step.WITHDRAW in steps]
    assert asked == ["slot0", "slot1"], "the retained ranks decide"
    return record


def test_a_decision_is_withdrawn_when_nobody_has_switched() -> None:
    async def main() -> None:
        async with world(FakeStore()) as here:
            record = await nobody_switches(here, Waiting)
            status = await here.status()
            assert status.in_force == record.served == record.plan.before
            assert record.lost == ("slot2",), "joiners never served"
            assert status.topology is not None
            assert status.topology.epoch == 2, "the decision stays stored until it is superseded"
            action = decide(status, SHAPE, CONFIG, wall_clock())
            assert isinstance(action, Operate)
            assert action.request.plan.after.epoch == 3
            assert action.request.plan.after.worker_ids == ("slot0", "slot1")
            assert action.request.discarded == ("slot2",)

    virtual_time.run(main())


def test_a_switch_that_happens_just_then_is_followed() -> None:
    async def main() -> None:
        async with world(FakeStore()) as here:
            record = await nobody_switches(here, Late)
            assert (record.served, record.lost) == (None, ())
            assert (await here.status()).withdrawn is None

    virtual_time.run(main())


def test_a_successor_withdraws_what_was_being_withdrawn() -> None:
    """Some may have done so already: nobody is asked to switch again."""

    async def main() -> None:
        async with world(FakeStore()) as here:
            scaler = await up_to(here, 2)
            for shell in here.shells.values():
                shell.__class__ = Waiting
            here[1].script = Script({Step.WITHDRAW: Misbehaviour.SILENT})
            scaling = asyncio.create_task(here.scale(scaler, 3))
            while Step.WITHDRAW not in [step for *_, step in here[1].ran]:
                await asyncio.sleep(0.01)
            scaling.cancel()
            await asyncio.wait({scaling})
            await here.depose()
            before = [step for *_, step in here[0].ran]
            record = await (await here.lead()).recover()
            assert record is not None
            assert record.phase is Phase.DONE
            assert record.served == record.plan.before
            assert [step for *_, step in here[0].ran][len(before) :] == [Step.WITHDRAW]

    virtual_time.run(main())
