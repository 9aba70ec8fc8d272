"""N GPUs: a small model through all resizes among 1..N ranks, round after round; nothing grows.

    python3 benchmarks/gpu_rounds.py            # 20 rounds on up to four GPUs

Every round goes through each pair of widths in both directions, under load, and ends with one
rank. There, with nothing going on, memory is read and tokens are timed. `*_growth` compares the
median of the last quarter of the rounds with that of the first quarter after the first round.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_report import Report, inventory, run

from dynamo_elastic.engine.base import Request
from dynamo_elastic.engine.reference.make_model import write_model
from dynamo_elastic.snapshot.process import identify, memory_of
from dynamo_elastic.testing.engine_process import SMALL_SHAPE, EngineProcess
from dynamo_elastic.testing.fleet import Fleet, FleetLoad
from dynamo_elastic.testing.gpu_fleet import gpu_fleet

DEADLINE_S = 270.0
MOST_RANKS = 4
SHAPE = replace(SMALL_SHAPE, hidden_size=2048, num_hidden_layers=8, num_experts=32)
ENGINE: dict[str, Any] = {
    "slots_per_rank": 32,
    "batch_tokens": 8,
    "max_context": 256,
    "kv_blocks": 128,
    "peer_timeout_s": 1.0,
}
TIMED_TOKENS = 120


def resizes(most: int) -> list[int]:
    """Widths to go to, from 1 back to 1, so that each goes to each other one once.

    >>> resizes(3)
    [2, 1, 3, 2, 3, 1]
    """
    left = {a: [b for b in range(most, 0, -1) if b != a] for a in range(1, most + 1)}
    path, stack = list[int](), [1]
    while stack:
        if left[stack[-1]]:
            stack.append(left[stack[-1]].pop())
        else:
            path.append(stack.pop())
    return path[::-1][1:]


async def measure(report: Report, *, rounds: int) -> None:
    gpus = min(MOST_RANKS, len(inventory("cuda").gpus()))
    widths = resizes(gpus)
    report.note("widths", [1, *widths])
    with tempfile.TemporaryDirectory(prefix="de-rounds-") as directory:
        model = Path(directory, "model")
        write_model(model, SHAPE, seed=3, in_file=False)
        async with gpu_fleet(
            model, Path(directory, "run"), range(gpus), deadline_s=DEADLINE_S, **ENGINE
        ) as ranks:
            engines = list(ranks.all.values())
            await ranks.boot(1)
            rows = [await one_round(ranks, widths, engines) for _ in _in_time(rounds)]
            report.metric("rounds", len(rows))
            report.metric("resizes", len(rows) * len(widths))
            judge(report, rows)


def _in_time(rounds: int) -> Iterator[int]:
    """As many rounds as the time allows: a result with fewer is better than none."""
    began_s = time.monotonic()
    for done in range(rounds):
        spent_s = time.monotonic() - began_s
        if done and spent_s * (done + 1) / done > DEADLINE_S - 60:
            return
        yield done


async def one_round(
    ranks: Fleet[EngineProcess], widths: Sequence[int], engines: Sequence[EngineProcess]
) -> dict[str, float]:
    load = FleetLoad(ranks, [engines[0].worker_id])
    taken: dict[str, list[float]] = {"up": [], "down": []}
    async with load.running():
        for width in widths:
            up = width > ranks.in_force.world_size
            began_s = time.monotonic()
            await (ranks.scale_up(width) if up else ranks.scale_down(width))
            taken["up" if up else "down"].append(time.monotonic() - began_s)
    gpus = inventory("cuda").gpus()
    row = {
        "up_s": statistics.median(taken["up"]),
        "down_s": statistics.median(taken["down"]),
        "requests": len(load.told),
        "token_s": await token_s(engines[0]),
        **{f"gpu{i}_bytes": g.total_bytes - g.free_bytes for i, g in enumerate(gpus)},
        **{f"host{i}_bytes": resident_bytes(e) for i, e in enumerate(engines)},
    }
    print("round:", {name: round(value, 5) for name, value in row.items()}, flush=True)
    return row


async def token_s(engine: EngineProcess) -> float:
    """The median time between two tokens of one request that has the rank for itself."""
    name = f"timed-{time.monotonic_ns()}"
    await engine.generate(Request(name, (3, 4, 5), TIMED_TOKENS, temperature=0.0))
    times = engine.token_times.pop(name)
    return statistics.median(b - a for a, b in itertools.pairwise(times))


def resident_bytes(engine: EngineProcess) -> int:
    process = identify(engine.process.pid)
    return 0 if process is None else memory_of([process]).total_bytes


def judge(report: Report, rows: Sequence[Mapping[str, float]]) -> None:
    steady = rows[1:]
    quarter = max(1, len(steady) // 4)
    worst = 0.0
    for name in rows[0]:
        values = [row[name] for row in steady]
        first = statistics.median(values[:quarter])
        last = statistics.median(values[-quarter:])
        report.note(name, [row[name] for row in rows])
        growth = last / first - 1
        if name.endswith("_bytes"):
            worst = max(worst, growth)
        report.metric(f"{name}_growth", growth)
    report.metric("memory_growth_max", worst)
    for name in ("up_s", "down_s", "token_s"):
        report.metric(name, statistics.median(row[name] for row in steady))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()

    async def body(report: Report) -> None:
        await measure(report, rounds=arguments.rounds)

    run("gpu_rounds", body, deadline_s=DEADLINE_S)
