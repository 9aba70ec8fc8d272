"""The agent with real processes; with real CRIU where the host has it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dynamo_elastic.agent.base import StartedEngine, Tier
from dynamo_elastic.agent.client import AgentClient
from dynamo_elastic.agent.host import close_host, open_host
from dynamo_elastic.agent.image_source import NoImages
from dynamo_elastic.agent.images import Images
from dynamo_elastic.agent.open_images import images_or_reason
from dynamo_elastic.agent.rehearse import rehearse
from dynamo_elastic.agent.server import AgentServer
from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.engine.base import ATTACH_FILE
from dynamo_elastic.errors import EngineError
from dynamo_elastic.failpoints import KILL_ONCE_DIR
from dynamo_elastic.ipc import RpcClient, wait_for_socket
from dynamo_elastic.snapshot.base import Command, Namespace
from dynamo_elastic.snapshot.catalog import Catalog
from dynamo_elastic.snapshot.criu import Criu
from dynamo_elastic.snapshot.manifest import Manifest
from dynamo_elastic.snapshot.namespace import PidNamespace
from dynamo_elastic.snapshot.process import alive, identify, namespace_pid, session_of
from dynamo_elastic.snapshot.restore import Restored
from dynamo_elastic.testing.deployments import asyncio_test, deployment, standin_argv
from dynamo_elastic.types import Epoch, OperationId, WorkerId

ARGV = standin_argv("--mb", "4")
OPERATION = OperationId("op-1")
COLD = (Tier.COLD,)


@pytest.fixture
def config() -> Iterator[DeploymentConfig]:
    # Not tmp_path: a socket's path may have 107 bytes at most.
    with tempfile.TemporaryDirectory(prefix="de-") as directory:
        yield deployment(Path(directory))


@asynccontextmanager
async def serving(
    config: DeploymentConfig, argv: Any = ARGV, images: Any = None
) -> AsyncIterator[AgentClient]:
    server = AgentServer(config, images or NoImages("none made"), argv)
    await server.start()
    client = AgentClient(config.agent_socket)
    try:
        yield client
    finally:
        await client.stop_all()
        await client.close()
        await server.close()


async def start(
    client: AgentClient, slot: int = 0, operation: OperationId = OPERATION, **options: Any
) -> StartedEngine:
    options = {"timeout_s": 60.0} | options
    worker = WorkerId(f"slot{slot}")
    return await client.start_engine(slot, worker, operation, Epoch(1), **options)


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(1000):
        if holds():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("did not come about in 5 s")


def wait_until(holds: Callable[[], bool]) -> None:
    asyncio.run(until(holds))


async def ask(engine: StartedEngine, name: str) -> Any:
    rpc = RpcClient(Path(engine.socket_path))
    try:
        return await rpc.call(name, {}, timeout_s=10.0)
    finally:
        await rpc.close()


@asyncio_test
async def test_cold_engine_lives_and_dies_with_its_lease(config: DeploymentConfig) -> None:
    async with serving(config) as client:
        engine = await start(client)
        assert engine.tier is Tier.COLD
        assert engine.incarnation.startswith("slot0-")
        assert [line.split(":")[0] for line in engine.fell_through] == ["parked", "image", "cached"]
        assert (await ask(engine, "status"))["incarnation"] == engine.incarnation
        assert await start(client) == engine
        with pytest.raises(EngineError, match="stop it first"):
            await start(client, operation=OperationId("op-2"))

        process = identify(engine.pid)
        assert process is not None
        await client.stop_engine(0, type(engine.incarnation)("another"))
        assert alive(process)
        await client.stop_engine(0, engine.incarnation)
        assert not alive(process)
        await client.stop_engine(0, engine.incarnation)
        assert (await client.slots())[0].incarnation == ""
        again = await start(client, operation=OperationId("op-2"))
        assert again.incarnation != engine.incarnation


@asyncio_test
async def test_same_operation_twice_at_once_is_one_engine(config: DeploymentConfig) -> None:
    async with serving(config) as client:
        first, second, other = await asyncio.gather(
            start(client), start(client), start(client, slot=1)
        )
        assert first == second
        assert other.incarnation.startswith("slot1-")


@pytest.mark.parametrize(
    ("flags", "reason"), [(("--crash",), "planted crash"), (("--hang",), "not ready in time")]
)
@asyncio_test
async def test_engine_that_does_not_come_up(
    config: DeploymentConfig, flags: tuple[str, ...], reason: str
) -> None:
    async with serving(config, standin_argv(*flags)) as client:
        with pytest.raises(EngineError, match=reason):
            await start(client, timeout_s=2.0)
        assert (await client.slots())[0].pid == 0
        assert not (config.control_dir(0) / "engine.json").exists()


@asyncio_test
async def test_engine_that_dies_frees_its_slot(config: DeploymentConfig) -> None:
    async with serving(config) as client:
        engine = await start(client)
        os.kill(engine.pid, signal.SIGKILL)
        await until(lambda: not (config.control_dir(0) / "engine.json").exists())
        assert (await client.slots())[0].pid == 0
        assert (await start(client)).incarnation != engine.incarnation


@pytest.mark.root
@asyncio_test
async def test_successor_of_a_killed_agent_adopts(config: DeploymentConfig) -> None:
    first = spawn_agent(config)
    await wait_for_socket(config.agent_socket, timeout_s=20)
    client = AgentClient(config.agent_socket)
    engine = await start(client)
    # A start that the agent does not live to see the end of.
    half = asyncio.create_task(start(client, slot=1))
    await until((config.control_dir(1) / "engine.json").exists)
    orphan = json.loads((config.control_dir(1) / "engine.json").read_text())["process"]["pid"]
    first.kill()
    first.wait()
    with pytest.raises(EngineError):
        await half
    await client.close()
    assert (await ask(engine, "status"))["incarnation"] == engine.incarnation

    second = spawn_agent(config)
    await wait_for_socket(config.agent_socket, timeout_s=20)
    client = AgentClient(config.agent_socket)
    try:
        slots = await client.slots()
        assert (slots[0].incarnation, slots[0].pid) == (engine.incarnation, engine.pid)
        assert slots[1].pid == 0
        assert identify(orphan) is None
        assert await start(client) == engine
        # A told agent leaves engines alive, too.
        second.send_signal(signal.SIGTERM)
        assert second.wait(timeout=10) == 0
        assert identify(engine.pid) is not None
        second = spawn_agent(config)
        await wait_for_socket(config.agent_socket, timeout_s=20)
        await client.stop_engine(0, engine.incarnation)
        assert identify(engine.pid) is None
    finally:
        await client.stop_all()
        await client.close()
        assert second.wait(timeout=10) == 0


@pytest.mark.root
def test_strays_are_ended_and_an_engine_with_its_children_is_not(config: DeploymentConfig) -> None:
    config.state_dir.mkdir(parents=True)
    host = open_host(config)
    try:
        log = config.state_dir / "log"
        argv = ("/bin/sh", "-c", "sleep 600 & wait")
        engine, stray = (host.namespace.spawn(Command(argv, {}, log)) for _ in range(2))
        # Neither is a restore that goes on: its CRIU has its parent outside.
        entered = subprocess.Popen(host.namespace.enter(["sleep", "600"]))
        namespace = host.namespace
        assert isinstance(namespace, PidNamespace)
        wait_until(lambda: len(namespace.processes()) == 5)
        host.end_strays(frozenset({engine}))
        assert not alive(stray)
        assert entered.wait(timeout=5) == -signal.SIGKILL
        left = namespace.processes()
        assert engine in left
        assert {session_of(process.pid) for process in left} == {engine.pid}
        assert len(left) == 2
    finally:
        close_host(config, host)


def spawn_agent(config: DeploymentConfig) -> subprocess.Popen[bytes]:
    config.agent_socket.unlink(missing_ok=True)
    module = "dynamo_elastic.testing.standin_agent"
    return subprocess.Popen([sys.executable, "-m", module, str(config.run_dir.parent)])


@pytest.fixture
def images(config: DeploymentConfig) -> Images:
    return Images(config, Criu.find(), Catalog(config.snapshot.catalog), standin_argv("--torch"))


@pytest.mark.root
@pytest.mark.criu
@asyncio_test
async def test_an_engine_has_no_identity_before_its_restore_is_over(
    config: DeploymentConfig, images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was woken while its CUDA state was still away died in the driver."""
    manifest = images.create(0)
    restore, early = images.restore_image, list[Path]()

    def watched(manifest: Manifest, namespace: Namespace, *, timeout_s: float) -> Restored:
        restored = restore(manifest, namespace, timeout_s=timeout_s)
        identity = namespace.view(Path(manifest.fingerprint.control_dir)) / ATTACH_FILE
        early.extend([identity] if identity.exists() else [])
        return restored

    monkeypatch.setattr(images, "restore_image", watched)
    await rehearse(images, manifest, timeout_s=60)
    async with serving(config, standin_argv("--torch"), images) as client:
        assert (await start(client)).tier is Tier.IMAGE
    assert early == []


