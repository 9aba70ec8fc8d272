"""Real coordinator processes on a real etcd are killed in every phase; the next one ends it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml

from dynamo_elastic.coordinator.etcd import EtcdStore
from dynamo_elastic.coordinator.main_loop import Coordinator, Deployment
from dynamo_elastic.coordinator.targets import request_scale, wait_outcome
from dynamo_elastic.phases import Kind, Phase, phases_of
from dynamo_elastic.testing.coordination import CONFIG, SHAPE, World, world
from dynamo_elastic.testing.etcd_process import EtcdProcess, etcd_missing, etcd_process

pytestmark = pytest.mark.etcd

TIMEOUT_S = 60.0
WIDTH = {Kind.BOOT: 2, Kind.UP: 4, Kind.DOWN: 2}
CONFIG_2S = CONFIG.model_copy(update={"lease_ttl_s": 2})


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdProcess]:
    if etcd_missing():
        pytest.skip(etcd_missing())
    with etcd_process(tmp_path_factory.mktemp("etcd")) as process:
        yield process


def write_config(directory: Path, name: str, url: str) -> Path:
    settings = {
        "deployment": name,
        "model": {"path": "model", "name": "m"},
        "engine": {"slots_per_rank": SHAPE.slots_per_rank},
        "scale": CONFIG_2S.model_dump(),
        "etcd": {"start": False, "endpoints": [url]},
        "run_dir": str(directory),
    }
    path = directory / f"{name}.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


@asynccontextmanager
async def process(config: Path, failpoint: str = "") -> AsyncIterator[asyncio.subprocess.Process]:
    """A coordinator process; killed on leaving if it lives."""
    argv = ["-m", "dynamo_elastic.coordinator", f"--elastic-config={config}"]
    environment = os.environ | {"PYTHONSAFEPATH": "1", "DYNAMO_ELASTIC_FAILPOINT": failpoint}
    with config.with_suffix(".log").open("ab") as log:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            *argv,
            f"--num-experts={SHAPE.num_experts}",
            env=environment,
            stdout=log,
            stderr=log,
        )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


@asynccontextmanager
async def second_coordinator(here: World) -> AsyncIterator[None]:
    deployment = Deployment(here.keys, CONFIG_2S, SHAPE)
    task = asyncio.create_task(Coordinator(here.store, deployment, "second").run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def scale(here: World, ranks: int) -> None:
    request_id = await request_scale(here.store, here.keys, ranks, "test")
    await wait_outcome(here.store, here.keys, request_id, timeout_s=TIMEOUT_S)


async def prepare(here: World, kind: Kind) -> None:
    if kind is Kind.BOOT:
        return
    async with second_coordinator(here):
        await here.until(2, timeout_s=TIMEOUT_S)
        if kind is Kind.DOWN:
            await scale(here, 4)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(Kind.BOOT, marks=pytest.mark.slow),
        Kind.UP,
        pytest.param(Kind.DOWN, marks=pytest.mark.slow),
    ],
)
def test_killed_in_any_phase_another_one_ends_it(
    kind: Kind, etcd: EtcdProcess, tmp_path: Path
) -> None:
    points = [f"scale.before_{phase}" for phase in phases_of(kind)]
    points += ["scale.after_commit", "scale.before_close"]

    async def one(number: int, point: str) -> None:
        name = f"kill-{kind}-{number}"
        config = write_config(tmp_path, name, etcd.url)
        store = EtcdStore([etcd.url])
        async with world(store, deployment=name) as here:
            await prepare(here, kind)
            async with process(config, point) as victim:
                if kind is not Kind.BOOT:
                    await request_scale(store, here.keys, WIDTH[kind], "test")
                async with asyncio.timeout(TIMEOUT_S):
                    assert await victim.wait() == -signal.SIGKILL, point
            left = (await here.status()).operation
            assert left is not None, point
            async with second_coordinator(here):
                status = await here.until(WIDTH[kind], timeout_s=TIMEOUT_S)
            assert status.last is not None
            assert status.last.phase is Phase.DONE, point
            assert await here.faults() == [], point
        await store.close()

    async def main() -> None:
        await asyncio.gather(*(one(n, point) for n, point in enumerate(points)))

    asyncio.run(main())


def test_a_coordinator_that_hung_past_its_lease_does_no_harm(
    etcd: EtcdProcess, tmp_path: Path
) -> None:
    async def main() -> None:
        config = write_config(tmp_path, "hung", etcd.url)
        store = EtcdStore([etcd.url])
        async with world(store, deployment="hung") as here, process(config) as hung:
            await here.until(2, timeout_s=TIMEOUT_S)
            hung.send_signal(signal.SIGSTOP)
            async with second_coordinator(here):
                await scale(here, 4)
                hung.send_signal(signal.SIGCONT)
                await scale(here, 3)
                leader = (await here.status()).leader
                assert leader == "second"
            await scale(here, 4)
            assert (await here.status()).leader != "second"
            assert await here.faults() == []
            hung.send_signal(signal.SIGTERM)
            async with asyncio.timeout(TIMEOUT_S):
                assert await hung.wait() == 0
            assert (await here.status()).leader == "", "it gave its lease back"
        await store.close()

    asyncio.run(main())


def test_a_bad_setting_is_one_line_and_not_zero(tmp_path: Path) -> None:
    async def main() -> None:
        config = write_config(tmp_path, "bad", "ftp://nowhere")
        async with process(config) as child, asyncio.timeout(TIMEOUT_S):
            assert await child.wait() == 1
        lines = config.with_suffix(".log").read_text().splitlines()
        assert len(lines) == 1
        assert "etcd.endpoints" in lines[0]

    asyncio.run(main())
