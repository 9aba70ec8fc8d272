"""Composition root of a worker shell: builds the real adapters, runs until SIGTERM."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

from dynamo_elastic.agent.client import AgentClient
from dynamo_elastic.config import DeploymentConfig, api_token
from dynamo_elastic.config_launch import launch_parser, read_launch_line, read_slot
from dynamo_elastic.coordinator.etcd import EtcdStore
from dynamo_elastic.coordinator.records import Keys, MemberRecord, MemberState
from dynamo_elastic.coordinator.store import check_admitted
from dynamo_elastic.dynamo.environment import dynamo_environment, dynamo_secrets
from dynamo_elastic.dynamo.registrations import Registrations
from dynamo_elastic.engine.client import EngineClient
from dynamo_elastic.errors import ConfigError, ResourceMissing, StoreRefused
from dynamo_elastic.failpoints import arm_from_environment
from dynamo_elastic.logs import configure as configure_logs
from dynamo_elastic.metrics import WorkerMetrics
from dynamo_elastic.metrics import serve as serve_metrics
from dynamo_elastic.types import WorkerId
from dynamo_elastic.worker.base import ShellParts
from dynamo_elastic.worker.control import ElasticControl
from dynamo_elastic.worker.participant import Participant
from dynamo_elastic.worker.presence import Presence
from dynamo_elastic.worker.registration import registration
from dynamo_elastic.worker.shell import Shell
from dynamo_elastic.worker.traffic import TokenMeter


def worker_id(slot: int) -> WorkerId:
    """The name of the shell of `slot`."""
    return WorkerId(f"slot{slot}")


async def serve(config: DeploymentConfig, slot: int) -> None:
    """Run the shell of `slot` until SIGTERM or SIGINT; its engine lives on."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    store, agent = EtcdStore.of(config.etcd), AgentClient(config.agent_socket)
    name, keys = worker_id(slot), Keys(config.deployment)
    control = ElasticControl(
        store,
        keys,
        name,
        operation_timeout_s=config.scale.operation_timeout_s,
        token=api_token(config),
    )
    metrics = WorkerMetrics()
    desk, instance = registration(config, slot, control.routes(), TokenMeter(metrics))
    parts = ShellParts(
        worker_id=name,
        slot=slot,
        store=store,
        keys=keys,
        agent=agent,
        registrar=instance,
        registrations=Registrations(store, config.namespace),
        connect=lambda path: EngineClient(Path(path)),
    )
    record = MemberRecord(
        parts.worker_id, slot, socket.gethostname(), os.getpid(), MemberState.STANDBY
    )
    presence = Presence(store, parts.keys, record)
    participant = Participant(parts, presence, desk)
    shell = Shell(parts, presence, participant, lease_ttl_s=config.scale.lease_ttl_s)
    try:
        await check_admitted(store, keys.topology)
        with serve_metrics(
            metrics,
            config.metrics_port(slot),
            host=config.observe.metrics_host,
            setting="workers.metrics_port",
        ):
            await shell.run(stop)
    finally:
        await instance.shutdown()
        await agent.close()
        await store.close()


def main() -> None:
    """Parse arguments and run; bad settings end it with one line."""
    parser = launch_parser("worker")
    try:
        config, own = read_launch_line(parser, sys.argv[1:], os.environ)
        configure_logs(config.observe.log_format)
        slot = read_slot(own, config, os.environ)
        os.environ.update(dynamo_environment(config) | dynamo_secrets(config))
        arm_from_environment(worker_id(slot))
        asyncio.run(serve(config, slot))
    except (ConfigError, ResourceMissing, StoreRefused) as exc:
        sys.exit(f"worker: {exc}")
