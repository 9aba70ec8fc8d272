"""The coordinator's process: `python -m dynamo_elastic.coordinator`."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys

from dynamo_elastic.config import DeploymentConfig, api_token, engine_shape
from dynamo_elastic.config_launch import launch_parser, read_launch_line
from dynamo_elastic.coordinator.api import ApiServer
from dynamo_elastic.coordinator.etcd import EtcdStore
from dynamo_elastic.coordinator.main_loop import Coordinator, Deployment
from dynamo_elastic.coordinator.records import Keys
from dynamo_elastic.coordinator.store import check_admitted
from dynamo_elastic.coordinator.timeline import TIMELINE_FILE, Timeline
from dynamo_elastic.errors import ElasticError
from dynamo_elastic.failpoints import arm_from_environment


def main(argv: list[str] | None = None) -> int:
    """Coordinate until SIGTERM or SIGINT (0), or until a setting or a record is bad (1)."""
    parser = launch_parser("coordinator")
    arguments = sys.argv[1:] if argv is None else argv
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    arm_from_environment()
    try:
        config, own = read_launch_line(parser, arguments, os.environ)
        asyncio.run(_run(config, own.num_experts))
    except ElasticError as exc:
        sys.stderr.write(f"coordinator: {exc}\n")
        return 1
    return 0


async def _run(config: DeploymentConfig, num_experts: int) -> None:
    deployment = Deployment(
        Keys(config.deployment),
        config.scale,
        engine_shape(config, num_experts),
        Timeline(config.state_dir / TIMELINE_FILE),
    )
    config.state_dir.mkdir(parents=True, exist_ok=True)
    store = EtcdStore.of(config.etcd)
    try:
        await check_admitted(store, deployment.keys.leader)
        api = ApiServer(
            store,
            deployment.keys,
            config.coordinator.api,
            config.scale,
            _name(),
            token=api_token(config),
        )
        work = asyncio.ensure_future(_coordinate(Coordinator(store, deployment, _name()), api))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, work.cancel)
        await asyncio.wait({work})
        if not work.cancelled():
            work.result()
    finally:
        await store.close()


async def _coordinate(coordinator: Coordinator, api: ApiServer) -> None:
    try:
        await api.start()
        await coordinator.run()
    finally:
        await api.close()


def _name() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"