@pytest.mark.root
@pytest.mark.criu
@asyncio_test
async def test_two_slots_restored_side_by_side(config: DeploymentConfig, images: Images) -> None:
    made = [images.create(slot) for slot in (0, 1)]
    async with serving(config, standin_argv("--torch"), images) as client:
        assert [slot.image_id for slot in await client.slots()] == [m.image_id for m in made]
        cold = await start(client, tiers=COLD)
        result = (await ask(cold, "work"))["result"]
        await client.stop_engine(0, cold.incarnation)

        engines = await asyncio.gather(start(client), start(client, slot=1))
        assert {e.tier for e in engines} == {Tier.IMAGE}
        assert [namespace_pid(e.pid) for e in engines] == [1000, 2000]
        answers = [await ask(e, "work") for e in engines]
        assert [a["result"] for a in answers] == [result, result]
        await client.stop_engine(0, engines[0].incarnation)
        again = await start(client, operation=OperationId("op-2"))
        assert again.tier is Tier.IMAGE
        assert again.incarnation != engines[0].incarnation
        renewed = await ask(again, "work")
        assert renewed["result"] == result
        randoms = {a["random"] for a in (*answers, renewed)}
        assert len(randoms) == 3


@pytest.mark.root
@pytest.mark.criu
@asyncio_test
async def test_damaged_image_falls_to_cold(config: DeploymentConfig, images: Images) -> None:
    manifest = images.create(0)
    pages = images.catalog.directory(manifest.image_id) / "pages-1.img"
    with pages.open("r+b") as file:
        file.seek(4096)
        byte = file.read(1)
        file.seek(4096)
        file.write(bytes([byte[0] ^ 1]))
    async with serving(config, standin_argv("--torch"), images) as client:
        engine = await start(client)
        assert engine.tier is Tier.COLD
        assert "content was altered" in engine.fell_through[-1]
        await client.stop_engine(0, engine.incarnation)
        with pytest.raises(EngineError, match="content was altered"):
            await start(client, tiers=(Tier.IMAGE,))


