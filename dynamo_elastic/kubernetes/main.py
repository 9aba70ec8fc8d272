"""The controller's process: `python -m dynamo_elastic.kubernetes`."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

from dynamo_elastic.config import (
    CONFIG_VARIABLE,
    DeploymentConfig,
    engine_shape,
    resolve_config,
)
from dynamo_elastic.coordinator.etcd import EtcdStore
from dynamo_elastic.coordinator.records import Keys
from dynamo_elastic.coordinator.store import check_admitted
from dynamo_elastic.errors import ElasticError
from dynamo_elastic.failpoints import arm_from_environment
from dynamo_elastic.kubernetes.api import ApiCluster, connect
from dynamo_elastic.kubernetes.controller import Controller, Deployment
from dynamo_elastic.kubernetes.decide import Limits
from dynamo_elastic.kubernetes.pods import Served
from dynamo_elastic.logs import configure as configure_logs


def main(argv: list[str] | None = None) -> int:
    """Control until SIGTERM or SIGINT (0), or until a setting or a record is bad (1)."""
    args = controller_parser().parse_args(argv)
    arm_from_environment()
    try:
        config = resolve_config(args.elastic_config, os.environ, {}).config
        configure_logs(config.observe.log_format)
        asyncio.run(_run(config, args))
    except ElasticError as exc:
        sys.stderr.write(f"kubernetes: {exc}\n")
        return 1
    return 0


async def _run(config: DeploymentConfig, args: argparse.Namespace) -> None:
    limits = Limits(engine_shape(config, args.num_experts), config.scale, args.pod_timeout)
    served = Served(config.namespace, config.model.name)
    client = await connect()
    cluster = ApiCluster(client, args.namespace, args.graph, args.component, served)
    store = EtcdStore.of(config.etcd)
    keys = Keys(config.deployment)
    name = f"{socket.gethostname()}-{os.getpid()}"
    controller = Controller(store, cluster, Deployment(keys, limits), name)
    try:
        await check_admitted(store, keys.controller)
        work = asyncio.ensure_future(controller.run())
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, work.cancel)
        await asyncio.wait({work})
        if not work.cancelled():
            work.result()
    finally:
        await cluster.close()
        await store.close()


def controller_parser() -> argparse.ArgumentParser:
    """Of its command line."""
    parser = argparse.ArgumentParser(prog="python -m dynamo_elastic.kubernetes")
    known = os.environ.get(CONFIG_VARIABLE)
    parser.add_argument(
        "--elastic-config",
        type=Path,
        required=known is None,
        default=known,
        metavar="FILE",
        help=f"YAML of the deployment (variable: {CONFIG_VARIABLE})",
    )
    parser.add_argument("--num-experts", type=int, required=True, help="experts of the model")
    parser.add_argument(
        "--namespace",
        default=os.environ.get("POD_NAMESPACE", "default"),
        help="Kubernetes namespace (default: POD_NAMESPACE)",
    )
    parser.add_argument("--graph", required=True, help="name of the DynamoGraphDeployment")
    parser.add_argument(
        "--component", default="decode", help="its elastic component (default: decode)"
    )
    parser.add_argument(
        "--pod-timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="a pod without a worker for so long is given up (default: 300)",
    )
    return parser
