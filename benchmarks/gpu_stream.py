"""Weights from GPU to GPU: by mapped chunks and by NIXL, against a plain copy in the same run.

    python3 benchmarks/gpu_stream.py        # two GPUs or more; more sources where there are more

copy_gbps is one process that copies between two GPUs. mapped_Nsrc: N sources push their shares into
one arena; mapped_2x2: two sources fill two arenas. nixl_1src: NIXL's WRITE into memory of torch's
allocator, in an engine's environment; nixl_cached: with UCX's cache of IPC mappings on, which no
engine may have. Every byte is compared, and a bit is flipped to see that the digest shows it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from gpu_ranks import attempt, gpu_count, run_ranks
from gpu_report import Report

from dynamo_elastic.comm.expert_rules import IPC_CACHE_VARIABLE
from dynamo_elastic.testing.expert_buffer_group import RankProcess, call_all, gather

GIB = 1 << 30
SIZE_BYTES, CHUNK_BYTES = 30 * GIB, 2 * GIB
NIXL_BYTES = 16 * GIB
PIECE_BYTES = 256 << 20
REPEATS = 3
LIMITS = {
    "window_bytes": 4 * GIB,
    "transfer_timeout_s": 10.0,
    "timeout_s": 30.0,
    "floor_gbps": 50.0,
}
DEADLINE_S = 420


def body(report: Report, stack: ExitStack) -> None:
    gpus = gpu_count()
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="push-"))
    report.metric("gpus", gpus)
    copy_gbps = copy_between()
    report.metric("copy_gbps", copy_gbps)

    ranks = [start(stack, number) for number in range(gpus)]
    sink, sources = ranks[-1], ranks[:-1]
    rates = []
    for count in range(1, min(len(sources), 3) + 1):
        rates.append(mapped(report, f"mapped_{count}src", sources[:count], [sink], folder))
    if gpus >= 4:
        rates.append(mapped(report, "mapped_2x2", ranks[:2], ranks[2:4], folder))
    report.metric("best_gbps", max(rates))
    report.metric("best_of_copy", max(rates) / copy_gbps)
    attempt(report, "digest", lambda: digests(report, sources[0]))
    attempt(report, "nixl_1src", lambda: nixl(report, "nixl_1src", sources[0], sink))
    cached = [start(stack, number, ipc_cache="y") for number in (0, gpus - 1)]
    attempt(report, "nixl_cached", lambda: nixl(report, "nixl_cached", *cached))


def start(stack: ExitStack, number: int, ipc_cache: str = "n") -> RankProcess:
    rank = RankProcess(
        number,
        number,
        program=("-m", "dynamo_elastic.testing.peer_push_rank"),
        arguments=["cuda"],
        env={IPC_CACHE_VARIABLE: ipc_cache},
    )
    stack.callback(rank.close)
    return rank


def copy_between() -> float:
    """GB/s of a copy between GPUs 0 and 1 in a process that sees both; the best of five."""
    code = f"""
import time, torch
a = torch.empty({8 * GIB}, dtype=torch.uint8, device="cuda:0").fill_(1)
b = torch.empty({8 * GIB}, dtype=torch.uint8, device="cuda:1")
best = 0.0
for _ in range(5):
    torch.cuda.synchronize(0); torch.cuda.synchronize(1)
    begin = time.perf_counter()
    b.copy_(a)
    torch.cuda.synchronize(0); torch.cuda.synchronize(1)
    best = max(best, {8 * GIB} / (time.perf_counter() - begin) / 1e9)
print(best)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=90, check=False
    )
    if done.returncode:
        raise OSError(f"the reference copy failed: {done.stderr[-800:]}")
    return float(done.stdout.split()[-1])


def mapped(
    report: Report,
    name: str,
    sources: Sequence[RankProcess],
    sinks: Sequence[RankProcess],
    folder: str,
) -> float:
    """All sources push their shares into all sinks; the median of the rates into one sink."""
    everyone = [*sources, *sinks]
    call_all(everyone, "arena", size_bytes=SIZE_BYTES, chunk_bytes=CHUNK_BYTES)
    names = {rank.number: f"{name}-{rank.number}" for rank in everyone}
    blobs = {
        rank.number: rank.call("peer_agent", name=names[rank.number], folder=folder)
        for rank in everyone
    }
    for source in sources:
        for sink in sinks:
            source.call("add", agent="peer", metadata=blobs[sink.number])
    rates = timed_pushes(report, name, "peer", sources, sinks, names, SIZE_BYTES)
    call_all(everyone, "free")
    return rates


def timed_pushes(
    report: Report,
    name: str,
    agent: str,
    sources: Sequence[RankProcess],
    sinks: Sequence[RankProcess],
    names: Mapping[int, str],
    size_bytes: int,
) -> float:
    """Push REPEATS times, every byte compared after the first and the last; GB/s into one sink."""
    call_all(sources, "fill", seed=len(name))
    addresses = {names[sink.number]: sink.call("address") for sink in sinks}
    rates: list[float] = []
    wrong: list[int] = []
    limits: dict[str, Any] = LIMITS if agent == "peer" else {**LIMITS, "floor_gbps": 0.0}
    for repeat in range(REPEATS):
        call_all(sinks, "poison")
        pushes = [
            source.post(
                "push",
                agent=agent,
                me=names[source.number],
                sources=[names[s.number] for s in sources],
                targets=addresses,
                limits=limits,
                chunk_bytes=PIECE_BYTES,
            )
            for source in sources
        ]
        slowest_s = max(done["seconds"] for done in gather(pushes))
        rates.append(size_bytes / slowest_s / 1e9)
        if repeat in (0, REPEATS - 1):
            wrong += call_all(sinks, "wrong_bytes", seed=len(name))
    report.median(f"{name}_gbps", rates)
    report.metric(f"{name}_wrong_bytes", sum(wrong))
    return sorted(rates)[len(rates) // 2]


def nixl(report: Report, name: str, source: RankProcess, sink: RankProcess) -> None:
    """The same over NIXL, whose target must be memory of torch's allocator."""
    both = [source, sink]
    call_all(both, "malloc", size_bytes=NIXL_BYTES)
    names = {rank.number: f"{name}-{rank.number}" for rank in both}
    blobs = [rank.call("nixl_agent", name=names[rank.number]) for rank in both]
    source.call("add", agent="nixl", metadata=blobs[1])
    timed_pushes(report, name, "nixl", [source], [sink], names, NIXL_BYTES)
    call_all(both, "free")


def digests(report: Report, rank: RankProcess) -> None:
    """How fast a digest of everything is, and that it shows one bit."""
    rank.call("arena", size_bytes=SIZE_BYTES, chunk_bytes=CHUNK_BYTES)
    rank.call("fill", seed=1)
    first = rank.call("digest")
    again = [rank.call("digest") for _ in range(REPEATS)]
    report.metric("digest_first_s", first["seconds"])
    report.metric("digest_gbps", SIZE_BYTES / min(done["seconds"] for done in again) / 1e9)
    rank.call("flip", offset=SIZE_BYTES - 5)
    flipped = rank.call("digest")
    equal = {done["digest"] for done in again} == {first["digest"]}
    report.metric("digest_right", equal and flipped["digest"] != first["digest"])
    rank.call("free")


if __name__ == "__main__":
    run_ranks("gpu_stream", body, deadline_s=DEADLINE_S)
