"""Public reports about scale operations that end badly, played on our coordinator and shells."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_elastic import failpoints
from dynamo_elastic.coordinator.main_loop import Coordinator, Deployment
from dynamo_elastic.coordinator.records import (
    AckRecord,
    AckStatus,
    Keys,
    OutcomeStatus,
    TargetOutcome,
    decode,
    encode,
)
from dynamo_elastic.coordinator.store import Put
from dynamo_elastic.coordinator.targets import request_scale, wait_outcome
from dynamo_elastic.coordinator.timeline import Timeline
from dynamo_elastic.errors import TargetRefused
from dynamo_elastic.phases import Phase, Step
from dynamo_elastic.testing import simulation_faults, virtual_time
from dynamo_elastic.testing.coordination import CONFIG, SHAPE, World, world
from dynamo_elastic.testing.participants import FakeShell, Misbehaviour, Script, running
from dynamo_elastic.testing.simulation import Schedule, ShufflingLoop, SimulatedDeployment
from dynamo_elastic.testing.store import FakeStore
from dynamo_elastic.testing.virtual_time import wall_clock
from dynamo_elastic.topology import EngineShape, PlanInput, Topology, plan_scale
from dynamo_elastic.types import Epoch, Incarnation, WorkerId

TIMEOUT_S = 300.0


@asynccontextmanager
async def coordinated(shells: int = 4) -> AsyncIterator[World]:
    """Two ranks in force, a coordinator that follows targets, the other shells on standby."""
    async with world(FakeStore(), shells) as here:
        deployment = Deployment(Keys("test"), CONFIG, SHAPE, Timeline(None), wall_clock)
        task = asyncio.create_task(Coordinator(here.store, deployment, "c").run())
        try:
            await here.until(2, timeout_s=TIMEOUT_S)
            yield here
        finally:
            task.cancel()
            await asyncio.wait({task})


async def scale(here: World, ranks: int) -> TargetOutcome:
    request_id = await request_scale(here.store, here.keys, ranks, "test")
    return await wait_outcome(here.store, here.keys, request_id, timeout_s=TIMEOUT_S)


async def serves(here: World, ranks: int) -> None:
    """At rest at that width, with nothing left of what went before."""
    await here.until(ranks, timeout_s=TIMEOUT_S)
    assert await here.faults() == []


PREPARING = (Step.RESTORE, Step.OPEN, Step.CONNECT, Step.CHECK)
DECIDED = (Step.SWITCH, Step.CANARY, Step.SERVE)
HARMS = (Misbehaviour.DIE, Misbehaviour.ENGINE_DIES, Misbehaviour.FAIL, Misbehaviour.SILENT)


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("step", PREPARING)
def test_a_failed_preparation_is_undone(step: Step, harm: Misbehaviour) -> None:
    """vllm#53947: a scale that fails while it is prepared leaves nothing "already active": the
    ranks in force serve on, and the next scale is an operation like any other."""

    async def main() -> None:
        async with coordinated() as here:
            here[3].script = Script({step: harm})
            assert (await scale(here, 3)).status is OutcomeStatus.REACHED  # slot2 alone
            here[3].script = Script({step: harm})
            await scale(here, 4)
            if not here[3].alive:
                async with running([FakeShell(here.store, here.keys, 3)]) as (fresh,):
                    here.shells[fresh.worker_id] = fresh
                    await scale(here, 4)
                    await serves(here, 4)
            else:
                if here[3].incarnation and here[3].in_force is None:
                    await here[3].stand_by()
                await scale(here, 4)
                await serves(here, 4)

    virtual_time.run(main())


@pytest.mark.parametrize("harm", [Misbehaviour.FAIL, Misbehaviour.WRONG, Misbehaviour.SILENT])
@pytest.mark.parametrize("step", DECIDED)
def test_a_failed_commit_heals(step: Step, harm: Misbehaviour) -> None:
    """vllm#50778: a commit that fails ends all the same, whoever failed is put out, and what was
    asked for is had: no flag that only a success would clear keeps anybody from serving."""

    async def main() -> None:
        async with coordinated() as here:
            here[2].script = Script({step: harm})
            await scale(here, 4)
            status = await here.status()
            assert status.operation is None
            assert {WorkerId("slot0"), WorkerId("slot1")} <= set(status.topology.worker_ids)  # type: ignore[union-attr]
            if here[2].in_force is None or here[2].worker_id in status.lost_reasons():
                await here[2].stand_by()
            await scale(here, 3)
            await scale(here, 2)
            await serves(here, 2)

    virtual_time.run(main())


@pytest.mark.parametrize("step", [*PREPARING, *DECIDED])
def test_a_scale_that_nobody_answers_has_a_deadline(step: Step) -> None:
    """dynamo#14053: a joiner that never answers wedges nothing: the operation ends by its own
    deadline, and another scale is accepted then."""

    async def main() -> None:
        async with coordinated() as here:
            here[3].script = Script({step: Misbehaviour.SILENT})
            began_s = asyncio.get_running_loop().time()
            await request_scale(here.store, here.keys, 4, "test")
            while (await here.status()).operation is None:
                await asyncio.sleep(0.05)
            first = (await here.status()).operation
            while (now := (await here.status()).operation) and now == first:
                await asyncio.sleep(0.05)
            bound_s = CONFIG.operation_timeout_s + CONFIG.restore_timeout_s
            assert asyncio.get_running_loop().time() - began_s < bound_s
            assert (await scale(here, 2)).status in (OutcomeStatus.REACHED, OutcomeStatus.UNCHANGED)

    virtual_time.run(main())


def test_two_scales_at_once_are_two_operations_one_after_the_other() -> None:
    """dynamo#8216: of two scales that are asked for at the same time neither breaks the other: the
    newest wins, and nobody waits for what the other one took away."""

    async def main() -> None:
        async with coordinated() as here:
            began_s = asyncio.get_running_loop().time()
            outcomes = await asyncio.gather(*(scale(here, n) for n in (4, 3, 4, 3)))
            assert asyncio.get_running_loop().time() - began_s < 60
            assert outcomes[-1].status is OutcomeStatus.REACHED
            assert {o.status for o in outcomes[:-1]} <= {
                OutcomeStatus.SUPERSEDED,
                OutcomeStatus.REACHED,
            }
            await serves(here, 3)

    virtual_time.run(main())


@pytest.mark.parametrize("phase", [Phase.RESTORE, Phase.STREAM, Phase.COMMIT, Phase.REBALANCE])
def test_a_decision_during_an_operation_waits_its_turn(phase: Phase) -> None:
    """dynamo#9774: a decision that comes while an operation is under way is kept, not lost and not
    mixed into it; it is acted on from the width that is then in force."""

    async def main() -> None:
        async with coordinated() as here:
            asked: list[asyncio.Task[TargetOutcome]] = []

            def ask(name: str) -> None:
                if name == f"scale.before_{phase}" and not asked:
                    asked.append(asyncio.create_task(scale(here, 2)))

            failpoints.set_hook(ask)
            try:
                await scale(here, 4)
            finally:
                failpoints.set_hook(None)
            assert (await asked[0]).status in (OutcomeStatus.REACHED, OutcomeStatus.UNCHANGED)
            await serves(here, 2)

    virtual_time.run(main())


def test_a_retry_reads_no_answer_of_the_attempt_before() -> None:
    """vllm#43202, stale error: what a failed attempt left in the store is no answer to the next
    one: answers belong to an operation, a token and a sequence number."""

    async def main() -> None:
        async with coordinated() as here:
            here[2].script = Script({Step.CHECK: Misbehaviour.FAIL})
            await scale(here, 4)
            await serves(here, 4)
            key = here.keys.ack(WorkerId("slot2"))
            stored = await here.store.get(key)
            assert stored is not None
            stale = replace(
                decode(AckRecord, stored.value),
                seq=2,  # as RESTORE will have
                step=Step.RESTORE,
                status=AckStatus.FAILED,
                reason="stale",
            )
            await scale(here, 2)
            await here.store.txn([], [Put(key, encode(stale))])
            assert (await scale(here, 3)).status is OutcomeStatus.REACHED
            last = (await here.status()).last
            assert last is not None
            assert (last.phase, last.lost) == (Phase.DONE, ())

    virtual_time.run(main())


WORKERS = [WorkerId(f"slot{n}") for n in range(12)]


@given(
    experts=st.integers(1, 64),
    slots=st.integers(1, 32),
    before=st.integers(1, 8),
    target=st.integers(-2, 12),
)
def test_every_target_has_a_plan_or_a_reason(
    experts: int, slots: int, before: int, target: int
) -> None:
    """vllm#43202, floor: a target below the experts' floor is refused with its reason; nothing is
    ever computed with a negative number of replicas."""
    shape = EngineShape(experts, slots)
    if before * slots < experts:
        before = -(-experts // slots)
    if before > len(WORKERS):
        return
    serving = plan_scale(PlanInput(Topology(Epoch(0)), before, Epoch(1), shape, WORKERS)).settled
    given_ = PlanInput(serving, target, Epoch(2), shape, WORKERS[before:])
    try:
        plan = plan_scale(given_)
    except TargetRefused:
        return
    assert target * slots >= experts
    held = {e for m in plan.settled.members for e in m.experts}
    assert set(range(experts)) <= held


def test_a_target_above_the_budget_is_refused_and_nothing_stays_in_progress() -> None:
    """dynamo#12428: what exceeds the GPUs that there are is refused at once, with the reason; the
    next target is acted on."""

    async def main() -> None:
        async with coordinated() as here:
            outcome = await scale(here, CONFIG.max_ranks + 4)
            assert outcome.status is OutcomeStatus.REFUSED
            assert "scale.max_ranks" in outcome.reason
            status = await here.status()
            assert (status.operation, status.width) == (None, 2)
            assert (await scale(here, 4)).status is OutcomeStatus.REACHED

    virtual_time.run(main())


def blink(world: SimulatedDeployment, at: str, *, lasts_s: float) -> list[set[Incarnation]]:
    """At the failpoint `at`, of a scale-up, the store is away for so long, and every lease runs
    out. The engines that were in force at that moment."""
    lived: list[set[Incarnation]] = []

    def away() -> None:
        world.store.down = True
        world.store.break_watches()
        for lease in list(world.store._leases):
            world.store.expire(lease)

    def hook(name: str) -> None:
        simulation_faults.meet(name)
        up = (now := world.status().operation) is not None and now.plan.joiners
        topology = world.status().topology
        if name == at and up and topology and not lived:
            lived.append({m.incarnation for m in topology.members})
            loop = asyncio.get_running_loop()
            loop.call_soon(away)
            loop.call_later(lasts_s, setattr, world.store, "down", False)

    failpoints.set_hook(hook)
    return lived


@pytest.mark.parametrize("lasts_s", [0.0, 10.0])
@pytest.mark.parametrize("at", ["scale.before_commit", "scale.after_commit", "scale.after_stream"])
def test_no_rank_restarts_when_the_store_is_away(at: str, lasts_s: float) -> None:
    """dynamo#3493: leases that run out in the middle of a commit restart nothing: shells and
    coordinator open new sessions, ranks in force keep their engines, and the operation ends."""
    schedule = Schedule(3, (4,), ())
    rng = random.Random(schedule.seed)
    with asyncio.Runner(loop_factory=lambda: ShufflingLoop(rng)) as runner:
        deployment = SimulatedDeployment(schedule, rng, Coordinator)
        lived = blink(deployment, at, lasts_s=lasts_s)
        try:
            runner.run(deployment.run())
        finally:
            failpoints.set_hook(None)
    assert lived, f"{at} was never reached"
    assert deployment.invariants.violations == []
    topology = deployment.status().topology
    assert topology is not None
    kept = {m.incarnation for m in topology.members}
    # In the end it was brought to fewer ranks, from the last one on.
    assert kept <= lived[0] or lived[0] <= kept
