"""What room for ranks that are not there costs: two ranks in buffers of several capacities.

    python3 benchmarks/gpu_capacity.py          # two GPUs

Each rank replays a CUDA graph of 48 layers. `comm` is dispatch and combine alone; `padded` adds an
expert that works on every row of its input, the padding for absent ranks included, as one without a
grouped kernel does. tokens_s counts both ranks' tokens that went through all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from gpu_ranks import run_ranks
from gpu_report import Report

from dynamo_elastic.testing.expert_buffer_group import (
    RankProcess,
    activate,
    call_all,
    connect,
    gather,
    part,
)

CAPACITIES = (2, 4, 7, 16)
BATCHES = (16, 128)
LAYERS = 48
REPLAYS = 50
SHAPE = {"experts_per_rank": 8, "hidden": 2048, "top_k": 8, "timeout_ms": 4000}
DEADLINE_S = 300


def body(report: Report, stack: ExitStack) -> None:
    ranks = [RankProcess(number, number) for number in range(2)]
    for rank in ranks:
        stack.callback(rank.close)
    table = {}
    for capacity in CAPACITIES:
        for tokens in BATCHES:
            name = f"capacity_{capacity}_batch_{tokens}"
            shape = {**SHAPE, "capacity": capacity, "max_tokens": tokens}
            table[capacity, tokens] = measure(report, name, ranks, shape)
    for tokens in BATCHES:
        for capacity in CAPACITIES[1:]:
            ratio = table[capacity, tokens] / table[CAPACITIES[0], tokens]
            report.metric(f"capacity_{capacity}_batch_{tokens}_of_capacity_2", ratio)


def measure(
    report: Report, name: str, ranks: Sequence[RankProcess], shape: dict[str, int]
) -> float:
    """Tokens a second of both ranks in buffers of `shape`, dispatch and combine alone."""
    gather([rank.post("open", rank=rank.number, **shape) for rank in ranks])
    connect(ranks[1:], ranks[:1])
    activate(ranks)
    call_all(ranks, "route", world=[0, 1])
    rates: dict[str, float] = {}
    for kind, experts in (("comm", False), ("padded", True)):
        call_all(ranks, "capture", layers=LAYERS, experts=experts)
        call_all(ranks, "replay", count=3)
        seconds = max(call_all(ranks, "replay", count=REPLAYS))
        rates[kind] = 2 * shape["max_tokens"] / seconds
        report.metric(f"{name}_{kind}_tokens_s", rates[kind])
        report.metric(f"{name}_{kind}_layer_us", seconds / LAYERS * 1e6)
    checks = call_all(ranks, "check", world=[0, 1])
    report.note(name, {"checks": checks, "masked": call_all(ranks, "masked")})
    report.metric(f"{name}_bad_tokens", sum(check["bad_tokens"] for check in checks))
    report.metric(f"{name}_buffer_bytes", ranks[0].call("memory_bytes"))
    part(ranks[1:], ranks[:1])
    call_all(ranks, "destroy", released_by=[0, 1])
    return rates["comm"]


if __name__ == "__main__":
    run_ranks("gpu_capacity", body, deadline_s=DEADLINE_S)
