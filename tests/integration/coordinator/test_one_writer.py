"""Two coordinator processes, their APIs, the command line and a planner on a real etcd: the newest
target wins, and everybody else is told by whom and why."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from dynamo_elastic.cli.exit_codes import SUPERSEDED
from dynamo_elastic.config import api_token, load_config
from dynamo_elastic.coordinator.etcd import EtcdStore
from dynamo_elastic.coordinator.records import OutcomeStatus
from dynamo_elastic.coordinator.targets import request_scale, wait_outcome
from dynamo_elastic.phases import Step
from dynamo_elastic.testing.coordination import CONFIG, SHAPE, World, world
from dynamo_elastic.testing.deployments import asyncio_test
from dynamo_elastic.testing.etcd_process import EtcdProcess, etcd_process, free_port
from dynamo_elastic.testing.participants import Misbehaviour, Script

pytestmark = pytest.mark.etcd

TIMEOUT_S = 30.0


def write_config(directory: Path, etcd: EtcdProcess) -> Path:
    settings = {
        "deployment": "test",
        "model": {"path": "model", "name": "m"},
        "engine": {"slots_per_rank": SHAPE.slots_per_rank},
        "scale": CONFIG.model_dump(),
        "etcd": {"start": False, "endpoints": [etcd.url]},
        "run_dir": str(directory),
    }
    path = directory / "d.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


@asynccontextmanager
async def coordinator(file: Path, port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """A coordinator process that listens on `port`, told so by its environment."""
    environment = os.environ | {"DYN_ELASTIC_COORDINATOR_API_PORT": str(port)}
    argv = ["-m", "dynamo_elastic.coordinator", "--elastic-config", str(file)]
    with file.with_suffix(f".{port}.log").open("wb") as log:
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
            child.terminate()
            assert await asyncio.wait_for(child.wait(), 10) == 0, "SIGTERM ends it cleanly"


async def cli(file: Path, *arguments: str) -> tuple[int, str, str]:
    argv = ["-m", "dynamo_elastic.cli.main", *arguments, "-f", str(file)]
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(sys.executable, *argv, stdout=pipe, stderr=pipe)
    out, err = await asyncio.wait_for(child.communicate(), TIMEOUT_S)
    return child.returncode or 0, out.decode(), err.decode()


def bearer(file: Path) -> dict[str, str]:
    """What load_config() would have the API want to hear; whoever is first makes it."""
    return {"Authorization": f"Bearer {api_token(load_config(file))}"}


async def ask(
    session: aiohttp.ClientSession, method: str, port: int, path: str, **body: Any
) -> Any:
    """The answer of the API on `port`, once it listens. The token is the deployment's own."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            try:
                async with session.request(
                    method, f"http://127.0.0.1:{port}{path}", json=body or None
                ) as response:
                    return await response.json()
            except aiohttp.ClientConnectorError:
                await asyncio.sleep(0.05)


@asyncio_test
async def test_one_writer_and_the_rest_see_why(tmp_path: Path) -> None:
    ports = free_port(), free_port()
    with etcd_process(tmp_path / "etcd") as etcd:
        file, store = write_config(tmp_path, etcd), EtcdStore([etcd.url])
        async with (
            world(store) as here,
            coordinator(file, ports[0]) as first,
            coordinator(file, ports[1]) as second,
            aiohttp.ClientSession(headers=bearer(file)) as session,
        ):
            await here.until(2, timeout_s=TIMEOUT_S)
            views = [await ask(session, "GET", port, "/v1/status") for port in ports]
            assert views[0]["leader"] == views[1]["leader"]
            assert views[0]["answered_by"] != views[1]["answered_by"]

            await the_planner_supersedes_the_user(here, file)
            await two_writers_at_once(here, session, ports)

            # Whoever leads is killed: the other one has answered all along, and goes on.
            pid = int((await here.status()).leader.rpartition("-")[2])
            victim, other = (first, ports[1]) if pid == first.pid else (second, ports[0])
            victim.kill()
            await victim.wait()
            answer = await ask(
                session, "PUT", other, "/v1/target?wait_s=20", target=3, request_id="after"
            )
            assert answer["state"] in ("running", "reached", "unchanged"), answer
            await here.until(3, timeout_s=TIMEOUT_S)
            assert await here.faults() == []
        await store.close()


async def the_planner_supersedes_the_user(here: World, file: Path) -> None:
    here[2].script = Script({Step.RESTORE: Misbehaviour.LATE})
    user = asyncio.create_task(cli(file, "scale", "4"))
    async with asyncio.timeout(TIMEOUT_S):
        while (await here.status()).operation is None:
            await asyncio.sleep(0.01)
    decision = await request_scale(here.store, here.keys, 2, "planner", detail="decision 17")
    code, _, err = await user
    assert code == SUPERSEDED
    assert "target 4 is not wanted any more: target 2 by planner decision 17 at " in err
    assert " supersedes 4 by cli at " in err
    code, out, _ = await cli(file, "status")
    assert code == 0
    assert "target 2 by planner decision 17 at " in out
    code, out, _ = await cli(file, "status", "--json")
    assert json.loads(out)["target"]["supersedes"][0]["source"] == "cli"
    outcome = await wait_outcome(here.store, here.keys, decision, timeout_s=TIMEOUT_S)
    assert outcome.status in (OutcomeStatus.REACHED, OutcomeStatus.UNCHANGED)
    await here.until(2, timeout_s=TIMEOUT_S)


async def two_writers_at_once(
    here: World, session: aiohttp.ClientSession, ports: tuple[int, int]
) -> None:
    """Each through another coordinator: every wish ends as reached, unchanged or superseded."""

    async def write(source: str, port: int, widths: list[int]) -> list[str]:
        states = []
        for number, width in enumerate(widths):
            wish = {"target": width, "request_id": f"{source}-{number}", "source": source}
            answer: dict[str, Any] = {"state": "accepted"}
            while answer["state"] in ("accepted", "queued", "running"):
                answer = await ask(session, "PUT", port, "/v1/target?wait_s=5", **wish)
                await asyncio.sleep(0.02)
            states.append(answer["state"])
            named = f" supersedes {width} by {source} at " in answer["reason"]
            assert named == (answer["state"] == "superseded"), answer
        return states

    async with asyncio.timeout(TIMEOUT_S):
        states = await asyncio.gather(
            write("keda", ports[0], [4, 2, 3]), write("llm-d", ports[1], [3, 4, 2])
        )
    assert {s for part in states for s in part} <= {"reached", "unchanged", "superseded"}
    status = await here.status()
    assert status.target is not None
    await here.until(status.target.ranks, timeout_s=TIMEOUT_S)
    assert await here.faults() == []
