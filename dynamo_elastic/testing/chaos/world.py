"""A deployment for faults: real etcd members in namespaces, real processes, streaming clients, and
a recorder of all that happens."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from dynamo_elastic.agent.base import SlotStatus
from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.config_launch import CONFIG_FLAG
from dynamo_elastic.coordinator.status import Status, read_status
from dynamo_elastic.coordinator.targets import request_scale
from dynamo_elastic.demo.load import Load, Prompt, StreamResult, reference_texts
from dynamo_elastic.demo.run import demo_config
from dynamo_elastic.engine.shape import read_shape
from dynamo_elastic.errors import ElasticError, StoreError
from dynamo_elastic.failpoints import HITS_FILE, KILL_ONCE_DIR
from dynamo_elastic.serve import plan
from dynamo_elastic.serve.deployment import Deployment, running
from dynamo_elastic.serve.processes import ProcessSpec
from dynamo_elastic.testing.chaos.etcd_members import TOOLS, EtcdMembers
from dynamo_elastic.testing.chaos.history import Answer, History, Write
from dynamo_elastic.testing.chaos.recorder import Recorder
from dynamo_elastic.testing.chaos.scenario import NARROW, WIDE
from dynamo_elastic.testing.etcd_process import free_port

NAME = "chaos"
PROMPTS = [Prompt("river stone light", 7, 24), Prompt("amber cloud", 8, 40)]
CLIENTS = 2
PAUSE_S = 0.3
"""Between two streams of a client: without it the engines alone fill a small machine."""
STANDBY = "coordinator2"

_US, _FRONTEND, _FIRST_SHELL = 9, 8, 20
ETCD_CLIENTS = {"coordinator": 10, STANDBY: 11, "frontend": _FRONTEND}
"""Process -> by which of etcd's addresses it knows the members."""

_STATE_DISK = "size=96m"
_FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)


def etcd_client(process: str) -> int:
    """The number by which etcd's addresses of a process go."""
    if process.startswith("slot"):
        return _FIRST_SHELL + int(process.removeprefix("slot"))
    return ETCD_CLIENTS.get(process, _US)


def missing_tools() -> str:
    """What has to be installed before there can be a world; '' if nothing."""
    packages = [package for tool, package in TOOLS.items() if shutil.which(tool) is None]
    packages += ["libfaketime"] if _FAKETIME is None else []
    return f"needs {', '.join(packages)} of the distribution" if packages else ""


def all_clients() -> tuple[int, ...]:
    return (_US, *ETCD_CLIENTS.values(), *(_FIRST_SHELL + slot for slot in range(WIDE)))


@dataclass(slots=True)
class World:
    """A running deployment, and what can be seen of it and done to it."""

    config: DeploymentConfig
    deployment: Deployment
    etcd: EtcdMembers
    load: Load
    recorder: Recorder
    failpoints: Path
    clock: Path
    reference: dict[str, str] = field(default_factory=dict)
    _stored: dict[str, Write] = field(default_factory=dict)

    def arm(self, file: str, content: str) -> None:
        """Have a fault happen at a failpoint, once."""
        partial_file = self.failpoints / f".{file}"
        partial_file.write_text(content)
        partial_file.rename(self.failpoints / file)

    def armed(self, file: str) -> bool:
        """True until somebody has come by."""
        return (self.failpoints / file).exists()

    def disarm(self) -> None:
        for file in self.failpoints.iterdir():
            if file.name != HITS_FILE:
                file.unlink()

    async def status(self) -> Status:
        """What etcd says. Raises StoreError."""
        return await read_status(self.deployment.store, self.deployment.keys)

    async def scale(self, ranks: int) -> str:
        """Ask for `ranks`, for as long as etcd takes to hear it."""
        while True:
            try:
                return await request_scale(
                    self.deployment.store, self.deployment.keys, ranks, "chaos"
                )
            except StoreError:
                await asyncio.sleep(0.1)

    async def slots(self) -> tuple[SlotStatus, ...]:
        """What the agent says of its slots; () while it does not answer."""
        try:
            async with asyncio.timeout(2.0):
                return await self.deployment.agent.slots()
        except (ElasticError, TimeoutError):
            return ()

    async def pid(self, process: str) -> int:
        """Of a process by name ('coordinator': of the one that leads); 0 if it is not there."""
        pids = self.deployment.supervisor.pids
        if process.startswith("engine"):
            slot = int(process.removeprefix("engine"))
            return next((s.pid for s in await self.slots() if s.slot == slot), 0)
        return pids.get(await self.actual(process), 0)

    async def actual(self, process: str) -> str:
        """The name of the process that 'coordinator' is: the one that leads."""
        if process != "coordinator":
            return process
        pids = self.deployment.supervisor.pids
        leader = (await self.status()).leader
        return next((n for n in (process, STANDBY) if leader.endswith(f"-{pids.get(n)}")), process)

    def history(self) -> History:
        """All that has happened since the last call. Streams under way count in the next."""
        writes, seen = self.recorder.take()
        answers = [_answer(r) for r in self.load.take()]
        before = sorted(self._stored.values(), key=lambda w: w.revision)
        self._stored |= {w.key: w for w in writes}
        return History(self.deployment.keys.prefix, before, self.reference, writes, seen, answers)


def _answer(result: StreamResult) -> Answer:
    r = result
    return Answer(r.started_s, r.ended_s, r.prompt.key, r.text, r.error, r.token_times_s)


