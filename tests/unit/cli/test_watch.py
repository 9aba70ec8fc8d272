"""What status and watch draw: ranks, the phase under way and how far it is, parked engines."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from dynamo_elastic.agent.base import SlotState, SlotStatus
from dynamo_elastic.cli.look import Picture, picture, slots_of
from dynamo_elastic.cli.status_view import view
from dynamo_elastic.cli.watch import Looker
from dynamo_elastic.config import DeploymentConfig, parse_config
from dynamo_elastic.coordinator.main_loop import Coordinator, Deployment
from dynamo_elastic.coordinator.targets import request_scale
from dynamo_elastic.errors import EngineGone, StoreUnavailable
from dynamo_elastic.phases import Step
from dynamo_elastic.testing import virtual_time
from dynamo_elastic.testing.coordination import CONFIG, SHAPE, World, world
from dynamo_elastic.testing.participants import Misbehaviour, Script
from dynamo_elastic.testing.store import FakeStore
from dynamo_elastic.testing.virtual_time import wall_clock
from dynamo_elastic.types import Incarnation

TIMEOUT_S = 100.0
SLOTS = (
    SlotStatus(0, "image-0", Incarnation("slot0-a"), 10, "image", SlotState.SERVING),
    SlotStatus(1, "", state=SlotState.PARKED, parked_bytes=3_000_000, parked_s=61.0),
    SlotStatus(2, ""),
)


class Agent:
    """Answers with SLOTS, or not at all."""

    def __init__(self, *, gone: bool = False) -> None:
        self.gone = gone

    async def slots(self) -> tuple[SlotStatus, ...]:
        if self.gone:
            raise EngineGone("the agent is not there")
        return SLOTS


def settings(tmp_path: Path) -> DeploymentConfig:
    return parse_config(
        {
            "deployment": "test",
            "model": {"path": "m", "name": "m"},
            "scale": {"initial_ranks": 2, "max_ranks": 4},
            "run_dir": str(tmp_path),
        }
    )


def text_of(drawing: RenderableType) -> str:
    out = io.StringIO()
    Console(file=out, width=140, highlight=False).print(drawing)
    return out.getvalue()


async def look(here: World, config: DeploymentConfig, agent: Any) -> Picture:
    stored = {v.key: v for v in await here.store.get_prefix(here.keys.prefix)}
    return picture(config, stored, await slots_of(agent), wall_clock())


def test_an_operation_under_way_shows_how_far_it_is(tmp_path: Path) -> None:
    config = settings(tmp_path)

    async def main() -> tuple[Picture, Picture]:
        async with world(FakeStore(), 4) as here:
            deployment = Deployment(here.keys, CONFIG, SHAPE, now=wall_clock)
            leader = asyncio.create_task(Coordinator(here.store, deployment, "c").run())
            await here.until(2, timeout_s=TIMEOUT_S)
            here[3].script = Script({Step.CONNECT: Misbehaviour.SILENT})
            await request_scale(here.store, here.keys, 4, "test", detail="queue of 80")
            while True:
                await asyncio.sleep(0.2)
                now = await look(here, config, Agent())
                if now.progress and (now.progress.step, now.progress.answered) == ("connect", 3):
                    break
            leader.cancel()
            await asyncio.wait({leader})
            return now, await look(here, config, Agent(gone=True))

    now, agentless = virtual_time.run(main())
    shown = text_of(view(now))
    assert "test: epoch 1, 2 ranks; leader c" in shown
    assert "target 4 by test queue of 80" in shown
    assert "under way: up 2 → 4 ranks" in shown
    assert "connect: 3 of 4 ranks" in shown
    under_way = shown[shown.index("under way") : shown.index("last: ")].splitlines()
    bars = {line.split()[0]: line for line in under_way if "━" in line or "─" in line}
    assert bars["restore"].count("━") == 30
    assert 20 <= bars["connect"].count("━") < 30
    assert bars["stream"].count("─") == 30
    assert "from cold" in bars["restore"]
    assert "parked engine (3.0 MB, for 61 s)" in shown
    assert "parked: 1 engines, 3.0 MB of host memory" in shown
    assert "GPU slots of this host: the agent is not there" in text_of(view(agentless))


def test_nothing_served_is_said_so(tmp_path: Path) -> None:
    async def main() -> Picture:
        async with world(FakeStore(), 0) as here:
            return await look(here, settings(tmp_path), Agent())

    assert "nothing is served" in text_of(view(virtual_time.run(main())))


def test_watch_draws_at_each_change_and_outlives_etcd(tmp_path: Path) -> None:
    class Flaky(FakeStore):
        away = False

        def watch(self, prefix: str) -> Any:
            if self.away:
                raise StoreUnavailable("no answer")
            return super().watch(prefix)

    drawings: list[str] = []

    async def drawn(what: str) -> None:
        async with asyncio.timeout(20):
            while what not in (drawings or [""])[-1]:
                await asyncio.sleep(0.05)

    async def main() -> None:
        store = Flaky()
        async with world(store, 4) as here:
            deployment = Deployment(here.keys, CONFIG, SHAPE)
            leader = asyncio.create_task(Coordinator(here.store, deployment, "c").run())
            await here.until(2, timeout_s=TIMEOUT_S)
            store.away = True
            looker = Looker(settings(tmp_path), store, Agent())  # type: ignore[arg-type]
            following = asyncio.create_task(
                looker.follow(lambda: drawings.append(text_of(looker.drawing())))
            )
            await drawn("etcd: no answer; this is what was known")
            store.away = False
            await drawn("epoch 1, 2 ranks")
            quiet = len(drawings)
            await asyncio.sleep(0.6)
            assert len(drawings) <= quiet + 1  # nothing changes, nothing is drawn
            await request_scale(here.store, here.keys, 4, "test")
            await drawn("epoch 2, 4 ranks")
            following.cancel()
            leader.cancel()
            await asyncio.wait({following, leader})

    asyncio.run(main())
    assert "Ctrl-C to end" in drawings[-1]
