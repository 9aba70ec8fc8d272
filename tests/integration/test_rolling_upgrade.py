"""Two versions side by side, as real processes: coordinators, workers and agents are replaced one
by one, in any order, in the middle of an operation too.

The other version is a copy of the package with a later schema: `neighbour` reads the next version
and writes today's, as the release after this one would; `later` writes the next one as well.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import yaml

import dynamo_elastic
from dynamo_elastic.agent.base import SlotStatus, Tier
from dynamo_elastic.agent.client import AgentClient
from dynamo_elastic.coordinator.etcd import EtcdStore
from dynamo_elastic.coordinator.records import Keys, RecordNewer, plain
from dynamo_elastic.coordinator.status import read_status
from dynamo_elastic.coordinator.targets import request_scale, wait_outcome
from dynamo_elastic.errors import ElasticError
from dynamo_elastic.phases import Phase
from dynamo_elastic.testing.coordination import CONFIG, SHAPE, World
from dynamo_elastic.testing.deployments import asyncio_test, deployment
from dynamo_elastic.testing.etcd_process import EtcdProcess, etcd_missing, etcd_process
from dynamo_elastic.testing.participants import FakeShell, running
from dynamo_elastic.types import Epoch, OperationId, WorkerId

TIMEOUT_S = 80.0
PACKAGE = Path(dynamo_elastic.__file__).parent
UPGRADES = "UPGRADES: dict[int, Upgrade] = {}"

SHELLS = """
import asyncio, sys
from dynamo_elastic.coordinator.etcd import EtcdStore
from dynamo_elastic.coordinator.records import Keys
from dynamo_elastic.testing.participants import FakeShell, running
async def main(url, deployment, slots):
    store = EtcdStore([url])
    async with running(FakeShell(store, Keys(deployment), int(s)) for s in slots):
        await asyncio.Event().wait()
asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
"""


def version(directory: Path, *, writes: int) -> Path:
    """A copy of the package that reads one schema version more, and writes `writes`."""
    copy = directory / "dynamo_elastic"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    path = copy / "coordinator" / "records.py"
    text = path.read_text()
    for old, new in (
        ("\nSCHEMA_VERSION = 1\n", f"\nSCHEMA_VERSION = {writes}\n"),
        ("\nNEWEST_READ = 1\n", "\nNEWEST_READ = 2\n"),
        (UPGRADES, UPGRADES.replace("{}", "{1: lambda kind, body: body}")),
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path.write_text(text)
    return directory


@pytest.fixture(scope="module")
def neighbour(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return version(tmp_path_factory.mktemp("neighbour"), writes=1)


@pytest.fixture(scope="module")
def later(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return version(tmp_path_factory.mktemp("later"), writes=2)


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdProcess]:
    if etcd_missing():
        pytest.skip(etcd_missing())
    with etcd_process(tmp_path_factory.mktemp("etcd")) as process:
        yield process


def environment(of: Path | None, **more: str) -> dict[str, str]:
    """Of a process that runs that copy of the package; None: this one."""
    ours = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return ours | ({"PYTHONPATH": str(of)} if of else {}) | {"PYTHONSAFEPATH": "1"} | more


@asynccontextmanager
async def process(
    of: Path | None, log: Path, *arguments: str, **more: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    with log.open("ab") as out:
        child = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, env=environment(of, **more), stdout=out, stderr=out
        )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


class Site:
    """One deployment on etcd, looked at by this version."""

    def __init__(self, directory: Path, name: str, etcd: EtcdProcess) -> None:
        self.directory = directory
        self.keys = Keys(name)
        self.etcd = etcd
        self.store = EtcdStore([etcd.url], timeout_s=10.0)
        self.file = directory / f"{name}.yaml"
        settings = {
            "deployment": name,
            "model": {"path": "model", "name": "m"},
            "engine": {"slots_per_rank": SHAPE.slots_per_rank},
            "scale": CONFIG.model_copy(update={"lease_ttl_s": 3}).model_dump(),
            "etcd": {"start": False, "endpoints": [etcd.url]},
            "run_dir": str(directory),
        }
        self.file.write_text(yaml.safe_dump(settings))

    def log(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    @asynccontextmanager
    async def coordinator(
        self, of: Path | None, failpoint: str = ""
    ) -> AsyncIterator[asyncio.subprocess.Process]:
        arguments = ("-m", "dynamo_elastic.coordinator", f"--elastic-config={self.file}")
        experts = f"--num-experts={SHAPE.num_experts}"
        log = self.log("coordinator")
        async with process(
            of, log, *arguments, experts, DYNAMO_ELASTIC_FAILPOINT=failpoint
        ) as child:
            yield child

    @asynccontextmanager
    async def shells(
        self, of: Path | None, *slots: int
    ) -> AsyncIterator[asyncio.subprocess.Process]:
        names = [str(slot) for slot in slots]
        arguments = ("-c", SHELLS, self.etcd.url, self.keys.deployment, *names)
        async with process(of, self.log("shells"), *arguments) as child:
            yield child

    async def until(self, width: int) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                status = await read_status(self.store, self.keys)
                if status.width == width and not status.operation and not status.lost_reasons():
                    return
                await asyncio.sleep(0.05)

    async def scale(self, ranks: int) -> None:
        asked = await request_scale(self.store, self.keys, ranks, "test")
        await wait_outcome(self.store, self.keys, asked, timeout_s=TIMEOUT_S)
        await self.until(ranks)


@pytest.mark.etcd
@pytest.mark.parametrize("newer", ["coordinator", "workers"])
@asyncio_test
async def test_either_side_may_be_the_newer_one(
    newer: str, neighbour: Path, etcd: EtcdProcess, tmp_path: Path
) -> None:
    site = Site(tmp_path, f"side-{newer}", etcd)
    coordinator, workers = (neighbour, None) if newer == "coordinator" else (None, neighbour)
    async with site.shells(workers, 0, 1), site.shells(None, 2, 3), site.coordinator(coordinator):
        await site.until(2)
        await site.scale(4)
        await site.scale(2)
    await site.store.close()


@pytest.mark.slow
@pytest.mark.etcd
@asyncio_test
async def test_the_coordinator_is_replaced_in_the_middle_of_an_operation_and_back_again(
    neighbour: Path, etcd: EtcdProcess, tmp_path: Path
) -> None:
    site = Site(tmp_path, "middle", etcd)
    shells = [FakeShell(site.store, site.keys, slot) for slot in range(4)]
    async with running(shells) as listed:
        here = World(site.store, listed, site.keys)
        for of, point, ranks in (
            (None, "", 2),
            (None, "scale.before_commit", 4),  # killed there: the newer one takes it back
            (neighbour, "scale.after_commit", 3),  # and there: the older one ends it
            (None, "", 4),
        ):
            async with site.coordinator(of, point) as child:
                await request_scale(site.store, site.keys, ranks, "test")
                if point:
                    async with asyncio.timeout(TIMEOUT_S):
                        assert await child.wait() == -signal.SIGKILL
                    assert (await here.status()).operation is not None
                else:
                    await here.until(ranks, timeout_s=TIMEOUT_S)
        assert await here.faults() == []
        last = (await here.status()).last
        assert last is not None
        assert last.phase is Phase.DONE
    await site.store.close()


@pytest.mark.etcd
@asyncio_test
async def test_an_older_version_leaves_alone_what_it_can_not_read(
    later: Path, etcd: EtcdProcess, tmp_path: Path
) -> None:
    site = Site(tmp_path, "later", etcd)
    async with site.shells(later, 0, 1, 2, 3):
        async with site.coordinator(later) as newer:
            async with asyncio.timeout(TIMEOUT_S):
                while not (stored := await site.store.get(site.keys.last)):
                    await asyncio.sleep(0.05)
            assert plain(stored.value)["phase"] == Phase.DONE
            newer.terminate()
            assert await newer.wait() == 0
        with pytest.raises(RecordNewer, match="has schema version 2, this program reads 1-1"):
            await read_status(site.store, site.keys)
        before = {v.key: v.value for v in await site.store.get_prefix(site.keys.prefix)}
        async with site.coordinator(None) as older, asyncio.timeout(TIMEOUT_S):
            assert await older.wait() == 1
        last_line = site.log("coordinator").read_text().splitlines()[-1]
        assert last_line.startswith("coordinator: ")
        assert "has schema version 2, this program reads 1-1: upgrade it" in last_line
        after = {v.key: v.value for v in await site.store.get_prefix(site.keys.prefix)}
        assert after == before
        shown = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "dynamo_elastic.cli.main", "status", "-f", str(site.file)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert shown.returncode == 1
        assert "schema version 2, this program reads 1-1: upgrade it" in shown.stderr
    await site.store.close()


@contextmanager
def agent(of: Path | None, directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """An agent with stand-in engines, until it is told to end; engines live on."""
    argv = [sys.executable, "-m", "dynamo_elastic.testing.standin_agent", str(directory)]
    with (directory / "agent.log").open("ab") as out:
        child = subprocess.Popen(argv, env=environment(of), stdout=out, stderr=out)
    try:
        yield child
        child.terminate()
        child.wait(TIMEOUT_S)
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()


async def engines(client: AgentClient) -> list[SlotStatus]:
    """What the agent has, once it answers."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            try:
                return [slot for slot in await client.slots() if slot.pid]
            except ElasticError:
                await asyncio.sleep(0.05)


@pytest.mark.root
def test_agents_hand_their_engines_on_in_both_directions(
    neighbour: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("a")
    config = deployment(directory)

    async def start() -> list[SlotStatus]:
        client = AgentClient(config.agent_socket)
        await engines(client)
        await client.start_engine(
            *(0, WorkerId("slot0"), OperationId("op"), Epoch(1)), tiers=(Tier.COLD,), timeout_s=60
        )
        found = await engines(client)
        await client.close()
        return found

    async def look(*, stop: bool = False) -> list[SlotStatus]:
        client = AgentClient(config.agent_socket)
        found = await engines(client)
        if stop:
            await client.stop_all()
        await client.close()
        return found

    with agent(None, directory):
        (first,) = asyncio.run(start())
    with agent(neighbour, directory):
        (second,) = asyncio.run(look())
    with agent(None, directory) as last:
        (third,) = asyncio.run(look(stop=True))
        assert last.wait(TIMEOUT_S) == 0
    kept = {(s.pid, s.incarnation) for s in (first, second, third)}
    assert len(kept) == 1, "the same engine, all along"
