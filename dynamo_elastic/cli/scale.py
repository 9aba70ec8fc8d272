"""`dynamo-elastic scale N` and `dynamo-elastic status`."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter
from rich.console import Console
from rich.table import Table

from dynamo_elastic.cli.serve import ConfigFile
from dynamo_elastic.config import DeploymentConfig, load_config
from dynamo_elastic.coordinator.etcd import EtcdStore
from dynamo_elastic.coordinator.records import (
    Keys,
    OperationRecord,
    OutcomeStatus,
    TargetOutcome,
)
from dynamo_elastic.coordinator.status import Status, read_status
from dynamo_elastic.coordinator.targets import request_scale, succession, wait_outcome
from dynamo_elastic.errors import (
    ElasticError,
    StoreError,
    StoreRefused,
    TargetRefused,
    TargetSuperseded,
)
from dynamo_elastic.topology import EMPTY


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
    """Show the ranks, the operation under way, and how the last one ended."""
    now = asyncio.run(_status(load_config(file)))
    if as_json:
        body: dict[str, Any] = TypeAdapter(Status).dump_python(now, mode="json")
        print(json.dumps(body, indent=1))
    else:
        _show(now, Console(highlight=False, file=sys.stdout))


async def _status(config: DeploymentConfig) -> Status:
    store = EtcdStore.of(config.etcd)
    try:
        return await _reachable(store, Keys(config.deployment), config)
    finally:
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


def _show(now: Status, console: Console) -> None:
    if now.topology is None:
        console.print("nothing is served")
        return
    in_force = now.in_force or now.topology
    console.print(f"epoch {in_force.epoch}: {now.width} ranks; leader {now.leader}")
    if now.target is not None:
        console.print(succession(now.target), markup=False)
    if now.withdrawn is not None:
        console.print(f"epoch {now.topology.epoch} was withdrawn; it is to be superseded")
    if now.queued is not None:
        console.print(f"next: {now.queued.ranks} ranks, wanted by {now.queued.source}")
    if now.notice:
        console.print(f"waiting: {now.notice}", markup=False)
    for name, warning in now.warnings.items():
        console.print(f"warning: {name}: {warning.text}", style="yellow", markup=False)
    ranks = Table(box=None)
    for name in ("rank", "worker", "engine", "state", "experts"):
        ranks.add_column(name)
    lost = now.lost_reasons()
    for rank, member in enumerate(in_force.members):
        record = now.members.get(member.worker_id)
        state = f"lost: {lost[member.worker_id]}" if member.worker_id in lost else ""
        experts = " ".join(str(e) for e in member.experts if e != EMPTY)
        ranks.add_row(
            str(rank),
            member.worker_id,
            member.incarnation,
            state or (record.state if record else "?"),
            experts,
        )
    console.print(ranks)
    free = now.standby()
    console.print(f"free slots: {', '.join(free) if free else 'none'}")
    for suspect, strike in now.strikes.items():
        console.print(f"suspect: {suspect} failed {strike.count} times: {strike.reason}")
    if now.operation is not None:
        _show_operation("under way", now.operation, console)
    if now.last is not None:
        _show_operation("last", now.last, console)


def _show_operation(label: str, op: OperationRecord, console: Console) -> None:
    widths = f"{op.plan.before.world_size} -> {op.plan.after.world_size}"
    console.print(f"{label}: {op.operation_id} ({widths}, by {op.source}): {op.phase}")
    if op.lost:
        console.print(f"  lost: {', '.join(op.lost)}")
    for phase in op.phases:
        console.print(f"  {phase.phase:13} {phase.elapsed_s:8.3f} s")
    for worker, said in op.participants.items():
        console.print(f"  {worker}: {said}")
    if op.failure:
        console.print(f"  failure: {op.failure}")
    if op.safe_to_release:
        console.print(f"  safe to release: {', '.join(op.safe_to_release)}")
