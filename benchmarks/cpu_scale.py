"""2 -> 4 -> 2 ranks, again and again, under streaming load, on one machine without a GPU.

The switch is the pause that it makes: from the last step of the old group to the first right one of
the new, on the slowest rank. Cold joiners are booted beside, two at a time as an operation restores
two, and parked and taken back, under the same load and in the same run. The restored side is what
the operations themselves did: what they park is ended after each cycle.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from provenance import write_result
from rich.console import Console
from rich.progress import Progress

from dynamo_elastic.agent.base import StartedEngine, Tier
from dynamo_elastic.coordinator.records import OperationRecord
from dynamo_elastic.coordinator.status import read_status
from dynamo_elastic.demo.load import (
    Load,
    Prompt,
    StreamResult,
    longest_gap,
    reference_texts,
    summarize,
)
from dynamo_elastic.demo.run import demo_config, demo_prompts
from dynamo_elastic.demo.view import PhaseFacts
from dynamo_elastic.phases import Kind, Phase
from dynamo_elastic.serve.deployment import Deployment, running
from dynamo_elastic.testing.cycles import (
    Footprint,
    Footprints,
    MovedRequests,
    footprints,
    is_ours,
    lasting,
    scale_to,
)
from dynamo_elastic.types import Epoch, OperationId, WorkerId

CLIENTS = 8
COLD_EVERY = 4
MEMCPY_BYTES = 64 << 20
WARM_CYCLE = 5
"""Growth is counted from here: caches and pools are filled by then."""


class Recorder:
    """What is kept of every cycle."""

    def __init__(self) -> None:
        self.operations: list[OperationRecord] = []
        self.cold_s: list[float] = []
        self.parked_s: list[float] = []
        self.memcpy_gbps: list[float] = []
        self.footprints: list[Footprints] = []
        self.etcd_keys: list[int] = []
        self.gaps_s: list[float] = []
        self.moved_gap_s = 0.0
        self.phase_gaps_ms: dict[str, float] = {}

    def facts(self, phase: Phase, *kinds: Kind) -> list[PhaseFacts]:
        """What one phase measured, in every operation of these kinds."""
        return [
            PhaseFacts.of(p.detail)
            for op in self.operations
            if op.kind in kinds
            for p in op.phases
            if p.phase is phase
        ]


async def scale(deployment: Deployment, ranks: int, recorder: Recorder) -> None:
    """One operation to its end. Raises ElasticError if it is not done."""
    recorder.operations.append(await scale_to(deployment, ranks))


async def cold_and_parked_pair(deployment: Deployment, recorder: Recorder, number: int) -> None:
    """Boot the two joiners' slots cold, side by side; park them, take them back, and end them."""
    topology = (await read_status(deployment.store, deployment.keys)).topology
    epoch = topology.epoch if topology is not None else Epoch(0)

    async def start(slot: int, tier: Tier) -> StartedEngine:
        return await deployment.agent.start_engine(
            slot,
            WorkerId(f"slot{slot}"),
            OperationId(f"{tier}-{number}"),
            epoch,
            tiers=(tier,),
            timeout_s=120,
        )

    async def park(slot: int, engine: StartedEngine) -> None:
        reason = await deployment.agent.park_engine(slot, engine.incarnation, timeout_s=30)
        if reason:
            raise SystemExit(f"slot {slot} was not parked: {reason}")

    cold = await asyncio.gather(start(2, Tier.COLD), start(3, Tier.COLD))
    await asyncio.gather(park(2, cold[0]), park(3, cold[1]))
    parked = await asyncio.gather(start(2, Tier.PARKED), start(3, Tier.PARKED))
    for slot, engine in zip((2, 3), parked, strict=True):
        await deployment.agent.stop_engine(slot, engine.incarnation)
    recorder.cold_s += [engine.ready_s for engine in cold]
    recorder.parked_s += [engine.ready_s for engine in parked]


class Memcpy:
    """One thread's copy of a block larger than the caches: what a stream is compared with."""

    def __init__(self) -> None:
        self._source = np.ones(MEMCPY_BYTES, dtype=np.uint8)
        self._target = np.ones_like(self._source)

    def gbps(self) -> float:
        """Best of three."""
        best_s = math.inf
        for _ in range(3):
            begin_s = time.perf_counter()
            np.copyto(self._target, self._source)
            best_s = min(best_s, time.perf_counter() - begin_s)
        return MEMCPY_BYTES / best_s / 1e9


def gaps_by_phase(timeline: Path, results: list[StreamResult]) -> dict[str, float]:
    """Longest token gap (ms) of any stream that overlaps each phase, over all operations."""
    offset_s = time.time() - time.monotonic()
    gaps = [gap for r in results for gap in r.gaps()]
    longest: dict[str, float] = {}
    for line in timeline.read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "done":
            until_s = event["ts"] - offset_s
            since_s = until_s - event["elapsed_s"]
            worst = max((b - a for a, b in gaps if b > since_s and a < until_s), default=0.0)
            name = f"{event['kind']}.{event['phase']}"
            longest[name] = max(longest.get(name, 0.0), round(1e3 * worst, 1))
    return longest


