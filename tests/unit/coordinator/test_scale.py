"""A scale operation leaves one topology in force, whatever fails and wherever it crashes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from dynamo_elastic import failpoints
from dynamo_elastic.coordinator.records import encode
from dynamo_elastic.coordinator.store import Put
from dynamo_elastic.errors import GuardFailed, LeadershipLost, ScaleAborted
from dynamo_elastic.phases import PHASES, Kind, Phase, Step, Who, phases_of
from dynamo_elastic.testing import virtual_time
from dynamo_elastic.testing.coordination import Crash, World, world
from dynamo_elastic.testing.participants import Misbehaviour, Script
from dynamo_elastic.testing.store import FakeStore, Fault, FaultKind, FaultyStore
from dynamo_elastic.topology import Topology, move_rounds
from dynamo_elastic.types import Epoch, WorkerId

WIDTH = {Kind.BOOT: 2, Kind.UP: 4, Kind.DOWN: 2}
BEFORE = {Kind.BOOT: (), Kind.UP: (2,), Kind.DOWN: (4,)}
"""Operations that make the world in which one of this kind is tried."""

# Who of the four slots takes part, so that a test can pick one: slots 0, 1 stay, 2, 3 come or go.
ACTOR = {
    Who.RETAINED: 1,
    Who.JOINERS: 2,
    Who.LEAVERS: 3,
    Who.LIVE_LEAVERS: 3,
    Who.NEXT: 0,
    Who.BEFORE: 1,
    Who.PROBED: 2,
}
CASES = [
    (kind, spec.phase, step, who)
    for kind, specs in PHASES.items()
    if kind is not Kind.REBALANCE
    for spec in specs
    for step, who in spec.steps
    if not (kind is Kind.BOOT and step in (Step.FREEZE, Step.PARK))
    # Nobody was lost here, in whose place a joiner would come.
    and who is not Who.LOADERS
]
KINDS = [Kind.BOOT, Kind.UP, Kind.DOWN]


@pytest.fixture(autouse=True)
def no_hook() -> Iterator[None]:
    yield
    failpoints.set_hook(None)


def crash_at(name: str) -> None:
    def hook(at: str) -> None:
        if at == name:
            raise Crash(at)

    failpoints.set_hook(hook)


async def prepare(here: World, kind: Kind) -> Topology | None:
    """Bring the world to where an operation of `kind` can be tried; its topology then."""
    scaler = await here.lead()
    for ranks in BEFORE[kind]:
        await here.scale(scaler, ranks)
    await here.depose()
    for shell in here.shells.values():
        shell.ran.clear()
    return (await here.status()).topology


def actor(kind: Kind, who: Who) -> int:
    slot = ACTOR[who]
    return slot - 1 if kind is Kind.BOOT and slot > 1 else slot


async def first_source(here: World, kind: Kind) -> WorkerId:
    """Who pushes in the first round of expert moves."""
    plan = (await here.request(WIDTH[kind]))[0].plan
    in_force = plan.before if kind is Kind.DOWN else plan.after
    return move_rounds(in_force, plan.settled)[0].moves[0].from_worker


def is_after(kind: Kind, phase: Phase) -> bool:
    order = phases_of(kind)
    return order.index(phase) >= order.index(Phase.COMMIT)


@pytest.mark.parametrize("kind", KINDS)
def test_success(kind: Kind) -> None:
    async def main() -> None:
        async with world(FakeStore()) as here:
            before = await prepare(here, kind)
            record = await here.scale(await here.lead(), WIDTH[kind])
            status = await here.status()
            assert record.phase is Phase.DONE
            assert status.last == record
            assert status.topology is not None
            assert status.topology.world_size == WIDTH[kind]
            assert status.topology.epoch == (before.epoch if before else 0) + 1 == status.epoch
            assert [p.phase for p in record.phases] == list(phases_of(kind))
            experts = [m.experts for m in record.plan.settled.members]
            assert [m.experts for m in status.topology.members] == experts
            assert await here.faults() == []

    virtual_time.run(main())


@pytest.mark.parametrize("kind", KINDS)
def test_each_participant_gets_its_steps_in_the_order_of_the_table(kind: Kind) -> None:
    async def main() -> None:
        async with world(FakeStore()) as here:
            await prepare(here, kind)
            record = await here.scale(await here.lead(), WIDTH[kind])
            table = [step for spec in PHASES[kind] for step, _ in spec.steps]
            for shell in here.shells.values():
                steps = [step for _, _, step in shell.ran if step is not Step.INSTALL]
                assert steps == [step for step in table if step in steps]
                seqs = [seq for _, seq, _ in shell.ran]
                assert seqs == sorted(set(seqs))
            assert record.safe_to_release == (record.plan.leavers if kind is Kind.DOWN else ())

    virtual_time.run(main())


@pytest.mark.parametrize("act", ["fail", "silent", "die", "engine_dies"])
@pytest.mark.parametrize(("kind", "phase", "step", "who"), CASES)
def test_a_failure_before_the_commit_undoes_all_and_after_it_nothing(
    kind: Kind, phase: Phase, step: Step, who: Who, act: str
) -> None:
    async def main() -> None:
        async with world(FakeStore()) as here:
            before = await prepare(here, kind)
            guilty = here[actor(kind, who)]
            if step is Step.PUSH_EXPERTS:
                guilty = here.shells[await first_source(here, kind)]
            guilty.script = Script({step: Misbehaviour(act)})
            scaler = await here.lead()
            if is_after(kind, phase):
                record = await here.scale(scaler, WIDTH[kind])
                assert record.phase is Phase.DONE
                status = await here.status()
                assert status.topology is not None
                assert status.topology.world_size == WIDTH[kind]
            else:
                with pytest.raises(ScaleAborted) as caught:
                    await here.scale(scaler, WIDTH[kind])
                assert caught.value.phase == phase
                status = await here.status()
                assert status.last is not None
                assert status.last.phase is Phase.ABORTED
                after = status.topology
                assert (after.epoch if after else 0) == (before.epoch if before else 0)
            assert not guilty.script.acts, "the misbehaviour never happened"
            assert (await here.status()).operation is None
            assert [f for f in await here.faults() if not f.startswith(guilty.worker_id)] == []

    virtual_time.run(main())


@pytest.mark.parametrize("act", ["duplicate", "late"])
@pytest.mark.parametrize(("kind", "phase", "step", "who"), CASES)
def test_late_and_double_answers_do_no_harm(
    kind: Kind, phase: Phase, step: Step, who: Who, act: str
) -> None:
    async def main() -> None:
        async with world(FakeStore()) as here:
            await prepare(here, kind)
            here[actor(kind, who)].script = Script({step: Misbehaviour(act)})
            record = await here.scale(await here.lead(), WIDTH[kind])
            assert (record.phase, record.lost) == (Phase.DONE, ())
            assert await here.faults() == []

    virtual_time.run(main())


@pytest.mark.parametrize(("step", "slot"), [(Step.STREAM, 1), (Step.CHECK, 3), (Step.RESTORE, 2)])
def test_wrong_bytes_never_reach_the_commit(step: Step, slot: int) -> None:
    async def main() -> None:
        async with world(FakeStore()) as here:
            await prepare(here, Kind.UP)
            act = Misbehaviour.WRONG if step is not Step.RESTORE else Misbehaviour.FAIL
            here[slot].script = Script({step: act})
            with pytest.raises(ScaleAborted):
                await here.scale(await here.lead(), 4)
            assert await here.faults() == []

    virtual_time.run(main())


def test_a_joiner_with_other_tokens_is_not_served() -> None:
    async def main() -> None:
        async with world(FakeStore()) as here:
            await prepare(here, Kind.UP)
            here[2].script = Script({Step.CANARY: Misbehaviour.WRONG})
            record = await here.scale(await here.lead(), 4)
            assert record.lost == ("slot2",)
            assert Step.SERVE not in [step for _, _, step in here[2].ran]
            assert Step.SERVE in [step for _, _, step in here[3].ran]
            assert list((await here.status()).lost_reasons()) == ["slot2"]

    virtual_time.run(main())


def failpoint_names() -> list[tuple[Kind, str, bool]]:
    """Every failpoint that a successful or an aborted operation meets; True if it has committed."""
    names = []
    for kind in KINDS:
        for phase in phases_of(kind):
            names.append((kind, f"scale.before_{phase}", is_after(kind, phase)))
            names.append((kind, f"scale.after_{phase}", is_after(kind, phase)))
        names.append((kind, "scale.before_close", True))
    return [(kind, name, done and name != "scale.before_commit") for kind, name, done in names]


@pytest.mark.parametrize(("kind", "name", "decided"), failpoint_names())
def test_a_successor_ends_what_a_crashed_coordinator_left(
    kind: Kind, name: str, decided: bool
) -> None:
    async def main() -> None:
        async with world(FakeStore()) as here:
            before = await prepare(here, kind)
            old = await here.lead()
            crash_at(name)
            with pytest.raises(Crash):
                await here.scale(old, WIDTH[kind])
            failpoints.set_hook(None)
            await here.depose()
            new = await here.lead()
            record = await new.recover()
            assert record is not None
            assert record.phase is (Phase.DONE if decided else Phase.ABORTED)
            status = await here.status()
            epoch = status.topology.epoch if status.topology else 0
            assert epoch == (before.epoch if before else 0) + decided
            assert await here.faults() == []
            with pytest.raises((LeadershipLost, GuardFailed)):
                await old.scale(*(await here.request(3)))
            assert (await here.scale(new, 3)).phase is Phase.DONE
            assert (await here.status()).epoch == record.plan.after.epoch + 1

    virtual_time.run(main())


@pytest.mark.parametrize("name", ["scale.before_abort", "scale.before_close"])
def test_a_successor_ends_an_abort(name: str) -> None:
    async def main() -> None:
        async with world(FakeStore()) as here:
            await prepare(here, Kind.UP)
            here[2].script = Script({Step.CHECK: Misbehaviour.FAIL})
            crash_at(name)
            with pytest.raises(Crash):
                await here.scale(await here.lead(), 4)
            failpoints.set_hook(None)
            await here.depose()
            record = await (await here.lead()).recover()
            assert record is not None
            assert record.phase is Phase.ABORTED
            assert await here.faults() == []

    virtual_time.run(main())


async def count_writes(kind: Kind) -> int:
    async with world(FakeStore()) as here:
        await prepare(here, kind)
        view = FaultyStore(here.store)
        await here.scale(await here.lead(view), WIDTH[kind])
        return view.writes


@pytest.mark.parametrize("fault", list(FaultKind))
@pytest.mark.parametrize("kind", KINDS)
def test_no_fault_of_the_store_at_any_write_does_harm(kind: Kind, fault: FaultKind) -> None:
    async def main(at_write: int) -> None:
        async with world(FakeStore()) as here:
            await prepare(here, kind)
            view = FaultyStore(here.store, [Fault(fault, at_write=at_write)])
            record = await here.scale(await here.lead(view), WIDTH[kind])
            assert not view.faults, "the fault never happened"
            await asyncio.sleep(2)
            assert (record.phase, record.lost) == (Phase.DONE, ())
            assert await here.faults() == []

    for at_write in range(virtual_time.run(count_writes(kind))):
        virtual_time.run(main(at_write))


@pytest.mark.parametrize("phase", phases_of(Kind.UP))
def test_a_deposed_coordinator_can_do_nothing_more(phase: Phase) -> None:
    """The first one's lease runs out in the middle; a second recovers while the first goes on."""

    async def main() -> None:
        async with world(FakeStore()) as here:
            await prepare(here, Kind.UP)
            first = await here.lead()
            deposed = asyncio.Event()

            def hook(at: str) -> None:
                if at == f"scale.before_{phase}" and not deposed.is_set():
                    deposed.set()
                    here.store.expire(here.sessions[-1].lease)  # type: ignore[attr-defined]

            failpoints.set_hook(hook)

            async def second() -> Phase | None:
                await deposed.wait()
                record = await (await here.lead()).recover()
                return record.phase if record else None

            successor = asyncio.create_task(second())
            if phase is Phase.PLAN:
                failpoints.set_hook(hook)
            with pytest.raises(LeadershipLost):
                await here.scale(first, 4)
            assert await successor in (Phase.ABORTED, Phase.DONE)
            assert await here.faults() == []

    virtual_time.run(main())


