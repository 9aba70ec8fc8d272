"""Driver's side of weight transfers: pairs of stream ranks and the cases they are put through."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import checkpoints
from common import GpuReadings, Report, SpikeError
from rank_process import Rank

GIB = 1 << 30
ARENA_BYTES = 30 * GIB
NVLINK_SHARE = 0.9  # of the payload must be seen on the links for a case to count as NVLink


@dataclass(frozen=True)
class Case:
    """One transfer: who holds what kind of memory, and who starts it."""

    source: str
    sink: str
    op: str = "WRITE"  # WRITE is started by the source, READ by the sink
    size_gib: int = 2
    chunk_gib: int = 2
    step_gib: float = 2
    per_chunk: bool = False
    repeats: int = 3
    deadline_s: float = 15

    @property
    def name(self) -> str:
        """Flat name for metrics."""
        registered = "chunks" if self.per_chunk else "one"
        chunks = self.size_gib // self.chunk_gib
        arrow = "to" if self.op == "WRITE" else "read_by"
        shape = f"{self.size_gib}g_{chunks}c_{registered}_{self.step_gib:g}g"
        return f"{self.source}_{arrow}_{self.sink}_{shape}"


def start_source(gpu: int = 0, name: str = "source", **options: Any) -> Rank:
    """A rank that was never snapshotted."""
    rank = Rank("stream_rank.py", name, gpu, **options).wait_ready()
    rank.call("open_agent", name=name, timeout_s=90)
    return rank


def start_restored(gpu: int = 1, name: str = "sink", **options: Any) -> Rank:
    """A rank with reserved arena addresses that went through a CUDA checkpoint."""
    rank = Rank("stream_rank.py", name, gpu, **options).wait_ready()
    rank.call("reserve", size_bytes=ARENA_BYTES)
    checkpoints.cuda_out(rank.pid)
    checkpoints.cuda_in(rank.pid)
    rank.call("open_agent", name=name, timeout_s=90)
    return rank


def prepare(case: Case, source: Rank, sink: Rank, seed: int) -> tuple[int, int]:
    """Memory on both sides, filled and registered, metadata exchanged; both addresses."""
    shape = {"size_bytes": case.size_gib * GIB, "chunk_bytes": case.chunk_gib * GIB}
    addresses = []
    for rank, kind in ((source, case.source), (sink, case.sink)):
        addresses.append(int(rank.call("allocate", kind=kind, **shape)["address"]))
    source.call("fill", seed=seed)
    sink.call("poison")
    blobs = [rank.call("register", per_chunk=case.per_chunk)["metadata"] for rank in (source, sink)]
    starter, blob = (source, blobs[1]) if case.op == "WRITE" else (sink, blobs[0])
    starter.call("load", metadata=blob)
    return addresses[0], addresses[1]


def run_case(report: Report, readings: GpuReadings, case: Case, source: Rank, sink: Rank) -> None:
    """Move the bytes over NIXL, count them on NVLink, compare all of them."""
    seed = abs(hash(case.name)) % 1000
    source_address, sink_address = prepare(case, source, sink, seed)
    starter, remote = (source, sink_address) if case.op == "WRITE" else (sink, source_address)

    def move() -> dict[str, Any]:
        done: dict[str, Any] = starter.call(
            "transfer",
            direction=case.op,
            remote_address=remote,
            step_bytes=int(case.step_gib * GIB),
            repeats=case.repeats,
            deadline_s=case.deadline_s,
            timeout_s=case.deadline_s * case.repeats + 10,
        )
        return done

    crossed, done = readings.nvlink_during(source.gpu, move)
    share = (
        None if crossed is None else crossed / (case.size_gib * GIB * max(1, len(done["rates"])))
    )
    found = {**done, "nvlink_share": share}
    if "hung_s" not in done:
        found["wrong_bytes"] = sink.call("compare", seed=seed, timeout_s=90)
    report.note(case.name, found)
    report.metric(f"{case.name}_gbps", median(done["rates"]) if done["rates"] else 0)
    report.metric(f"{case.name}_best_gbps", max(done["rates"], default=0))
    report.metric(f"{case.name}_wrong_bytes", found.get("wrong_bytes"))
    report.metric(f"{case.name}_nvlink_share", share)
    if "hung_s" in done:
        raise SpikeError(f"hung after {done['hung_s']:.1f} s")
    for rank in (source, sink):
        rank.call("deregister")
        rank.call("release")


def attempt_case(
    report: Report, readings: GpuReadings, case: Case, source: Rank, sink: Rank
) -> bool:
    """One case whose failure is an answer."""
    if report.attempt(case.name, run_case, readings, case, source, sink):
        return True
    report.note(f"{case.name}_logs", [rank.log_tail(400) for rank in (source, sink)])
    return False


def case_with_new_pair(report: Report, case: Case, make: Callable[[], tuple[Rank, Rank]]) -> None:
    """One case with ranks of its own: nothing that an earlier case left open can matter."""
    source, sink = make()
    run_case(report, GpuReadings(), case, source, sink)


def mapped_copy(
    report: Report,
    name: str,
    source: Rank,
    sink: Rank,
    size_bytes: int,
    chunk_bytes: int,
    *,
    push: bool,
) -> None:
    """Without NIXL: the starter maps the other side's chunks by file descriptor and copies."""
    readings = GpuReadings()
    owner, starter = (sink, source) if push else (source, sink)
    path = str(Path(tempfile.mkdtemp()) / "chunks")
    posted = owner.send("send_handles", path=path)
    import_s = starter.call(
        "import_peer", path=path, size_bytes=size_bytes, chunk_bytes=chunk_bytes
    )
    owner.receive(posted)
    report.metric(f"{name}_import_s", import_s)
    source.call("fill", seed=len(name))
    for streams in (1, 4):
        sink.call("poison")
        crossed, done = readings.nvlink_during(
            source.gpu,
            lambda n=streams: starter.call("copy_mapped", push=push, streams=n, repeats=3),
        )
        wrong = sink.call("compare", seed=len(name), timeout_s=90)
        share = None if crossed is None else crossed / (3 * size_bytes)
        report.note(
            f"{name}_{streams}streams", {**done, "wrong_bytes": wrong, "nvlink_share": share}
        )
        report.metric(f"{name}_{streams}streams_gbps", max(done["rates"]))
        report.metric(f"{name}_{streams}streams_wrong_bytes", wrong)
        report.metric(f"{name}_{streams}streams_nvlink_share", share)
