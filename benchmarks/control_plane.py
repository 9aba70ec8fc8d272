"""Many fake ranks against a real etcd and the real coordinator, all on this machine.

Each rank has its own connection, lease, member record and watches, and answers every command at
once: what is measured is the control plane alone. Boots all ranks in one operation, then takes
`--step` of them out and in again, `--cycles` times.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from control_plane_commits import decide_again
from control_plane_processes import (
    DEPLOYMENT,
    LEASE_TTL_S,
    Broken,
    coordinator,
    etcd_metrics,
    fsync_p99_ms,
    rank_processes,
    write_config,
)
from provenance import write_result

from dynamo_elastic.coordinator.etcd import EtcdStore
from dynamo_elastic.coordinator.records import Keys, OperationRecord, OutcomeStatus
from dynamo_elastic.coordinator.status import read_status
from dynamo_elastic.coordinator.targets import request_scale, wait_outcome
from dynamo_elastic.coordinator.timeline import TIMELINE_FILE
from dynamo_elastic.testing.etcd_process import EtcdProcess, etcd_process

ASKED_RANKS = 1000
"""The rung that the metrics are of."""
TIMEOUT_S = 240.0
MEMORY = Path("/dev/shm")
"""Where etcd's data has no disk below it: the rung that is asked for is run there as well."""


Rung = tuple[dict[str, Any], list[dict[str, float]]]
"""A run in numbers, and seconds of every phase of every operation."""


@dataclass(frozen=True, slots=True)
class Setting:
    ranks: int
    cycles: int
    step: int
    commits: int
    etcd_dir: Path | None
    """On whose disk etcd keeps its data; None: where temporary files are."""


@dataclass(slots=True)
class Seen:
    """What one run has seen."""

    admission_s: float = 0.0
    registered_s: float = 0.0
    operations: list[OperationRecord] = field(default_factory=list)
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    keys: int = 0
    fsync_p99_ms: float = 0.0
    heard: dict[int, list[float]] = field(default_factory=dict)
    decided: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Epoch -> when its transaction was sent and answered (wall clock)."""
    operation_commits_s: list[float] = field(default_factory=list)


async def scale_to(store: EtcdStore, keys: Keys, ranks: int) -> OperationRecord:
    request_id = await request_scale(store, keys, ranks, "benchmark")
    outcome = await wait_outcome(store, keys, request_id, timeout_s=TIMEOUT_S)
    last = (await read_status(store, keys)).last
    if outcome.status is not OutcomeStatus.REACHED or last is None:
        raise Broken(f"{ranks} ranks: {outcome.status}: {outcome.reason}")
    return last


async def led(store: EtcdStore, keys: Keys) -> None:
    """Return once a coordinator leads."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not (await read_status(store, keys)).notice:
        if time.monotonic() > deadline_s:
            raise Broken("no coordinator leads")
        await asyncio.sleep(0.1)


