"""Whoever dies in the middle of a snapshot or a restore: a typed error, and nothing is left."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dynamo_elastic.agent.base import SlotState, Tier
from dynamo_elastic.agent.images import Images
from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.errors import EngineError, EngineGone, ImagerError, SnapshotError
from dynamo_elastic.failpoints import KILL_ONCE_DIR
from dynamo_elastic.snapshot.base import TakePhase
from dynamo_elastic.snapshot.catalog import Catalog
from dynamo_elastic.testing import gpu_agent_process
from dynamo_elastic.testing.deployments import asyncio_test
from dynamo_elastic.testing.gpu_agent import GpuAgent
from dynamo_elastic.testing.gpu_settings import PROGRAM
from dynamo_elastic.testing.gpu_world import (
    SIZES,
    image_of,
    images_of,
    kill,
    settings_of,
    wait_for_process,
    world,
)

pytestmark = [pytest.mark.gpu(1), pytest.mark.root, pytest.mark.criu]

_TARGET = (PROGRAM, "slots/0")
_CRIU_DUMP = ("--library-path", "criu", " dump ")
_CRIU_RESTORE = ("--library-path", "criu", " restore ")
_SOON_S = 30.0


def create_while(images: Images, phase: TakePhase, act: Callable[[], None]) -> None:
    """Make an image; `act` runs beside it from the beginning of `phase` on."""
    with ThreadPoolExecutor(1) as pool:

        def notify(_: int, reached: TakePhase) -> None:
            if reached is phase:
                pool.submit(act)

        images.create(0, notify)


def whole(config: DeploymentConfig) -> set[str]:
    """Images of the catalog; all of them whole, and nothing else there."""
    catalog = Catalog(config.snapshot.catalog)
    assert [m for m in catalog.entries() if catalog.findings(m)] == []
    assert catalog.partials() == ()
    return set(catalog.entries())


@pytest.mark.parametrize("phase", [TakePhase.FREEZE, TakePhase.DUMP])
def test_target_dies_while_its_image_is_made(phase: TakePhase) -> None:
    config = world()
    before = whole(config)
    with pytest.raises(SnapshotError):
        create_while(
            images_of(config), phase, lambda: kill(wait_for_process(*_TARGET, timeout_s=_SOON_S))
        )
    assert whole(config) == before


def test_criu_dies_while_it_dumps() -> None:
    config = world()
    before = whole(config)
    with pytest.raises(ImagerError):
        create_while(
            images_of(config),
            TakePhase.DUMP,
            lambda: kill(wait_for_process(*_CRIU_DUMP, timeout_s=_SOON_S)),
        )
    assert whole(config) == before


@pytest.mark.parametrize("failpoint", ["take.frozen", "take.dumped"])
def test_whoever_makes_the_image_dies(
    failpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = world()
    before = whole(config)
    (tmp_path / failpoint).touch()
    monkeypatch.setenv(KILL_ONCE_DIR, str(tmp_path))
    argv = [sys.executable, "-m", gpu_agent_process.__name__, settings_of(config, create=0)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=80, check=False)
    assert done.returncode == -9, done.stderr[-2000:]
    Catalog(config.snapshot.catalog).remove_partials()
    assert whole(config) == before


@asyncio_test
async def test_target_or_criu_dies_while_it_is_restored() -> None:
    config = world()
    await asyncio.to_thread(image_of, config)
    before = whole(config)
    async with GpuAgent(config, **SIZES) as agent:
        for words in (_CRIU_RESTORE, _TARGET):
            start = asyncio.create_task(agent.start(0, Tier.IMAGE))
            process = await asyncio.to_thread(wait_for_process, *words, timeout_s=_SOON_S)
            kill(process)
            with pytest.raises(EngineError):
                await start
            (slot,) = await agent.client.slots()
            assert slot.state is SlotState.FREE
        assert whole(config) == before


@asyncio_test
async def test_agent_dies_while_it_restores(tmp_path: Path) -> None:
    config = world()
    await asyncio.to_thread(image_of, config)
    before = whole(config)
    async with GpuAgent(config, {KILL_ONCE_DIR: str(tmp_path)}, **SIZES) as agent:
        for failpoint in ("restore.before_thaw", "restore.thawed"):
            (tmp_path / failpoint).touch()
            with pytest.raises(EngineGone):
                await agent.start(0, Tier.IMAGE)
            agent.kill()
            await agent.boot()
            (slot,) = await agent.client.slots()
            assert slot.state is SlotState.FREE
            await agent.probe(await agent.start(0, Tier.IMAGE))
            await agent.end_all()
        assert whole(config) == before


@asyncio_test
async def test_agent_dies_around_parking(tmp_path: Path) -> None:
    config = world()
    await asyncio.to_thread(image_of, config)
    async with GpuAgent(config, {KILL_ONCE_DIR: str(tmp_path)}, **SIZES) as agent:
        started = await agent.start(0, Tier.IMAGE)
        await agent.park(started)
        agent.kill()
        await agent.boot()
        (slot,) = await agent.client.slots()
        assert slot.state is SlotState.PARKED
        started = await agent.start(0, Tier.PARKED)
        await agent.probe(started, host=True)

        (tmp_path / "park.frozen").touch()
        with pytest.raises(EngineGone):
            await agent.park(started)
        agent.kill()
        await agent.boot()
        (slot,) = await agent.client.slots()
        assert slot.state is SlotState.FREE

        started = await agent.start(0, Tier.IMAGE)
        await agent.park(started)
        (tmp_path / "unpark.checked").touch()
        with pytest.raises(EngineGone):
            await agent.start(0, Tier.PARKED)
        agent.kill()
        await agent.boot()
        await agent.probe(await agent.start(0), host=True)


@asyncio_test
async def test_parked_engine_dies() -> None:
    config = world()
    await asyncio.to_thread(image_of, config)
    async with GpuAgent(config, **SIZES) as agent:
        started = await agent.start(0, Tier.IMAGE)
        await agent.park(started)
        kill(wait_for_process(*_TARGET, timeout_s=_SOON_S))
        again = await agent.start(0)
        assert again.engine.tier is Tier.IMAGE
        assert any("parked" in reason for reason in again.engine.fell_through)
