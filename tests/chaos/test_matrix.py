"""A part of the fault matrix, always the same: real etcd, processes, CRIU, NIXL and clients.

`dynamo-elastic-chaos` plays all of it; docs/reliability.md says what must hold.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.demo.run import leftovers
from dynamo_elastic.failpoints import Act
from dynamo_elastic.testing.chaos.etcd_members import SITES
from dynamo_elastic.testing.chaos.image_run import run_on_images
from dynamo_elastic.testing.chaos.image_scenario import CLI, ImageScenario, Work
from dynamo_elastic.testing.chaos.image_shop import ImageShop
from dynamo_elastic.testing.chaos.run import run
from dynamo_elastic.testing.chaos.scenario import (
    ANY_MOMENT,
    AtFailpoint,
    AtRandom,
    Fault,
    Resize,
    Scenario,
    at_failpoint,
)
from dynamo_elastic.testing.chaos.verdict import Verdict
from dynamo_elastic.testing.chaos.world import World, missing_tools, world

pytestmark = [
    pytest.mark.root,
    pytest.mark.criu,
    pytest.mark.etcd,
    pytest.mark.nixl,
    pytest.mark.dynamo,
    pytest.mark.skipif(bool(missing_tools()), reason=missing_tools()),
    pytest.mark.timeout(400),
]

UP, DOWN = Resize.UP, Resize.DOWN
SITE = SITES - 1
"""Not that of a matrix that is being played."""
FAULTS: list[tuple[Resize, AtFailpoint | AtRandom]] = [
    # The coordinator, right before and after the decision.
    (UP, AtFailpoint("scale.before_commit", "", Act.KILL)),
    (DOWN, AtFailpoint("scale.after_commit", "", Act.KILL)),
    # A joiner's engine, before and after it.
    (UP, AtFailpoint("engine.after_connect", "slot2", Act.KILL)),
    # The shell of a rank that can't be spared: it comes back to its engine.
    (DOWN, AtFailpoint("worker.thaw.begin", "slot0", Act.KILL)),
    (UP, AtFailpoint("engine.before_first_step", "slot2", Act.KILL)),
    # An engine that nobody can replace but from disk.
    (DOWN, AtFailpoint("engine.disconnect", "slot1", Act.KILL)),
    (UP, AtFailpoint("worker.serve.begin", "slot2", Act.KILL)),
    (DOWN, AtRandom(Fault.PARTITION, "coordinator", 0.3)),
    (UP, AtRandom(Fault.ETCD_LEADER_KILLED, "", 0.3)),
    (DOWN, AtFailpoint("agent.engine_parked", "", Act.ERROR)),
    # Its image fails it: it is booted.
    (UP, AtFailpoint("engine.attached", "slot2", Act.KILL)),
    (DOWN, AtFailpoint("scale.before_commit", "", Act.STOP, 4.0)),
    # A retained rank, with experts, in the first step of the new group.
    (UP, AtFailpoint("engine.before_first_step", "slot1", Act.ERROR)),
    (Resize.UP_PARKED, AtRandom(Fault.LEASE_LOST, "coordinator")),
    (DOWN, AtRandom(Fault.STOP, "slot1", 0.2)),
]

ON_IMAGES: list[tuple[Work, str, Act]] = [
    (Work.TAKE, "take.dump", Act.KILL),
    (Work.IMPORT, "catalog.import.extracted", Act.ERROR),
    (Work.REMOVE, "catalog.remove.renamed", Act.KILL),
    (Work.TIDY, "catalog.partials.before_removal", Act.ERROR),
]


def test_nothing_is_violated_lost_or_left_behind(tmp_path: Path) -> None:
    configs: list[DeploymentConfig] = []

    async def play() -> list[Verdict]:
        async with world(tmp_path, members=3, say=lambda text: None, site=SITE) as here:
            verdicts = []
            for number, (resize, fault) in enumerate(FAULTS):
                verdict, _ = await run(here, Scenario(number, resize, fault))
                verdicts.append(verdict)
                if verdict.hang:
                    break
            configs.append(here.config)
            return [*verdicts, *await on_images(here)]

    async def on_images(here: World) -> list[Verdict]:
        shop = ImageShop(here)
        await shop.open()
        faults = [(w, at_failpoint(place, CLI, act)) for w, place, act in ON_IMAGES]
        scenarios = [ImageScenario(n, *fault) for n, fault in enumerate(faults)]
        played = [await run_on_images(here, shop, one) for one in scenarios]
        shop.close()
        return [verdict for verdict, _ in played]

    verdicts = asyncio.run(play())
    assert [v for v in verdicts if not v.good] == []
    assert len(verdicts) == len(FAULTS) + len(ON_IMAGES)
    # A fault at a moment of its own may come too late; one at a failpoint comes.
    placed = [v for v in verdicts if v.place != ANY_MOMENT]
    assert [v.scenario for v in placed if not v.fired] == []
    assert sum(not v.fired for v in verdicts) <= 1
    assert sum(v.requests for v in verdicts) > len(FAULTS)
    assert sum(v.lost for v in verdicts) == 0
    assert leftovers(configs[0], set()) == []