@asyncio_test
async def test_without_root_engines_are_plain_processes(
    config: DeploymentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    without = images_or_reason(config, ARGV)
    async with serving(config, ARGV, without) as client:
        engine = await start(client)
        assert engine.tier is Tier.COLD
        assert "needs root" in engine.fell_through[1]
        assert os.stat(f"/proc/{engine.pid}/ns/pid") == os.stat("/proc/self/ns/pid")
        assert os.getsid(engine.pid) == engine.pid
        assert "not root" in (await client.status())["skipped"][0]
    assert identify(engine.pid) is None


@asyncio_test
async def test_second_agent_is_refused(config: DeploymentConfig) -> None:
    async with serving(config) as client:
        second = AgentServer(config, NoImages("none made"), ARGV)
        with pytest.raises(EngineError, match="another agent serves"):
            await second.start()
        await client.slots()


@asyncio_test
async def test_engines_are_told_of_failpoints_and_nothing_else(
    config: DeploymentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KILL_ONCE_DIR, str(config.run_dir))
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    async with serving(config) as client:
        answer = await ask(await start(client), "work")
        assert answer["environment"] == {KILL_ONCE_DIR: str(config.run_dir)}


@asyncio_test
async def test_status_says_what_is_skipped(config: DeploymentConfig) -> None:
    off = images_or_reason(
        deployment(config.run_dir.parent, snapshot={"enabled": False}), standin_argv()
    )
    async with serving(config, ARGV, off) as client:
        assert "snapshot.enabled" in (await client.status())["no_image"]["0"]
