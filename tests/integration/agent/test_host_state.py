"""What an agent finds at its start, what it holds, and what it refuses. Images without CRIU."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dynamo_elastic.agent import server as server_module
from dynamo_elastic.agent.base import StartedEngine, Tier
from dynamo_elastic.agent.client import AgentClient
from dynamo_elastic.agent.host import NAMESPACE_FILE, close_host, open_host
from dynamo_elastic.agent.image_source import NoImages
from dynamo_elastic.agent.images import Images
from dynamo_elastic.agent.server import AgentServer
from dynamo_elastic.cli.main import main
from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.engine.base import ATTACH_FILE
from dynamo_elastic.errors import EngineError, SnapshotInUse
from dynamo_elastic.snapshot.catalog import Catalog
from dynamo_elastic.snapshot.locks import work_directory
from dynamo_elastic.snapshot.namespace import PidNamespace, namespace_of
from dynamo_elastic.snapshot.process import alive, identify, kill_and_wait
from dynamo_elastic.testing.deployments import asyncio_test, deployment, standin_argv
from dynamo_elastic.testing.imager import FakeImager
from dynamo_elastic.testing.snapshots import publish_image
from dynamo_elastic.types import Epoch, OperationId, WorkerId

pytestmark = pytest.mark.root

ARGV = standin_argv("--mb", "1")
IMAGE = (Tier.IMAGE,)


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeploymentConfig]:
    with tempfile.TemporaryDirectory(prefix="de-") as directory:
        (Path(directory) / "tmp").mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(Path(directory) / "tmp"))
        config = deployment(Path(directory), snapshot={"catalog": f"{directory}/images"})
        yield config
        if (config.state_dir / NAMESPACE_FILE).exists():  # a test failed before its end
            close_host(config, open_host(config))


def fake_images(config: DeploymentConfig, argv: Any = ARGV) -> Images:
    return Images(config, FakeImager(), Catalog(config.snapshot.catalog), argv)


@asynccontextmanager
async def agent(
    config: DeploymentConfig, images: Any = None, argv: Any = ARGV, *, keep: bool = False
) -> AsyncIterator[AgentClient]:
    """With `keep` engines and their namespace outlive it, as they do when an agent dies."""
    server = AgentServer(config, images or NoImages("none made"), argv)
    await server.start()
    client = AgentClient(config.agent_socket)
    try:
        yield client
        if not keep:
            await client.stop_all()
    finally:
        await client.close()
        await server.close()


async def start(client: AgentClient, operation: str = "op-1", **options: Any) -> StartedEngine:
    slot = options.pop("slot", 0)
    options.setdefault("timeout_s", 30.0)
    options.setdefault("tiers", (Tier.COLD,))
    worker = WorkerId(f"slot{slot}")
    return await client.start_engine(slot, worker, OperationId(operation), Epoch(1), **options)


@asyncio_test
async def test_namespace_that_is_gone_frees_its_slots(config: DeploymentConfig) -> None:
    async with agent(config, keep=True) as client:
        engine = await start(client)
    process = identify(engine.pid)
    assert process is not None
    namespace = namespace_of(process)
    assert namespace is not None
    namespace.end(timeout_s=5)
    async with agent(config) as client:
        assert (await client.slots())[0].pid == 0
        assert any("is not adopted" in line for line in (await client.status())["tidied"])
        assert not (config.control_dir(0) / "engine.json").exists()
        await start(client, "op-2")


@asyncio_test
async def test_engine_of_a_forgotten_namespace_is_ended_with_it(config: DeploymentConfig) -> None:
    async with agent(config, keep=True) as client:
        engine = await start(client)
    process = identify(engine.pid)
    assert process is not None
    namespace = namespace_of(process)
    assert namespace is not None
    (config.state_dir / NAMESPACE_FILE).unlink()
    async with agent(config) as client:
        assert (await client.slots())[0].pid == 0
        assert not alive(process)
        assert not namespace.alive


@asyncio_test
async def test_adopted_engine_finds_no_stale_identity(config: DeploymentConfig) -> None:
    async with agent(config, keep=True) as client:
        engine = await start(client)
    (config.control_dir(0) / ATTACH_FILE).write_text("{}")
    (config.control_dir(1) / f".{ATTACH_FILE}.tmp").write_text("{")
    async with agent(config) as client:
        assert (await client.slots())[0].incarnation == engine.incarnation
        assert not (config.control_dir(0) / ATTACH_FILE).exists()
        assert list(config.control_dir(1).iterdir()) == []


@asyncio_test
async def test_slot_that_the_deployment_no_longer_has_is_ended(config: DeploymentConfig) -> None:
    async with agent(config, keep=True) as client:
        kept, engine = await start(client), await start(client, slot=1)
    narrow = deployment(config.run_dir.parent, slots=1)
    async with agent(narrow) as client:
        assert [s.incarnation for s in await client.slots()] == [kept.incarnation]
        assert identify(engine.pid) is None
        assert not (config.control_dir(1) / "engine.json").exists()


@asyncio_test
async def test_work_directories_of_dead_processes_go(config: DeploymentConfig) -> None:
    dead = Path(tempfile.mkdtemp(prefix="dynamo-elastic-work-"))
    (dead / "restore.log").touch()
    with work_directory() as living:
        async with agent(config) as client:
            assert not dead.exists()
            assert living.exists()
            assert any(str(dead) in line for line in (await client.status())["tidied"])


@asyncio_test
async def test_stale_images_go_and_fitting_ones_stay(config: DeploymentConfig) -> None:
    images = fake_images(config)
    manifest = await asyncio.to_thread(images.create, 0)
    publish_image(images.catalog, "slot0-stale")
    (images.catalog.root / ".partial-slot1-dead").mkdir(mode=0o700)
    async with agent(config, images) as client:
        assert list(images.catalog.entries()) == [manifest.image_id]
        assert images.catalog.partials() == ()
        tidied = (await client.status())["tidied"]
        assert any(line.startswith("slot0-stale: stale: kernel") for line in tidied)


@asyncio_test
async def test_catalog_that_can_not_be_changed_is_said(
    config: DeploymentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = fake_images(config)
    publish_image(images.catalog, "slot0-stale")
    (images.catalog.root / ".lock").unlink()
    (images.catalog.root / ".lock").mkdir()
    async with agent(config, images) as client:
        assert any("was not tidied" in line for line in (await client.status())["tidied"])
        await start(client)


@asyncio_test
async def test_image_of_a_living_engine_is_held(config: DeploymentConfig) -> None:
    images = fake_images(config)
    manifest = await asyncio.to_thread(images.create, 0)
    async with agent(config, images, keep=True) as client:
        engine = await start(client, tiers=IMAGE)
        assert engine.tier is Tier.IMAGE
        with pytest.raises(SnapshotInUse):
            images.catalog.remove(manifest.image_id)
        newer = await asyncio.to_thread(images.create, 0)
        (kept,) = images.prune().kept
        assert kept.image_id == manifest.image_id
    # An agent that adopts the engine holds its image again.
    again = fake_images(config)
    async with agent(config, again) as client:
        with pytest.raises(SnapshotInUse):
            again.catalog.remove(manifest.image_id)
        await client.stop_engine(0, engine.incarnation)
        assert [e.image_id for e in again.prune().removed] == [manifest.image_id]
        assert list(again.catalog.entries()) == [newer.image_id]


@asyncio_test
async def test_image_that_failed_twice_is_left_alone(config: DeploymentConfig) -> None:
    settings = {**config.model_dump()["snapshot"], "quarantine_s": 1.5}
    short = deployment(config.run_dir.parent, snapshot=settings)
    mute = standin_argv("--mb", "1", "--mute")
    images = fake_images(short, mute)
    manifest = await asyncio.to_thread(images.create, 0)
    async with agent(short, images, mute) as client:
        for _ in range(2):
            assert (await client.status())["quarantine"] == {}
            with pytest.raises(EngineError, match="image: the engine was not ready"):
                await start(client, tiers=IMAGE, timeout_s=1.0)
        (reason,) = (await client.status())["quarantine"].values()
        assert "after 2 failures: the engine was not ready" in reason
        assert (await client.slots())[0].image_id == ""
        with pytest.raises(EngineError, match=f"{manifest.image_id} is in quarantine"):
            await start(client, tiers=IMAGE, timeout_s=1.0)
        await asyncio.sleep(1.5)
        assert (await client.slots())[0].image_id == manifest.image_id


@asyncio_test
async def test_pids_are_guarded_all_the_time(
    config: DeploymentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_GUARD_PERIOD_S", 0.05)
    async with agent(config) as client:
        engine = await start(client)
        process = identify(engine.pid)
        assert process is not None
        namespace = namespace_of(process)
        assert namespace is not None
        await asyncio.to_thread(_wrap_around, namespace)
        await asyncio.sleep(0.5)
        assert await asyncio.to_thread(_last_pid, namespace) >= 4000


def _wrap_around(namespace: PidNamespace) -> None:
    shell = ["/bin/sh", "-c", "echo 300 > /proc/sys/kernel/ns_last_pid"]
    assert os.spawnvp(os.P_WAIT, "nsenter", namespace.enter(shell)) == 0


def _last_pid(namespace: PidNamespace) -> int:
    argv = namespace.enter(["cat", "/proc/sys/kernel/ns_last_pid"])
    return int(subprocess.run(argv, capture_output=True, check=True).stdout)


class Commands:
    """`dynamo-elastic agent ...` on one deployment, beside a running event loop."""

    def __init__(self, config: DeploymentConfig, capture: pytest.CaptureFixture[str]) -> None:
        self._file = config.run_dir.parent / "deployment.json"
        self._file.write_text(config.model_dump_json())
        self._capture = capture

    async def run(self, *argv: str) -> tuple[int, str, str]:
        code = await asyncio.to_thread(self._run, *argv)
        return code, *self._capture.readouterr()

    def _run(self, *argv: str) -> int:
        try:
            main(["agent", *argv, "-f", str(self._file)])
        except SystemExit as exc:
            return exc.code if isinstance(exc.code, int) else 0
        return 0


def test_drain_starts_no_more_and_ends_nothing(
    config: DeploymentConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    async def body() -> None:
        commands = Commands(config, capsys)
        async with agent(config, keep=True) as client:
            engine = await start(client)
            code, out, _ = await commands.run("drain", "--reason", "driver upgrade")
            assert code == 0
            assert out == (
                "drains: driver upgrade; slots that still serve: 0; parked engines ended: none\n"
            )
            with pytest.raises(EngineError, match=r"drains \(driver upgrade\)"):
                await start(client, slot=1)
            # The engine that serves goes on, and its operation may ask again.
            assert await start(client) == engine
        async with agent(config) as client:
            _, out, _ = await commands.run("status")
            assert "drains: driver upgrade" in out
            assert f"slot 0: serving {engine.incarnation} (cold" in out
            assert "held by slot0 of operation op-1 at epoch 1" in out
            assert (await commands.run("undrain"))[0] == 0
            assert '"draining": ""' in (await commands.run("status", "--json"))[1]
            await start(client, slot=1)
        code, out, err = await commands.run("drain")
        assert (code, out) == (1, "")
        assert err.startswith("error: no agent answers on ")
        assert len(err.splitlines()) == 1

    asyncio.run(asyncio.wait_for(body(), 60))


def test_evict_from_the_command_line(
    config: DeploymentConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    async def body() -> None:
        commands = Commands(config, capsys)
        async with agent(config) as client:
            engine = await start(client)
            assert await client.park_engine(0, engine.incarnation, timeout_s=20) == ""
            _, out, _ = await commands.run("status")
            assert re.search(rf"slot 0: parked for \d+ s \(pid {engine.pid}, ", out)
            assert "slot 1: free; image none" in out
            assert (await commands.run("evict", "0"))[:2] == (0, "evicted from slots: 0\n")
            assert (await commands.run("evict", "all"))[:2] == (0, "evicted from slots: none\n")
            code, _, err = await commands.run("evict", "x")
            assert (code, err) == (2, "error: SLOT: 'x' is neither a slot nor 'all'\n")
            assert (await commands.run("evict", "7"))[0] == 1

    asyncio.run(asyncio.wait_for(body(), 60))


def test_process_that_is_not_ours_is_never_looked_for() -> None:
    """Our own namespace is not one that an agent may end."""
    own = identify(os.getpid())
    assert own is not None
    assert namespace_of(own) is None
    kill_and_wait(type(own)(own.pid, own.start_ticks + 1), timeout_s=1)
