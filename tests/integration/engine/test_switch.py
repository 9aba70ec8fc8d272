"""The switch on real engine processes, when some rank does not do its part."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from dynamo_elastic.engine.base import EngineState, Request
from dynamo_elastic.engine.reference.oracle import Oracle
from dynamo_elastic.errors import EngineError
from dynamo_elastic.failpoints import KILL_ONCE_DIR
from dynamo_elastic.testing.engine_process import EngineProcess
from dynamo_elastic.testing.fleet import TIMEOUT_S, Fleet, FleetLoad, each, fleet, masked
from dynamo_elastic.types import Epoch, WorkerId

pytestmark = pytest.mark.nixl

FIRST, SECOND, JOINER = (WorkerId(f"slot{k}") for k in range(3))
PEER_TIMEOUT_S = 1.0
PATIENT_S = 5.0
"""The same where nobody is to be masked: longer than a request takes on a busy machine."""


async def steps_on(
    ranks: Fleet[EngineProcess],
    epoch: Epoch,
    workers: Sequence[WorkerId],
    load: FleetLoad,
    waits_s: float = PEER_TIMEOUT_S,
) -> None:
    """`workers` serve on in `epoch`, and no request waits for a peer for `waits_s`."""
    enough = len(load.told) + 6  # three streams: half of these begin now
    async with asyncio.timeout(TIMEOUT_S):
        while len(load.told) < enough:
            await asyncio.sleep(0.02)
    assert load.longest_s < waits_s
    for worker in workers:
        assert (await ranks.all[worker].client.status()).epoch == epoch


def test_a_decision_that_a_rank_misses_is_superseded(
    model: Path, oracle: Oracle, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with fleet(model, tmp_path, 3, peer_timeout_s=PATIENT_S) as ranks:
            await ranks.boot(2)
            load = FleetLoad(ranks, [FIRST, SECOND])
            async with load.running():
                missed = ranks.plan(3)
                await ranks.join(missed)
                await ranks.decide(missed.after.epoch, [FIRST, JOINER])
                await steps_on(ranks, Epoch(1), [FIRST, SECOND], load, PATIENT_S)
                joiner = ranks.all[JOINER].client
                await joiner.abort_epoch(missed.after.epoch)
                assert (await joiner.status()).state is EngineState.ATTACHED
                superseding = ranks.plan(3, skipped_epochs=1)
                await ranks.join(superseding)
                with pytest.raises(EngineError):
                    await ranks.decide(missed.after.epoch, [SECOND])
                await steps_on(ranks, Epoch(1), [FIRST, SECOND], load, PATIENT_S)
                await ranks.switch(superseding.after)
                await ranks.rebalance(superseding.after, superseding.settled)
            load.check(oracle)
            assert (await joiner.status()).epoch == superseding.after.epoch

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_decision_that_a_stopped_joiner_does_not_follow_is_taken_back(
    model: Path, oracle: Oracle, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with fleet(model, tmp_path, 3, peer_timeout_s=PEER_TIMEOUT_S) as ranks:
            await ranks.boot(2)
            load = FleetLoad(ranks, [FIRST, SECOND])
            async with load.running():
                plan = ranks.plan(3)
                await ranks.join(plan)
                ranks.all[JOINER].process.send_signal(signal.SIGSTOP)
                await ranks.decide(plan.after.epoch, plan.retained)
                await steps_on(ranks, Epoch(1), plan.retained, load)
                retained = ranks.of(ranks.in_force)
                await each(retained, lambda e: e.client.abort_epoch(plan.after.epoch))
                ranks.all[JOINER].process.send_signal(signal.SIGCONT)
                await steps_on(ranks, Epoch(1), plan.retained, load)
                await ranks.all[JOINER].client.abort_epoch(plan.after.epoch)
                again = ranks.plan(3, skipped_epochs=1)
                await ranks.join(again)
                await ranks.switch(again.after)
            load.check(oracle)

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_joiner_that_is_stopped_in_the_first_step_costs_one_peer_timeout(
    model: Path, oracle: Oracle, tmp_path: Path
) -> None:
    """It waits in the new group's first round, so the others switch; then it says no more."""

    async def scenario() -> None:
        async with fleet(model, tmp_path, 3, peer_timeout_s=PEER_TIMEOUT_S) as ranks:
            await ranks.boot(2)
            load = FleetLoad(ranks, [FIRST, SECOND])
            async with load.running():
                plan = ranks.plan(3)
                await ranks.join(plan)
                await ranks.decide(plan.after.epoch, [JOINER, FIRST])
                await asyncio.sleep(0.2)
                ranks.all[JOINER].process.send_signal(signal.SIGSTOP)
                await ranks.decide(plan.after.epoch, [SECOND])
                await ranks.switched(plan.after, plan.retained)
                await asyncio.sleep(0.3)
            status = await ranks.all[FIRST].client.status()
            assert (status.masked, status.lost_experts) == ((2,), ())
            load.check(oracle)
            assert PEER_TIMEOUT_S < load.longest_s < 2 * PEER_TIMEOUT_S

    asyncio.run(scenario())


def test_a_retained_rank_that_dies_in_the_first_step_is_masked(model: Path, tmp_path: Path) -> None:
    """The old group is no way back, as it had that rank. Its experts are lost, and that is said."""

    async def scenario() -> None:
        failpoints = tmp_path / "failpoints"
        failpoints.mkdir()
        environment = {KILL_ONCE_DIR: str(failpoints)}
        async with fleet(model, tmp_path, 2, environment=environment) as ranks:
            await ranks.boot(2)
            after = replace(ranks.in_force, epoch=Epoch(2))
            await ranks.connect(after)
            await ranks.all[FIRST].client.submit(Request("r", (1, 2, 3), 60))
            (failpoints / f"{SECOND}:engine.before_first_step").touch()
            await ranks.decide(after.epoch, after.worker_ids)
            status = await masked(ranks.all[FIRST])
            assert (status.epoch, status.masked) == (after.epoch, (1,))
            assert len(status.lost_experts) == 4
            with pytest.raises(TimeoutError):  # it waits for them
                async with asyncio.timeout(1.0):
                    await ranks.all[FIRST].finished("r")

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_stopped_rank_that_wakes_knows_that_it_is_out(
    model: Path, oracle: Oracle, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with fleet(model, tmp_path, 3, peer_timeout_s=PEER_TIMEOUT_S) as ranks:
            await ranks.boot(2)
            plan = await ranks.scale_up(3)
            load = FleetLoad(ranks, plan.retained)
            async with load.running():
                ranks.all[JOINER].process.send_signal(signal.SIGSTOP)
                await masked(ranks.all[FIRST])
                ranks.all[JOINER].process.send_signal(signal.SIGCONT)
                await asyncio.sleep(0.5)
                status = await ranks.all[JOINER].client.status()
                assert status.state is EngineState.SERVING
                assert status.masked == (0, 1)
                assert status.lost_experts
            load.check(oracle)
            assert load.longest_s < 2 * PEER_TIMEOUT_S

    asyncio.run(scenario())
