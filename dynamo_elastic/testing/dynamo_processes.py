"""Dynamo's real frontend and planner for a test, on loopback; ended by their own pids."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import aiohttp

from dynamo_elastic.config import DeploymentConfig, parse_config
from dynamo_elastic.config_sections import MAX_SYSTEM_PORT
from dynamo_elastic.dynamo.environment import dynamo_environment
from dynamo_elastic.dynamo.launch import frontend_argv
from dynamo_elastic.engine.reference.make_model import write_model
from dynamo_elastic.testing.etcd_process import EtcdProcess, free_port

_START_TIMEOUT_S = 40.0


def dynamo_deployment(
    directory: Path, etcd: EtcdProcess, *, slots: int, router_mode: str = "round-robin"
) -> DeploymentConfig:
    """A deployment on a running etcd, with a small model and free ports."""
    write_model(directory / "model")
    return parse_config(
        {
            "deployment": "test",
            "model": {"path": str(directory / "model"), "name": "test"},
            "scale": {"initial_ranks": 1, "max_ranks": slots, "lease_ttl_s": 5},
            "etcd": {"start": False, "endpoints": [etcd.url]},
            "frontend": {"port": free_port(), "router_mode": router_mode},
            "planner": {"control_port": free_port(), "interval_s": 1},
            "run_dir": str(directory / "run"),
        }
    )


@contextmanager
def process(
    config: DeploymentConfig, argv: Sequence[str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A child in Dynamo's environment."""
    environment = os.environ | dynamo_environment(config)
    with log.open("ab") as out:
        child = subprocess.Popen(argv, env=environment, stdout=out, stderr=out)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


@contextmanager
def frontend(config: DeploymentConfig, directory: Path) -> Iterator[str]:
    """Dynamo's frontend; its URL. It serves the model once an instance is registered."""
    with process(config, frontend_argv(config), directory / "frontend.log"):
        yield f"http://{config.frontend.host}:{config.frontend.port}"


def free_system_port(count: int) -> int:
    """The first of `count` loopback ports in a row that were free a moment ago, and low enough for
    Dynamo."""
    for first in range(20_000 + os.getpid() % 8_000, MAX_SYSTEM_PORT - count, count):
        if all(_is_free(first + k) for k in range(count)):
            return first
    raise RuntimeError(f"no {count} free ports in a row below {MAX_SYSTEM_PORT}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


async def wait_for_model(url: str) -> None:
    """Return once the frontend offers a model. Raises TimeoutError."""
    async with asyncio.timeout(_START_TIMEOUT_S), aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(f"{url}/v1/models") as response:
                    if (await response.json())["data"]:
                        return
            except (aiohttp.ClientError, ValueError, KeyError):
                pass
            await asyncio.sleep(0.1)
