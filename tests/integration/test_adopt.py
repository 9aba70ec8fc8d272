"""docs/adopt.md as a user follows it: a Dynamo deployment gets elastic workers, scales, goes back.

Dynamo's mocker stands in for the old workers, and the reference engine for vLLM; etcd, frontend,
the page's YAML and its commands are real. A decision is written as Dynamo's planner writes it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from dynamo_elastic.config import parse_config
from dynamo_elastic.coordinator.etcd import EtcdStore
from dynamo_elastic.coordinator.records import Keys
from dynamo_elastic.coordinator.store import Put
from dynamo_elastic.dynamo.decisions import PlannerKeys
from dynamo_elastic.dynamo.launch import frontend_argv
from dynamo_elastic.engine.reference.make_model import write_model
from dynamo_elastic.testing.dynamo_processes import process
from dynamo_elastic.testing.etcd_process import etcd_process, free_port
from dynamo_elastic.testing.served import CLI, run_cli

pytestmark = [pytest.mark.etcd, pytest.mark.nixl, pytest.mark.dynamo, pytest.mark.timeout(240)]

PAGE = Path(__file__).parents[2] / "docs" / "adopt.md"
TIMEOUT_S = 90.0


class Adoption:
    """The user's machine: etcd and frontend run all the time."""

    def __init__(self, directory: Path, etcd_url: str) -> None:
        (block,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
        settings = yaml.safe_load(block)
        settings["model"]["path"] = str(directory / "model")
        # What the page does with vLLM's flags a GPU would be needed for.
        settings["engine"] = {"slots_per_rank": 16}
        self.file = directory / "elastic.yaml"
        self.file.write_text(yaml.safe_dump(settings))
        self.api_port, self.frontend_port = free_port(), free_port()
        self.environment = {
            "DYN_ELASTIC_CONFIG": str(self.file),
            "DYN_ELASTIC_COORDINATOR_API_PORT": str(self.api_port),
            "DYN_ELASTIC_ETCD_ENDPOINTS": etcd_url,
            "DYN_ELASTIC_FRONTEND_PORT": str(self.frontend_port),
            "DYN_ELASTIC_PLANNER_START": "false",
            "DYN_ELASTIC_RUN_DIR": str(directory / "run"),
            "DYN_ELASTIC_SNAPSHOT_ENABLED": "false",
        }
        self.config = parse_config(
            {
                **settings,
                "etcd": {"start": False, "endpoints": [etcd_url]},
                "frontend": {"port": self.frontend_port},
            }
        )
        self.log = directory / "serve.log"

    def cli(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run_cli(*arguments, timeout_s=TIMEOUT_S, env=os.environ | self.environment)

    @contextmanager
    def old_workers(self, log: Path) -> Iterator[None]:
        endpoint = f"dyn://{self.config.namespace}.backend.generate"
        argv = [sys.executable, "-m", "dynamo.mocker", "--endpoint", endpoint]
        argv += ["--model-path", str(self.config.model.path)]
        argv += ["--model-name", self.config.model.name, "--speedup-ratio", "100"]
        argv += ["--discovery-backend", "etcd", "--request-plane", "tcp", "--event-plane", "zmq"]
        with process(self.config, argv, log) as child:
            yield
            child.terminate()
            child.wait(20)

    @contextmanager
    def elastic_workers(self) -> Iterator[None]:
        """`dynamo-elastic serve`, ended by Ctrl-C."""
        with self.log.open("wb") as out:
            child = subprocess.Popen(
                [*CLI, "serve"],
                env=os.environ | self.environment,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        try:
            until(lambda: child.poll() is not None or "scale it:" in self.log.read_text())
            assert child.poll() is None, self.log.read_text()
            yield
            child.send_signal(signal.SIGINT)
            assert child.wait(60) == 0, self.log.read_text()
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()

    def answers(self) -> bool:
        """True if the frontend answers a user."""
        body = {
            "model": self.config.model.name,
            "messages": [{"role": "user", "content": "jam fam"}],
            "max_tokens": 4,
        }
        url = f"http://127.0.0.1:{self.frontend_port}/v1/chat/completions"
        return ask("POST", url, body)[0] == 200

    def width(self) -> int:
        code, status = self.api("GET", "status")
        return int(status["width"]) if code == 200 and status["operation"] is None else -1

    def api(self, method: str, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
        """With the token that the page names; 0 before there is one."""
        token = Path(self.environment["DYN_ELASTIC_RUN_DIR"], self.config.deployment, "api.token")
        if not token.exists():
            return 0, {}
        url = f"http://127.0.0.1:{self.api_port}/v1/{path}"
        return ask(method, url, body, token=token.read_text().strip())

    async def decide(self, ranks: int, decision_id: int) -> None:
        """What Dynamo's planner writes when it decides."""
        store, keys = EtcdStore(self.config.etcd.urls), PlannerKeys(self.config.namespace)
        await store.txn([], [Put(keys.ranks, str(ranks).encode())])
        await store.txn([], [Put(keys.decision, str(decision_id).encode())])
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                found = await store.get(keys.acknowledged)
                if found is not None and int(found.value) >= decision_id:
                    break
                await asyncio.sleep(0.05)
        await store.close()

    async def keys_left(self) -> list[str]:
        store = EtcdStore(self.config.etcd.urls)
        left = [v.key for v in await store.get_prefix(Keys(self.config.deployment).prefix)]
        await store.close()
        return left


def ask(method: str, url: str, body: Any = None, token: str = "") -> tuple[int, dict[str, Any]]:
    """Status and JSON body; 0 if nobody listens."""
    data = json.dumps(body).encode() if body is not None else None
    headers = {"content-type": "application/json", "authorization": f"Bearer {token}"}
    request = urllib.request.Request(url, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, {}
    except OSError:
        return 0, {}


def until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline_s, "it did not come about"
        time.sleep(0.1)


def test_adopt_scale_and_go_back(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    with etcd_process(tmp_path / "etcd") as etcd:
        user = Adoption(tmp_path, etcd.url)
        with process(user.config, frontend_argv(user.config), tmp_path / "frontend.log"):
            with user.old_workers(tmp_path / "old.log"):
                until(user.answers)

            shown = user.cli("config", "show", "--sources")
            assert shown.returncode == 0, shown.stderr
            assert f"port: {user.api_port}" in shown.stdout
            dry = user.cli("serve", "--dry-run")
            assert dry.returncode == 0, dry.stderr
            assert "dynamo.frontend" not in dry.stdout

            with user.elastic_workers():
                until(user.answers)
                asyncio.run(user.decide(2, 0))
                assert user.width() == 2
                status = user.cli("status")
                assert "target 2 by planner decision 0 at " in status.stdout
                answer = user.api("PUT", "target", {"target": 1})
                assert answer[0] in (200, 202), answer
                until(lambda: user.width() == 1)
                assert user.answers()
            assert asyncio.run(user.keys_left()) == []

            with user.old_workers(tmp_path / "old-again.log"):
                until(user.answers)
