"""The agent's process: `python -m dynamo_elastic.agent --config FILE`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from dynamo_elastic.agent.images import images_or_reason
from dynamo_elastic.agent.server import AgentServer
from dynamo_elastic.agent.start import EngineArgv, ImageSource
from dynamo_elastic.config import DeploymentConfig, load_config
from dynamo_elastic.engine.launch import engine_argv
from dynamo_elastic.errors import ElasticError
from dynamo_elastic.failpoints import arm_from_environment


def main(argv: Sequence[str] | None = None) -> None:
    """Run until SIGTERM or SIGINT, leaving engines alive, or until stop_all was called."""
    parser = argparse.ArgumentParser(prog="python -m dynamo_elastic.agent", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="deployment YAML")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s agent %(levelname)s %(message)s")
    arm_from_environment()
    try:
        asyncio.run(_run(args.config))
    except ElasticError as exc:
        sys.exit(f"agent: {exc}")


async def _run(path: Path) -> None:
    config = load_config(path)
    await serve(config, images_or_reason(config), engine_argv)


async def serve(config: DeploymentConfig, images: ImageSource, argv_of: EngineArgv) -> None:
    """Serve until the process is told to end, or stop_all was called."""
    server = AgentServer(config, images, argv_of)
    loop = asyncio.get_running_loop()
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    waits = {asyncio.create_task(told.wait()), asyncio.create_task(server.stopped())}
    try:
        await server.start()
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waits:
            task.cancel()
        await server.close()
