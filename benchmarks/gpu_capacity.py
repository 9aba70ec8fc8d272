"""What room for ranks that are not there costs: two ranks in buffers of several capacities.

    python3 benchmarks/gpu_capacity.py          # two GPUs

Each rank replays a CUDA graph of 48 layers. `comm` is dispatch and combine alone; `padded` adds an
expert that works on every row of its input, the padding for absent ranks included, as one without a
grouped kernel does. tokens_s counts both ranks' tokens that went through all layers.
"""

from __future__ import annotations

from contextlib import ExitStack

from gpu_ranks import run_ranks
from gpu_report import Report

from dynamo_elastic.testing.expert_buffer_group import RankProcess, activate, call_all, connect

CAPACITIES = (2, 4, 7, 16)
BATCHES = (16, 128)
LAYERS = 48
REPLAYS = 50
SHAPE = {"experts_per_rank": 8, "hidden": 2048, "top_k": 8, "timeout_ms": 4000}
DEADLINE_S = 300


def body(report: Report, stack: ExitStack) -> None:
    table = {}
    for capacity in CAPACITIES:
        for tokens in BATCHES:
            name = f"capacity_{capacity}_batch_{tokens}"
            table[name] = measure(report, name, {**SHAPE, "capacity": capacity}, tokens)
    for tokens in BATCHES:
        base = table[f"capacity_{CAPACITIES[0]}_batch_{tokens}"]
        for capacity in CAPACITIES[1:]:
            ratio = table[f"capacity_{capacity}_batch_{tokens}"] / base
            report.metric(f"capacity_{capacity}_batch_{tokens}_of_capacity_2", ratio)


def measure(report: Report, name: str, shape: dict[str, int], tokens: int) -> float:
    """Tokens a second of two ranks, dispatch and combine alone."""
    with ExitStack() as stack:
        ranks = [RankProcess(number, number) for number in range(2)]
        for rank in ranks:
            stack.callback(rank.close)
        opened = [rank.post("open", rank=rank.number, **shape, max_tokens=tokens) for rank in ranks]
        for wait in opened:
            wait()
        rates: dict[str, float] = {}
        for kind, experts in (("comm", False), ("padded", True)):
            call_all(ranks, "capture", layers=LAYERS, experts=experts)
            if kind == "comm":
                connect(ranks[1:], ranks[:1])
                activate(ranks)
                call_all(ranks, "route", world=[0, 1])
            call_all(ranks, "replay", count=3)
            seconds = max(call_all(ranks, "replay", count=REPLAYS))
            rates[kind] = 2 * tokens / seconds
            report.metric(f"{name}_{kind}_tokens_s", rates[kind])
            report.metric(f"{name}_{kind}_layer_us", seconds / LAYERS * 1e6)
        checks = call_all(ranks, "check", world=[0, 1])
        masked = call_all(ranks, "masked")
        report.note(name, {"checks": checks, "masked": masked})
        report.metric(f"{name}_bad_tokens", sum(check["bad_tokens"] for check in checks))
        report.metric(f"{name}_buffer_bytes", ranks[0].call("memory_bytes"))
        return rates["comm"]


if __name__ == "__main__":
    run_ranks("gpu_capacity", body, deadline_s=DEADLINE_S)