def test_the_commit_is_refused_if_the_topology_is_not_the_planned_one() -> None:
    async def main() -> None:
        async with world(FakeStore()) as here:
            before = await prepare(here, Kind.UP)
            assert before is not None
            scaler = await here.lead()

            def hook(at: str) -> None:
                if at == "scale.before_commit":
                    same = Put(here.keys.topology, encode(before))
                    here.store._apply([], [same])  # type: ignore[attr-defined]

            failpoints.set_hook(hook)
            with pytest.raises(GuardFailed):
                await here.scale(scaler, 4)
            failpoints.set_hook(None)
            record = await scaler.recover()
            assert record is not None
            assert record.phase is Phase.ABORTED
            assert (await here.status()).topology == before

    virtual_time.run(main())


def test_one_operation_at_a_time_and_none_from_an_old_view() -> None:
    async def main() -> None:
        async with world(FakeStore()) as here:
            scaler = await here.lead()
            request, old = await here.request(2)
            await scaler.scale(request, old)
            with pytest.raises(GuardFailed):
                await scaler.scale(request, old)
            assert await here.faults() == []

    virtual_time.run(main())


def test_an_aborted_move_of_experts_leaves_a_placement_that_is_true() -> None:
    """The second round fails: what is stored then has every expert on a rank that really has it."""

    async def main() -> None:
        async with world(FakeStore()) as here:
            await prepare(here, Kind.DOWN)
            for slot in (0, 1):
                here[slot].script = Script({Step.CONNECT: Misbehaviour.FAIL})
            with pytest.raises(ScaleAborted):
                await here.scale(await here.lead(), 2)
            status = await here.status()
            assert status.topology is not None
            assert status.topology.missing_experts(4) == ()
            for shell in here.shells.values():
                assert shell.routing is not None
                assert shell.routing.members == status.topology.members
            assert await here.faults() == []

    virtual_time.run(main())


def test_a_lost_rank_leaves_and_the_living_go_on() -> None:
    async def main() -> None:
        async with world(FakeStore()) as here:
            await prepare(here, Kind.DOWN)
            await here[1].lose_engine()
            record = await here.scale(await here.lead(), 3)
            assert record.plan.after.worker_ids == ("slot0", "slot2", "slot3")
            assert Step.DRAIN not in [step for _, _, step in here[1].ran]
            assert record.phase is Phase.DONE
            assert here[1].incarnation == "", "its shell was told to clean up"
            assert await here.faults() == []

    virtual_time.run(main())


def test_nothing_grows_over_fifty_cycles() -> None:
    async def main() -> None:
        store = FakeStore()
        async with world(store) as here:
            await prepare(here, Kind.UP)
            scaler = await here.lead()
            counts = set()
            for _ in range(50):
                await here.scale(scaler, 4)
                await here.scale(scaler, 2)
                counts.add(len(store.data))
            assert len(counts) == 1
            assert (await here.status()).epoch == Epoch(101)

    virtual_time.run(main())
