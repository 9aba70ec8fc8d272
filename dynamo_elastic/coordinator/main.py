"""The coordinator's process: python -m dynamo_elastic.coordinator --config FILE --num-experts N."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
from pathlib import Path

from dynamo_elastic.config import DeploymentConfig, engine_shape, load_config
from dynamo_elastic.coordinator.etcd import EtcdStore
from dynamo_elastic.coordinator.main_loop import Coordinator, Deployment
from dynamo_elastic.coordinator.records import Keys
from dynamo_elastic.coordinator.timeline import TIMELINE_FILE, Timeline
from dynamo_elastic.errors import ElasticError
from dynamo_elastic.failpoints import arm_from_environment


def main(argv: list[str] | None = None) -> int:
    """Coordinate until SIGTERM or SIGINT (0), or until a setting or a record is bad (1)."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    arm_from_environment()
    try:
        asyncio.run(_run(load_config(args.config), args.num_experts))
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
    store = EtcdStore(config.etcd.urls)
    work = asyncio.ensure_future(Coordinator(store, deployment, _name()).run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, work.cancel)
    try:
        await asyncio.wait({work})
        if not work.cancelled():
            work.result()
    finally:
        await store.close()


def _name() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dynamo_elastic.coordinator")
    parser.add_argument("--config", type=Path, required=True, help="deployment YAML")
    parser.add_argument("--num-experts", type=int, required=True, help="experts of the model")
    return parser
