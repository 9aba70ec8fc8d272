"""The agent's process: `python -m dynamo_elastic.agent --elastic-config FILE`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence

from dynamo_elastic.agent.boot import EngineArgv
from dynamo_elastic.agent.image_source import ImageSource
from dynamo_elastic.agent.open_images import images_or_reason
from dynamo_elastic.agent.server import AgentServer
from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.config_launch import launch_parser, read_launch_line
from dynamo_elastic.engine.launch import engine_argv
from dynamo_elastic.errors import ElasticError
from dynamo_elastic.failpoints import arm_from_environment
from dynamo_elastic.logs import configure as configure_logs
from dynamo_elastic.metrics import AgentMetrics
from dynamo_elastic.metrics import serve as serve_metrics
from dynamo_elastic.snapshot.capabilities import confine
from dynamo_elastic.snapshot.gpu import NO_GPU, Gpu, open_gpu


def main(argv: Sequence[str] | None = None) -> None:
    """Run until SIGTERM or SIGINT, leaving engines alive, or until stop_all was called."""
    parser = launch_parser("agent")
    arm_from_environment()
    try:
        confine()
        config, _ = read_launch_line(parser, sys.argv[1:] if argv is None else argv, os.environ)
        configure_logs(config.observe.log_format)
        # Once for the life of the agent: to initialise CUDA takes seconds.
        gpu = open_gpu()
        images = images_or_reason(config, engine_argv, gpu)
        asyncio.run(serve(config, images, engine_argv, gpu))
    except ElasticError as exc:
        sys.exit(f"agent: {exc}")


async def serve(
    config: DeploymentConfig, images: ImageSource, argv_of: EngineArgv, gpu: Gpu = NO_GPU
) -> None:
    """Serve until the process is told to end, or stop_all was called."""
    metrics = AgentMetrics()
    server = AgentServer(config, images, argv_of, gpu=gpu, metrics=metrics)
    loop = asyncio.get_running_loop()
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    waits = {asyncio.create_task(told.wait()), asyncio.create_task(server.stopped())}
    try:
        host = config.observe.metrics_host
        with serve_metrics(metrics, config.agent.metrics_port, host=host):
            await server.start()
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waits:
            task.cancel()
        await server.close()