async def booted(store: EtcdStore, keys: Keys, ranks: int) -> OperationRecord:
    """The finished operation that booted all ranks."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while True:
        status = await read_status(store, keys)
        if status.last is not None and status.operation is None:
            if status.width == ranks:
                return status.last
            raise Broken(f"the boot of {ranks} ranks: {status.last.failure}")
        if time.monotonic() > deadline_s:
            raise Broken(f"no boot of {ranks} ranks in {TIMEOUT_S:g} s: {status.notice}")
        await asyncio.sleep(0.25)


async def measure(setting: Setting, etcd: EtcdProcess, directory: Path) -> Seen:
    """One run; raises Broken if the control plane could not."""
    seen, keys, store = Seen(), Keys(DEPLOYMENT), EtcdStore([etcd.url], timeout_s=30.0)
    try:
        async with (
            coordinator(write_config(directory, etcd.url, setting.ranks)),
            rank_processes(etcd.url, setting.ranks, directory) as processes,
        ):
            await led(store, keys)
            began_s = time.time()
            for process in processes:
                process.tell()
            for process in processes:
                await process.says()
            seen.registered_s = time.time() - began_s
            boot = await booted(store, keys, setting.ranks)
            seen.admission_s = boot.opened_at_s - began_s
            seen.operations.append(boot)
            seen.before = etcd_metrics(etcd.url)
            for _ in range(setting.cycles):
                for ranks in (setting.ranks - setting.step, setting.ranks):
                    seen.operations.append(await scale_to(store, keys, ranks))
            seen.after = etcd_metrics(etcd.url)
            seen.decided = await decide_again(
                store,
                DEPLOYMENT,
                seen.operations[-1],
                setting.commits,
                lease_ttl_s=LEASE_TTL_S,
            )
            seen.fsync_p99_ms = fsync_p99_ms(etcd.url)
            seen.keys = len(await store.get_prefix(keys.prefix))
            for heard in [await process.stop() for process in processes]:
                for epoch, times in heard.items():
                    seen.heard.setdefault(epoch, []).extend(times)
            seen.operation_commits_s = commits_s(directory)
            return seen
    finally:
        await store.close()


def commits_s(directory: Path) -> list[float]:
    """Seconds of the transaction that decided each operation, from the timeline."""
    path = next(directory.rglob(TIMELINE_FILE))
    events = [json.loads(line) for line in path.read_text().splitlines()]
    return [e["elapsed_s"] for e in events if e["event"] == "decided"]


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[math.ceil(share * len(ordered)) - 1]


def summary(setting: Setting, seen: Seen) -> dict[str, Any]:
    """A run in numbers."""
    commits_ms = [1e3 * (answered - sent) for sent, answered in seen.decided.values()]
    heard = [(e, at) for e, times in seen.heard.items() if e in seen.decided for at in times]
    # etcd tells watchers while it answers the coordinator: some hear of it before.
    delays_ms = [1e3 * max(0.0, at - seen.decided[e][1]) for e, at in heard]
    sent_to_heard_ms = [1e3 * (at - seen.decided[e][0]) for e, at in heard]
    operations = len(seen.operations) - 1
    grown = {k: seen.after[k] - seen.before[k] for k in seen.before}
    return {
        "ranks": setting.ranks,
        "admission_s": round(seen.admission_s, 3),
        "registered_s": round(seen.registered_s, 3),
        "boot_s": round(seen.operations[0].elapsed_s, 3),
        "operations": operations,
        "operation_p50_s": round(statistics.median(o.elapsed_s for o in seen.operations[1:]), 3),
        "commits": len(commits_ms),
        "commit_p50_ms": round(statistics.median(commits_ms), 1),
        "commit_p99_ms": round(percentile(commits_ms, 0.99), 1),
        "operation_commit_p50_ms": round(1e3 * statistics.median(seen.operation_commits_s), 1),
        "operation_commit_max_ms": round(1e3 * max(seen.operation_commits_s), 1),
        "etcd_fsync_p99_ms": round(seen.fsync_p99_ms, 1),
        "deliveries": len(delays_ms),
        "watch_p50_ms": round(statistics.median(delays_ms), 1),
        "watch_p99_ms": round(percentile(delays_ms, 0.99), 1),
        "sent_to_heard_p99_ms": round(percentile(sent_to_heard_ms, 0.99), 1),
        "keys": seen.keys,
        "watchers": int(seen.after["watchers"]),
        "events_per_operation": int(grown["events"] / operations),
        "sent_bytes_per_operation": int(grown["sent_bytes"] / operations),
        "etcd_cpu_s_per_operation": round(grown["cpu_s"] / operations, 3),
        "db_bytes": int(seen.after["db_bytes"]),
        "db_bytes_per_operation": int(grown["db_bytes"] / operations),
        "etcd_rss_bytes": int(seen.after["rss_bytes"]),
    }


def phases_s(operations: Sequence[OperationRecord]) -> list[dict[str, float]]:
    """Seconds of every phase of every operation."""
    return [{p.phase: round(p.elapsed_s, 4) for p in op.phases} for op in operations]


async def rung(setting: Setting) -> Rung:
    """One run on a fresh etcd. Raises Broken, with what the coordinator said last."""
    with (
        tempfile.TemporaryDirectory() as name,
        tempfile.TemporaryDirectory(dir=setting.etcd_dir) as data,
        etcd_process(Path(data)) as etcd,
    ):
        directory = Path(name)
        try:
            seen = await measure(setting, etcd, directory)
        except Exception as exc:
            told = (directory / "coordinator.log").read_text().splitlines()[-3:]
            raise Broken(f"{exc}; the coordinator: {' | '.join(told)}"[:2000]) from exc
        return summary(setting, seen), phases_s(seen.operations)


def run_rungs(settings: Sequence[Setting]) -> Iterator[tuple[Setting, Rung]]:
    """Each in turn, until one breaks."""
    for setting in settings:
        try:
            yield setting, asyncio.run(rung(setting))
        except Broken as exc:
            yield setting, ({"ranks": setting.ranks, "breaks": str(exc)}, [])
            return


def write(rungs: Sequence[Rung], in_memory: Rung | None, step: int) -> Path:
    """The result of what has been run so far."""
    told = [t for t, _ in rungs if "breaks" not in t]
    asked = ([t for t in told if t["ranks"] >= ASKED_RANKS] or told[-1:])[0]
    metrics = asked | {"largest_ranks": told[-1]["ranks"]}
    if in_memory is not None:
        keys = ("admission_s", "commit_p99_ms", "watch_p99_ms")
        metrics |= {f"in_memory_{key}": in_memory[0][key] for key in keys}
    detail = {
        "step": step,
        "rungs": told,
        "breaks": next((t for t, _ in rungs if "breaks" in t), None),
        "phases_s": {str(t["ranks"]): phases for t, phases in rungs if "breaks" not in t},
        "in_memory": in_memory[0] if in_memory is not None else None,
    }
    return write_result("control_plane", metrics, detail)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[100, 300, 1000, 2000, 5000])
    parser.add_argument("--cycles", type=int, default=2)
    parser.add_argument("--step", type=int, default=8)
    parser.add_argument("--commits", type=int, default=200)
    parser.add_argument("--no-result", action="store_true", help="print only")
    args = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    settings = [Setting(n, args.cycles, args.step, args.commits, None) for n in args.ranks]
    rungs: list[Rung] = []
    in_memory: Rung | None = None
    for setting, found in run_rungs(settings):
        rungs.append(found)
        print(json.dumps(found[0], indent=1), flush=True)
        if setting.ranks == ASKED_RANKS and MEMORY.is_dir():
            in_memory = next(run_rungs([replace(setting, etcd_dir=MEMORY)]))[1]
            in_memory = None if "breaks" in in_memory[0] else in_memory
        if not args.no_result and "breaks" not in rungs[0][0]:
            print(write(rungs, in_memory, args.step), flush=True)
    return 1 if "breaks" in rungs[0][0] else 0


if __name__ == "__main__":
    sys.exit(main())