async def measure(cycles: int, work_dir: Path, console: Console) -> tuple[Recorder, Any]:
    config = demo_config(work_dir, "bench", planner={"enabled": False})
    recorder, memcpy, moved = Recorder(), Memcpy(), MovedRequests(config)
    prompts: list[Prompt] = demo_prompts()
    async with running(config, console.print) as deployment:
        load = Load(deployment.url, config.model.name, prompts, CLIENTS)
        load.start()
        await load.wait_for_each_prompt(timeout_s=60)
        reference = reference_texts(load.results)
        with Progress(console=console) as progress:
            task = progress.add_task("cycles", total=cycles)
            for cycle in range(1, cycles + 1):
                if cycle % COLD_EVERY == 1:
                    await cold_and_parked_pair(deployment, recorder, cycle)
                begin_s = time.monotonic()
                await scale(deployment, 4, recorder)
                recorder.memcpy_gbps.append(await asyncio.to_thread(memcpy.gbps))
                await scale(deployment, 2, recorder)
                # The next joiners are to come from their images again.
                await deployment.agent.evict(None)
                await asyncio.sleep(0.5)
                recorder.gaps_s.append(longest_gap(load.results, begin_s, time.monotonic()))
                recorder.footprints.append(await footprints(deployment))
                stored = await deployment.store.get_prefix(deployment.keys.prefix)
                recorder.etcd_keys.append(len(stored))
                progress.advance(task)
        await load.stop()
        recorder.phase_gaps_ms = gaps_by_phase(deployment.timeline, load.results)
        ids = moved.new()
        recorder.moved_gap_s = max(
            (r.max_gap_s for r in load.results if r.request_id in ids), default=0.0
        )
        return recorder, summarize(load.results, reference)


def growth(recorder: Recorder, measure: Callable[[Footprint], int]) -> int:
    """Sum over our processes of what each grew from WARM_CYCLE to the last cycle."""
    samples = recorder.footprints[min(WARM_CYCLE, len(recorder.footprints)) - 1 :]
    first, last = samples[0], samples[-1]
    return sum(measure(last[p]) - measure(first[p]) for p in lasting(samples) if is_ours(p))


def metrics_of(cycles: int, recorder: Recorder, summary: Any) -> dict[str, float]:
    restores = recorder.facts(Phase.RESTORE, Kind.UP)
    tiers = {t for f in restores for t in f.tiers}
    if tiers != {Tier.IMAGE}:
        raise SystemExit(f"not every joiner came from an image: {tiers}")
    commits = recorder.facts(Phase.COMMIT, Kind.UP, Kind.DOWN)
    switches = [1e3 * f.gap_s for f in commits]
    decisions = [1e3 * f.switch_s for f in commits]
    streams = [
        f for phase in (Phase.STREAM, Phase.REBALANCE) for f in recorder.facts(phase, Kind.UP)
    ]
    size = sum(f.size_bytes for f in streams)
    seconds = sum(f.transfer_s for f in streams)
    return {
        "cycles": cycles,
        "ready_cold_s": round(statistics.median(recorder.cold_s), 3),
        "ready_parked_s": round(statistics.median(recorder.parked_s), 3),
        "ready_restored_s": round(statistics.median(s for f in restores for s in f.ready_s), 3),
        "up_s": round(statistics.median(o.elapsed_s for o in ups(recorder)), 3),
        "switch_p50_ms": round(statistics.median(switches), 1),
        "switch_p95_ms": round(float(np.percentile(switches, 95)), 1),
        "decision_to_first_step_p95_ms": round(float(np.percentile(decisions, 95)), 1),
        "token_gap_max_ms": round(1e3 * summary.token_gap_max_s, 1),
        "moved_gap_max_ms": round(1e3 * recorder.moved_gap_s, 1),
        "token_gap_p95_ms": round(1e3 * float(np.percentile(recorder.gaps_s, 95)), 1),
        "requests_total": summary.requests_total,
        "requests_failed": summary.requests_failed,
        "tokens_equal": int(summary.tokens_equal),
        "stream_bytes": size,
        "stream_gbps": round(size / seconds / 1e9, 3) if seconds else 0.0,
        "memcpy_gbps": round(statistics.median(recorder.memcpy_gbps), 3),
        "rss_growth_bytes": growth(recorder, lambda f: f.rss_bytes),
        "fd_growth": growth(recorder, lambda f: f.fds),
        "etcd_keys_growth": recorder.etcd_keys[-1] - recorder.etcd_keys[0],
    }


def ups(recorder: Recorder) -> list[OperationRecord]:
    return [op for op in recorder.operations if op.kind is Kind.UP]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=20)
    parser.add_argument("--work-dir", type=Path, default=Path(".demo"))
    arguments = parser.parse_args()
    console = Console(highlight=False)
    recorder, summary = asyncio.run(
        measure(arguments.cycles, arguments.work_dir.resolve(), console)
    )
    metrics = metrics_of(arguments.cycles, recorder, summary)
    detail = {
        "errors": summary.errors,
        "cold_s": recorder.cold_s,
        "parked_s": recorder.parked_s,
        "gaps_s": recorder.gaps_s,
        "token_gap_max_ms_by_phase": recorder.phase_gaps_ms,
        "footprints": [
            {p: asdict(f) for p, f in sample.items()}
            for sample in (recorder.footprints[0], recorder.footprints[-1])
        ],
        "phases_s": [
            {p.phase: round(p.elapsed_s, 4) for p in op.phases} for op in recorder.operations
        ],
    }
    path = write_result("cpu_scale", metrics, detail)
    for name, value in metrics.items():
        console.print(f"{name:24} {value}")
    console.print(f"written to {path}")


if __name__ == "__main__":
    main()
