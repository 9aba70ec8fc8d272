"""What tests and benchmarks do to a running deployment again and again: scale it, measure it."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from dynamo_elastic.agent.records import ENGINE_LOG
from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.coordinator.records import OperationRecord
from dynamo_elastic.coordinator.status import read_status
from dynamo_elastic.coordinator.targets import request_scale, wait_outcome
from dynamo_elastic.engine.reference.loop import MOVED_REQUESTS
from dynamo_elastic.errors import ElasticError
from dynamo_elastic.phases import Phase
from dynamo_elastic.serve.deployment import Deployment

_OPERATION_TIMEOUT_S = 120.0

FOREIGN = ("etcd", "frontend", "planner", "this")
"""Processes that run none of our code, and the one that measures and makes the load."""

SLOPE_CYCLES = 100
"""Slopes are per so many cycles."""


async def scale_to(
    deployment: Deployment, ranks: int, *, timeout_s: float = _OPERATION_TIMEOUT_S
) -> OperationRecord:
    """One operation to its end. Raises ElasticError if it is not done."""
    request = await request_scale(deployment.store, deployment.keys, ranks, "cli")
    await wait_outcome(deployment.store, deployment.keys, request, timeout_s=timeout_s)
    last = (await read_status(deployment.store, deployment.keys)).last
    if last is None or last.phase is not Phase.DONE or last.lost:
        raise ElasticError(f"scaling to {ranks} ranks failed: {last}")
    return last


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one process holds."""

    rss_bytes: int
    fds: int
    threads: int


Footprints = dict[str, Footprint]
"""By 'name:pid', so that a process that was replaced is another one."""


def footprint(pid: int) -> Footprint:
    """Of one process of this host."""
    process = psutil.Process(pid)
    with process.oneshot():
        return Footprint(process.memory_info().rss, process.num_fds(), process.num_threads())


async def footprints(deployment: Deployment) -> Footprints:
    """Of every process of the deployment that lives now, and of this one."""
    pids = {**deployment.supervisor.pids, "this": os.getpid()}
    for slot in await deployment.agent.slots():
        if slot.pid:
            pids[f"engine{slot.slot}"] = slot.pid
    return {f"{name}:{pid}": footprint(pid) for name, pid in pids.items()}


def lasting(samples: Sequence[Footprints]) -> list[str]:
    """Processes that are in every sample, by name."""
    return sorted(set(samples[0]).intersection(*samples[1:]))


def is_ours(process: str) -> bool:
    """True of a process ('name:pid') that runs our code only."""
    return process.partition(":")[0] not in FOREIGN


def slope(values: Sequence[float]) -> float:
    """Growth of `values`, one a cycle, per SLOPE_CYCLES: that of the least-squares line."""
    if len(values) < 2:
        return 0.0
    return SLOPE_CYCLES * statistics.linear_regression(range(len(values)), values).slope


class MovedRequests:
    """Requests that engines of a deployment sent on to another rank, as their logs have it."""

    def __init__(self, config: DeploymentConfig) -> None:
        slots = range(config.scale.max_ranks)
        self._offsets = {config.control_dir(slot) / ENGINE_LOG: 0 for slot in slots}

    def new(self) -> set[str]:
        """The frontend's ids of those since the last call."""
        found: set[str] = set()
        for path, offset in self._offsets.items():
            if not path.exists():
                continue
            with path.open() as log:
                log.seek(offset)
                lines = log.read()
                self._offsets[path] = log.tell()
            for line in lines.splitlines():
                _, marker, ids = line.partition(MOVED_REQUESTS)
                found.update(i.rpartition("/")[0] for i in ids.split() if marker)
        return found
