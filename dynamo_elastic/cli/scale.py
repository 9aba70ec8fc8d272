"""`dynamo-elastic scale N` and `dynamo-elastic status`."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter
from rich.console import Console

from dynamo_elastic.agent.client import AgentClient
from dynamo_elastic.cli.look import Picture, picture, slots_of
from dynamo_elastic.cli.serve import ConfigFile
from dynamo_elastic.cli.status_view import view
from dynamo_elastic.config import DeploymentConfig, load_config
from dynamo_elastic.coordinator.etcd import EtcdStore
from dynamo_elastic.coordinator.records import (
    Keys,
    OutcomeStatus,
    TargetOutcome,
)
from dynamo_elastic.coordinator.status import Status, read_status
from dynamo_elastic.coordinator.targets import request_scale, wait_outcome
from dynamo_elastic.errors import (
    ElasticError,
    StoreError,
    StoreRefused,
    TargetRefused,
    TargetSuperseded,
)

_PIPE_WIDTH = 120


def scale(
    ranks: Annotated[int, typer.Argument(help="How many ranks shall serve (absolute).")],
    file: ConfigFile,
    timeout_s: Annotated[float, typer.Option(help="How long to wait for the outcome.")] = 120.0,
) -> None:
    """Ask for a number of ranks, and wait until they serve or it is clear that they won't.

    Exit codes: 0 they serve, 1 refused or failed, 2 bad input, 7 a newer target took its place.
    """
    outcome = asyncio.run(_scale(load_config(file), ranks, timeout_s))
    if outcome.status is OutcomeStatus.SUPERSEDED:
        raise TargetSuperseded(f"target {ranks} is not wanted any more: {outcome.reason}")
    if outcome.status is not OutcomeStatus.REACHED:
        reason = outcome.reason.removeprefix(f"target {ranks}: ")
        raise TargetRefused(f"target {ranks}: {reason}")
    print(f"{ranks} ranks serve")


async def _scale(config: DeploymentConfig, ranks: int, timeout_s: float) -> TargetOutcome:
    store, keys = EtcdStore.of(config.etcd), Keys(config.deployment)
    try:
        before = await _reachable(store, keys, config)
        if before.topology is None:
            raise ElasticError(
                f"deployment {config.deployment!r} is not served; start it: dynamo-elastic serve"
            )
        request_id = await request_scale(store, keys, ranks, "cli")
        return await wait_outcome(store, keys, request_id, timeout_s=timeout_s)
    finally:
        await store.close()


def status(
    file: ConfigFile,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Show the ranks, GPU slots, the operation under way, and how the last one ended."""
    config = load_config(file)
    now = asyncio.run(_look(config))
    if as_json:
        body: dict[str, Any] = TypeAdapter(Status).dump_python(now.status, mode="json")
        body["report"] = str(now.report) if now.report else None
        print(json.dumps(body, indent=1))
    else:
        width = None if sys.stdout.isatty() else _PIPE_WIDTH
        Console(highlight=False, width=width).print(view(now))


async def _look(config: DeploymentConfig) -> Picture:
    store, agent = EtcdStore.of(config.etcd), AgentClient(config.agent_socket)
    keys = Keys(config.deployment)
    try:
        await _reachable(store, keys, config)
        stored = {v.key: v for v in await store.get_prefix(keys.prefix)}
        return picture(config, stored, await slots_of(agent), time.time())
    finally:
        await agent.close()
        await store.close()


async def _reachable(store: EtcdStore, keys: Keys, config: DeploymentConfig) -> Status:
    try:
        return await read_status(store, keys)
    except StoreRefused:
        raise
    except StoreError as exc:
        urls = ", ".join(config.etcd.urls)
        raise ElasticError(
            f"etcd.endpoints: no etcd answers at {urls}; is the deployment served?"
        ) from exc