def chaos_config(work_dir: Path, etcd: EtcdMembers) -> DeploymentConfig:
    """Two ranks that hold every expert, three slots, deadlines short enough for many faults."""
    config = demo_config(
        work_dir,
        NAME,
        planner={"enabled": False},
        etcd={"start": False, "endpoints": list(etcd.urls(_US))},
        scale={
            "initial_ranks": NARROW,
            "min_ranks": NARROW,
            "max_ranks": WIDE,
            "lease_ttl_s": 3,
            "step_timeout_s": 6,
            "restore_timeout_s": 38,
            "drain_timeout_s": 2,
            "operation_timeout_s": 40,
            "slots_timeout_s": 20,
            # The next run is about another fault.
            "quarantine_s": 0.5,
        },
        # Runs on images make more of them, and take those away that they have made.
        snapshot={"quarantine_s": 0.5, "max_images_per_slot": 8},
        engine={"peer_timeout_s": 2.0},
        coordinator={"api": {"port": free_port()}},
    )
    return config.model_copy(update={"run_dir": work_dir / "run"})


@asynccontextmanager
async def world(
    work_dir: Path, *, members: int, say: Callable[[str], None], site: int = 0
) -> AsyncIterator[World]:
    """A world of `members` etcd members under `work_dir`; images and model there are used again.
    Worlds of different sites may be there at once."""
    async with AsyncExitStack() as stack:
        etcd = EtcdMembers(work_dir / "etcd", members, all_clients(), site=site)
        stack.callback(etcd.stop)
        await asyncio.to_thread(etcd.start)
        config = chaos_config(work_dir, etcd)
        stack.enter_context(_small_disk(config.run_dir))
        failpoints = _fresh_directory(work_dir / "failpoints")
        clock = work_dir / "clock"
        clock.write_text("+0")
        # The agent, too, hands this on to its engines.
        os.environ[KILL_ONCE_DIR] = str(failpoints)
        stack.callback(os.environ.pop, KILL_ONCE_DIR)
        adapt = partial(_adapted, config=config, etcd=etcd, clock=clock)
        deployment = await stack.enter_async_context(running(config, say, adapt))
        stack.push_async_callback(deployment.supervisor.stop, STANDBY)
        await _second_coordinator(deployment, adapt)
        recorder = Recorder(etcd.urls(_US), config, deployment.keys.prefix)
        await stack.enter_async_context(recorder.running())
        load = Load(deployment.url, config.model.name, PROMPTS, CLIENTS, pause_s=PAUSE_S)
        load.start()
        stack.push_async_callback(load.stop)
        await load.wait_for_each_prompt(timeout_s=60)
        here = World(config, deployment, etcd, load, recorder, failpoints, clock)
        here.reference = reference_texts(load.results)
        yield here


async def _second_coordinator(deployment: Deployment, adapt: Callable[..., ProcessSpec]) -> None:
    """One more candidate, which leads when the first does not."""
    config = deployment.config
    experts = str(read_shape(config.model.path).num_experts)
    spec = plan.coordinator_spec(config, plan.config_file(config), experts)
    log_path = spec.log_path.with_name(f"{STANDBY}.log")
    second = replace(spec, name=STANDBY, log_path=log_path)
    await deployment.supervisor.start(adapt(second), None, timeout_s=30)


def _adapted(
    spec: ProcessSpec, *, config: DeploymentConfig, etcd: EtcdMembers, clock: Path
) -> ProcessSpec:
    """`spec` with addresses of etcd of its own; a coordinator with a wall clock that can jump."""
    urls = etcd.urls(etcd_client(spec.name))
    environment = {**spec.environment, "ETCD_ENDPOINTS": ",".join(urls)}
    if spec.name.startswith("coordinator"):
        environment |= _jumping_clock(clock)
    argv = list(spec.argv)
    if CONFIG_FLAG in argv:
        at = argv.index(CONFIG_FLAG) + 1
        own = config.etcd.model_copy(update={"endpoints": urls})
        settings = plan.absolute(config).model_copy(update={"etcd": own})
        if spec.name == STANDBY:
            settings = settings.model_copy(update={"coordinator": type(config.coordinator)()})
        path = Path(argv[at]).with_name(f"config-{spec.name}.json")
        path.write_text(settings.model_dump_json())
        argv[at] = str(path)
    return replace(spec, argv=argv, environment=environment)


def _jumping_clock(clock: Path) -> Mapping[str, str]:
    """libfaketime: the wall clock alone is shifted, by what the file says."""
    return {
        "LD_PRELOAD": str(_FAKETIME),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_DONT_RESET": "1",
    }


@contextmanager
def _small_disk(directory: Path) -> Iterator[None]:
    """A file system of its own for `directory`, small enough to be filled; its logs are kept."""
    directory.mkdir(parents=True, exist_ok=True)
    subprocess.run(["umount", "-q", str(directory)], check=False)
    argv = ["mount", "-t", "tmpfs", "-o", _STATE_DISK, "tmpfs", str(directory)]
    subprocess.run(argv, check=True, timeout=10)
    try:
        yield
    finally:
        kept, logs = directory.with_name("last-run"), directory / NAME / "logs"
        shutil.rmtree(kept, ignore_errors=True)
        if logs.is_dir():
            shutil.copytree(logs, kept)
        subprocess.run(["umount", "-l", str(directory)], check=False, timeout=10)


def _fresh_directory(path: Path) -> Path:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path
