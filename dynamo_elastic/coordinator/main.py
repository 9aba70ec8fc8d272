"""The coordinator's process: `python -m dynamo_elastic.coordinator`."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys

from dynamo_elastic.config import DeploymentConfig, api_token, engine_shape
from dynamo_elastic.config_launch import launch_parser, read_launch_line
from dynamo_elastic.coordinator.api import ApiServer
from dynamo_elastic.coordinator.chronicle import Chronicle
from dynamo_elastic.coordinator.etcd import EtcdStore
from dynamo_elastic.coordinator.main_loop import Coordinator, Deployment
from dynamo_elastic.coordinator.measure import Measure
from dynamo_elastic.coordinator.observe import Observers
from dynamo_elastic.coordinator.records import Keys
from dynamo_elastic.coordinator.store import check_admitted
from dynamo_elastic.coordinator.timeline import TIMELINE_FILE, Timeline
from dynamo_elastic.errors import ElasticError
from dynamo_elastic.failpoints import arm_from_environment
from dynamo_elastic.logs import configure as configure_logs
from dynamo_elastic.metrics import CoordinatorMetrics
from dynamo_elastic.metrics import serve as serve_metrics
from dynamo_elastic.report.history import History
from dynamo_elastic.report.story import Story
from dynamo_elastic.tracing import open_tracer


def main(argv: list[str] | None = None) -> int:
    """Coordinate until SIGTERM or SIGINT (0), or until a setting or a record is bad (1)."""
    parser = launch_parser("coordinator")
    arguments = sys.argv[1:] if argv is None else argv
    arm_from_environment()
    try:
        config, own = read_launch_line(parser, arguments, os.environ)
        configure_logs(config.observe.log_format)
        asyncio.run(_run(config, own.num_experts))
    except ElasticError as exc:
        sys.stderr.write(f"coordinator: {exc}\n")
        return 1
    return 0


async def _run(config: DeploymentConfig, num_experts: int) -> None:
    config.state_dir.mkdir(parents=True, exist_ok=True)
    keys, store = Keys(config.deployment), EtcdStore.of(config.etcd)
    metrics = CoordinatorMetrics()
    measure, timeline = Measure(metrics), Timeline(config.state_dir / TIMELINE_FILE)
    history = History(config.operations_dir, config.observe.keep_operations)
    tracer = open_tracer(config.deployment) if config.observe.traces else None

    def on_story(story: Story) -> None:
        measure.story(story)
        if tracer is not None:
            tracer.record(story)

    timeout_s = config.scale.operation_timeout_s
    chronicle = Chronicle(
        store,
        keys,
        timeline,
        history,
        timeout_s=timeout_s,
        on_story=on_story,
        on_saved=measure.saved,
    )
    deployment = Deployment(
        keys,
        config.scale,
        engine_shape(config, num_experts),
        Observers(timeline, measure, chronicle),
    )
    try:
        await check_admitted(store, keys.leader)
        api = ApiServer(
            store,
            keys,
            config.coordinator.api,
            config.scale,
            _name(),
            token=api_token(config),
            history=history,
        )
        with serve_metrics(
            metrics,
            config.coordinator.metrics_port,
            host=config.observe.metrics_host,
            setting="coordinator.metrics_port",
        ):
            await _until_told(Coordinator(store, deployment, _name()), api, chronicle)
    finally:
        if tracer is not None:
            tracer.close()
        await store.close()


async def _until_told(coordinator: Coordinator, api: ApiServer, chronicle: Chronicle) -> None:
    """Until SIGTERM or SIGINT. Raises what ended it otherwise."""
    work = asyncio.ensure_future(_coordinate(coordinator, api, chronicle))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, work.cancel)
    await asyncio.wait({work})
    if not work.cancelled():
        work.result()


async def _coordinate(coordinator: Coordinator, api: ApiServer, chronicle: Chronicle) -> None:
    reports = asyncio.ensure_future(chronicle.run())
    try:
        await api.start()
        await coordinator.run()
    finally:
        reports.cancel()
        await api.close()


def _name() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"
