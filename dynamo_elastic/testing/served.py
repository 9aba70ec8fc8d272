"""A deployment run by the real command line, for tests from outside: scale it, load it, kill it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from dynamo_elastic.agent.base import SlotStatus
from dynamo_elastic.agent.client import AgentClient
from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.coordinator.etcd import EtcdStore
from dynamo_elastic.coordinator.records import Keys
from dynamo_elastic.coordinator.status import Status, read_status
from dynamo_elastic.coordinator.store import Store
from dynamo_elastic.errors import ElasticError
from dynamo_elastic.failpoints import KILL_ONCE_DIR

T = TypeVar("T")

CLI = (sys.executable, "-m", "dynamo_elastic.cli.main")


class ServedDeployment:
    """One `dynamo-elastic serve` process and the ways to look into it."""

    def __init__(self, config: DeploymentConfig, file: Path, failpoints: Path) -> None:
        self.config = config
        self.file = file
        self.failpoints = failpoints
        self.process: subprocess.Popen[bytes] | None = None
        self.log = file.with_suffix(".log")

    @property
    def url(self) -> str:
        return f"http://{self.config.frontend.host}:{self.config.frontend.port}"

    def cli(self, *arguments: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a `dynamo-elastic` command on this deployment."""
        command, *rest = arguments
        return run_cli(command, "-f", str(self.file), *rest, timeout_s=timeout_s)

    def arm(self, failpoint: str) -> None:
        """Kill the process that next comes by `failpoint` ('name' or 'slot2:name'), once."""
        (self.failpoints / failpoint).touch()

    def fired(self, failpoint: str) -> bool:
        """True if an armed failpoint was hit."""
        return not (self.failpoints / failpoint).exists()

    def status(self) -> Status:
        """What etcd says of the deployment."""

        async def read(store: Store) -> Status:
            return await read_status(store, Keys(self.config.deployment))

        return self.with_store(read)

    def with_store(self, body: Callable[[Store], Awaitable[T]]) -> T:
        """Run `body(store)` on a store of its own."""

        async def run() -> T:
            store = EtcdStore.of(self.config.etcd)
            try:
                return await body(store)
            finally:
                await store.close()

        return asyncio.run(run())

    def key_names(self) -> list[str]:
        """Every key of the deployment."""

        async def read(store: Store) -> list[str]:
            return [v.key for v in await store.get_prefix(Keys(self.config.deployment).prefix)]

        return self.with_store(read)

    def slots(self) -> tuple[SlotStatus, ...]:
        """What the agent says of its slots."""

        async def run() -> tuple[SlotStatus, ...]:
            agent = AgentClient(self.config.agent_socket)
            try:
                return await agent.slots()
            finally:
                await agent.close()

        return asyncio.run(run())

    def wait_idle(self, *, timeout_s: float = 60.0) -> Status:
        """Return once no operation is under way and the width is the wanted one."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            status = self.status()
            if status.operation is None and status.topology is not None and status.leader:
                return status
            time.sleep(0.1)
        raise ElasticError(f"an operation is still under way after {timeout_s:g} s")

    def wait_width(self, ranks: int, *, timeout_s: float = 60.0) -> Status:
        """Return once `ranks` ranks are in force and nothing is under way."""
        deadline_s = time.monotonic() + timeout_s
        while (now := self.wait_idle(timeout_s=timeout_s)).width != ranks:
            if time.monotonic() > deadline_s:
                raise ElasticError(f"{now.width} ranks after {timeout_s:g} s, not {ranks}")
            time.sleep(0.1)
        return now

    def timeline(self) -> list[dict[str, Any]]:
        """Events of every operation so far."""
        path = self.config.state_dir / "timeline.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]


def run_cli(
    *arguments: str, timeout_s: float = 60.0, **more: Any
) -> subprocess.CompletedProcess[str]:
    """Run `dynamo-elastic` with `arguments`; its output is text."""
    done: subprocess.CompletedProcess[str] = subprocess.run(
        [*CLI, *arguments], capture_output=True, text=True, timeout=timeout_s, check=False, **more
    )
    return done


@contextmanager
def served(config: DeploymentConfig, work_dir: Path) -> Iterator[ServedDeployment]:
    """Serve `config` until the context is left. Raises ElasticError if it does not come up, or
    does not end with exit code 0 on SIGINT; then its state directory is kept, logs and all."""
    file, failpoints = work_dir / "deployment.yaml", work_dir / "failpoints"
    work_dir.mkdir(parents=True, exist_ok=True)
    failpoints.mkdir(exist_ok=True)
    file.write_text(config.model_dump_json())
    deployment = ServedDeployment(config, file, failpoints)
    with deployment.log.open("wb") as log:
        deployment.process = subprocess.Popen(
            [*CLI, "serve", "-f", str(file)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, KILL_ONCE_DIR: str(failpoints)},
            start_new_session=True,
        )
    try:
        _wait_serving(deployment)
        yield deployment
    finally:
        _interrupt(deployment)
    shutil.rmtree(config.state_dir)


def _wait_serving(deployment: ServedDeployment, timeout_s: float = 180.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        text = deployment.log.read_text(errors="replace")
        if "scale it:" in text:
            return
        if deployment.process is None or deployment.process.poll() is not None:
            raise ElasticError(f"serve ended: {text[-2000:]}")
        time.sleep(0.1)
    raise ElasticError(f"serve did not come up in {timeout_s:g} s: {text[-2000:]}")


def _interrupt(deployment: ServedDeployment) -> None:
    process = deployment.process
    if process is None:
        return
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        code = process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise ElasticError("serve did not end within 60 s of SIGINT") from None
    if code != 0:
        raise ElasticError(f"serve ended with {code}: {deployment.log.read_text()[-2000:]}")
