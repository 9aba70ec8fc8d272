"""What control_plane.py starts: the coordinator, processes of fake ranks; and what etcd says."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import yaml

NUM_EXPERTS = 256
SLOTS_PER_RANK = 8
LEASE_TTL_S = 30
PROCESSES = 2
DEPLOYMENT = "load"
_METRICS = {
    "db_bytes": "etcd_mvcc_db_total_size_in_bytes",
    "watchers": "etcd_debugging_mvcc_watcher_total",
    "events": "etcd_debugging_mvcc_events_total",
    "sent_bytes": "etcd_network_client_grpc_sent_bytes_total",
    "slow_watchers": "etcd_debugging_mvcc_slow_watcher_total",
    "cpu_s": "process_cpu_seconds_total",
    "rss_bytes": "process_resident_memory_bytes",
}


class Broken(Exception):
    """The control plane did not do what was asked; says what."""


def etcd_metrics(url: str) -> dict[str, float]:
    """What etcd says of itself."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as reply:
        lines = reply.read().decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(values[metric]) for name, metric in _METRICS.items() if metric in values}


def fsync_p99_ms(url: str) -> float:
    """Of etcd's log on its disk, as an upper bound: a commit can't be faster than the disk."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as reply:
        lines = reply.read().decode().splitlines()
    found = [line for line in lines if line.startswith("etcd_disk_wal_fsync_duration_seconds_b")]
    bounds = [line.split('le="')[1].split('"')[0] for line in found]
    counts = [float(line.rsplit(" ", 1)[1]) for line in found]
    return 1e3 * next(
        float(bound)
        for bound, count in zip(bounds, counts, strict=True)
        if count >= 0.99 * counts[-1]
    )


def write_config(directory: Path, url: str, ranks: int) -> Path:
    settings = {
        "deployment": DEPLOYMENT,
        "model": {"path": "model", "name": "m"},
        "engine": {"slots_per_rank": SLOTS_PER_RANK},
        "scale": {
            "initial_ranks": ranks,
            "max_ranks": ranks,
            "lease_ttl_s": LEASE_TTL_S,
            "step_timeout_s": 60,
        },
        "etcd": {"start": False, "endpoints": [url]},
        "run_dir": str(directory),
    }
    path = directory / "coordinator.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


@asynccontextmanager
async def coordinator(config: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    argv = ["-m", "dynamo_elastic.coordinator", f"--elastic-config={config}"]
    with config.with_suffix(".log").open("ab") as log:
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, *argv, f"--num-experts={NUM_EXPERTS}"),
            env=os.environ | {"PYTHONSAFEPATH": "1"},
            stdout=log,
            stderr=log,
        )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.terminate()
            await child.wait()


class RankProcess:
    """One process of fake ranks."""

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self._child = child

    @classmethod
    async def start(cls, url: str, first: int, count: int, log: Path) -> RankProcess:
        script = Path(__file__).with_name("control_plane_ranks.py")
        options = {"etcd": url, "deployment": DEPLOYMENT, "ttl-s": LEASE_TTL_S}
        argv = [f"--{k}={v}" for k, v in (options | {"first": first, "count": count}).items()]
        with log.open("ab") as errors:
            child = await asyncio.create_subprocess_exec(
                *(sys.executable, str(script), *argv),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                limit=1 << 26,
            )
        return cls(child)

    async def says(self) -> str:
        """Its next line. Raises Broken if it has ended."""
        assert_pipe = self._child.stdout
        line = await assert_pipe.readline() if assert_pipe is not None else b""
        if not line:
            raise Broken("a process of ranks has ended")
        return line.decode().strip()

    def tell(self) -> None:
        if self._child.stdin is not None:
            self._child.stdin.write(b"\n")

    async def stop(self) -> dict[int, list[float]]:
        """End it; when its ranks heard of each decision."""
        self.tell()
        heard = json.loads(await self.says())
        await self._child.wait()
        return {int(epoch): times for epoch, times in heard.items()}

    def kill(self) -> None:
        if self._child.returncode is None:
            self._child.kill()


@asynccontextmanager
async def rank_processes(url: str, ranks: int, directory: Path) -> AsyncIterator[list[RankProcess]]:
    shares = [ranks // PROCESSES + (i < ranks % PROCESSES) for i in range(PROCESSES)]
    processes: list[RankProcess] = []
    try:
        for i, count in enumerate(shares):
            log = directory / f"ranks{i}.log"
            processes.append(await RankProcess.start(url, sum(shares[:i]), count, log))
        for process in processes:
            await process.says()
        yield processes
    finally:
        for process in processes:
            process.kill()
