"""Real engine processes, no agent and no coordinator: the test itself drives every call."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from dynamo_elastic.engine.base import EngineState, Finish, Request
from dynamo_elastic.engine.reference.oracle import Oracle
from dynamo_elastic.errors import EngineGone
from dynamo_elastic.testing.engine_process import EngineProcess, engine_config
from dynamo_elastic.testing.fleet import (
    SHAPE,
    TIMEOUT_S,
    FleetLoad,
    each,
    fleet,
    masked,
)
from dynamo_elastic.topology import PlanInput, plan_replacement
from dynamo_elastic.types import Epoch, WorkerId

pytestmark = pytest.mark.nixl


def test_two_ranks_say_what_one_says(model: Path, oracle: Oracle, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(model, tmp_path, 2) as ranks:
            await ranks.boot(2)
            load = FleetLoad(ranks, list(ranks.all))
            async with load.running(streams=5):
                await asyncio.sleep(0.5)
            load.check(oracle)
            status = await ranks.all[WorkerId("slot1")].client.status()
            assert (status.state, status.rank, status.world_size) == (EngineState.SERVING, 1, 2)

    asyncio.run(scenario())


def test_up_and_down_under_load(model: Path, oracle: Oracle, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(model, tmp_path, 4) as ranks:
            await ranks.boot(2)
            load = FleetLoad(ranks, [WorkerId("slot0"), WorkerId("slot1")])
            async with load.running():
                await ranks.scale_up(4)
            load.check(oracle)
            load = FleetLoad(ranks, list(ranks.all))
            async with load.running(streams=4):
                await asyncio.sleep(0.2)
                down = await ranks.scale_down(2)
                await asyncio.sleep(0.2)
            assert load.moved > 0
            load.check(oracle)
            for worker in down.leavers:
                status = await ranks.all[worker].client.status()
                assert (status.state, status.kv_blocks_used) == (EngineState.ATTACHED, 0)
            statuses = await each(ranks.of(down.after), lambda e: e.client.status())
            assert [s.world_size for s in statuses] == [2, 2]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "sign", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
def test_joiner_lost_after_the_switch(
    sign: signal.Signals, model: Path, oracle: Oracle, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with fleet(model, tmp_path, 3) as ranks:
            await ranks.boot(2)
            load = FleetLoad(ranks, [WorkerId("slot0"), WorkerId("slot1")])
            async with load.running():
                plan = ranks.plan(3)
                await ranks.join(plan)
                await ranks.switch(plan.after)
                ranks.all[WorkerId("slot2")].process.send_signal(sign)
                status = await masked(ranks.all[WorkerId("slot0")])
            load.check(oracle)
            assert (status.masked, status.lost_experts) == ((2,), ())

    asyncio.run(scenario())


def test_replicas_stand_in_for_a_lost_rank(model: Path, oracle: Oracle, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(model, tmp_path, 4) as ranks:
            await ranks.boot(2)
            plan = await ranks.scale_up(4)
            load = FleetLoad(ranks, plan.retained)
            async with load.running():
                await asyncio.sleep(0.2)
                ranks.all[WorkerId("slot3")].kill()
                status = await masked(ranks.all[WorkerId("slot0")])
                assert (status.masked, status.lost_experts) == ((3,), ())
                down = ranks.plan(3)
                assert down.leavers == ("slot3",)
                await ranks.connect(down.after)
            load.check(oracle)

    asyncio.run(scenario())


@pytest.mark.parametrize("failpoint", ["engine.before_first_step", "engine.after_connect"])
def test_joiner_dies_on_the_way(
    failpoint: str, model: Path, oracle: Oracle, tmp_path: Path
) -> None:
    async def scenario() -> None:
        environment = {"DYNAMO_ELASTIC_FAILPOINT": failpoint}
        async with fleet(model, tmp_path, 3, environment=environment) as ranks:
            await ranks.boot(2)
            retained = list(ranks.all)[:2]
            load = FleetLoad(ranks, retained)
            async with load.running():
                plan = ranks.plan(3)
                if failpoint == "engine.after_connect":
                    with pytest.raises(EngineGone):
                        await ranks.join(plan)
                    for worker in retained:
                        await ranks.all[worker].client.abort_epoch(plan.after.epoch)
                else:
                    await ranks.join(plan)
                    for worker in plan.after.worker_ids:
                        await ranks.all[worker].client.decide(plan.after.epoch)
                    for worker in retained:
                        await ranks.all[worker].client.wait_switched(
                            plan.after.epoch, timeout_s=TIMEOUT_S
                        )
                await asyncio.sleep(0.2)
            load.check(oracle)

    asyncio.run(scenario())


def test_requests_wait_until_lost_experts_are_read_from_disk(
    model: Path, oracle: Oracle, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with fleet(model, tmp_path, 3) as ranks:
            await ranks.boot(2)
            survivor, victim, joiner = ranks.all.values()
            request = Request("r", (1, 2, 3), 60)
            await survivor.client.submit(request)
            victim.kill()
            status = await masked(survivor)
            assert (status.masked, len(status.lost_experts)) == ((1,), 4)
            lost = frozenset({victim.worker_id})
            given = PlanInput(ranks.in_force, 2, Epoch(2), SHAPE, list(ranks.all), lost)
            plan = plan_replacement(given)
            assert plan.loaders == (joiner.worker_id,)
            await ranks.join(plan)
            await joiner.client.load_weights(plan.after.members[1].experts)
            await ranks.switch(plan.after)
            output = await survivor.finished("r")
            assert output.finish is Finish.LENGTH
            assert output.tokens == oracle.generate(request)

    asyncio.run(scenario())


def test_a_detached_engine_holds_nothing(model: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = EngineProcess(engine_config(model, tmp_path, slots_per_rank=8), 0)
        try:
            report = await engine.detached()
            proc = Path(f"/proc/{engine.process.pid}")
            links = {f.name: str(f.readlink()) for f in (proc / "fd").iterdir()}
            assert links == dict.fromkeys("012", "/dev/null")
            assert len(list((proc / "task").iterdir())) == report["threads"] == 1
        finally:
            await engine.stop()

    asyncio.run(scenario())
