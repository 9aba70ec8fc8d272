"""Question 4: source-initiated WRITE into a VMM arena that was mapped after a restore.

NIXL over UCX by handle type of both sides, and the way that does not need it: the source maps the
sink's chunks by file descriptor. 30 GiB where a way works, every byte compared, and the share of
the bytes seen on NVLink.
"""

from __future__ import annotations

import checkpoints
from common import Report, SpikeError, run_spike
from isolated import isolated
from rank_process import Rank, kill_all
from streams import (
    ARENA_BYTES,
    GIB,
    Case,
    case_with_new_pair,
    mapped_copy,
    start_restored,
    start_source,
)

CASES = [
    Case("malloc", "posix", op="READ", size_gib=30, step_gib=2),
    Case("malloc", "none", op="READ", size_gib=8, step_gib=2),
    Case("none", "malloc", size_gib=8, step_gib=2),
    Case("posix", "malloc", size_gib=30, step_gib=2),
    Case("malloc", "malloc", size_gib=30, chunk_gib=30, step_gib=30),
    Case("malloc", "malloc", size_gib=30, chunk_gib=30, step_gib=0.5),
    Case("malloc", "posix", size_gib=1, chunk_gib=1, step_gib=1, repeats=1),
    Case("malloc", "posix", chunk_gib=1, step_gib=2, repeats=1),
    Case("malloc", "posix", chunk_gib=1, step_gib=1, per_chunk=True, repeats=1),
    Case("posix", "posix", size_gib=1, chunk_gib=1, step_gib=1, repeats=1),
    Case("posix", "posix", op="READ", size_gib=1, chunk_gib=1, step_gib=1, repeats=1),
    Case("malloc", "none", size_gib=1, chunk_gib=1, step_gib=1, repeats=1),
    Case("none", "malloc", op="READ", size_gib=1, chunk_gib=1, step_gib=1, repeats=1),
]
FABRIC_CASES = [
    Case("malloc", "fabric", size_gib=30, chunk_gib=30, step_gib=30),
    Case("malloc", "fabric", size_gib=4, chunk_gib=1, step_gib=4),
    Case("malloc", "fabric", size_gib=30, step_gib=2, per_chunk=True),
    Case("fabric", "fabric", size_gib=30, step_gib=2, per_chunk=True),
    Case("fabric", "fabric", op="READ", size_gib=30, step_gib=2, per_chunk=True),
]


def make() -> tuple[Rank, Rank]:
    """A serving source and a restored sink."""
    return start_source(), start_restored()


def fabric_usable(report: Report) -> None:
    """Whether a fabric handle can be allocated here at all."""
    rank = Rank("stream_rank.py", "probe", 0).wait_ready()
    report.note("facts", rank.call("facts"))
    answer = rank.ask("allocate", kind="fabric", size_bytes=GIB, chunk_bytes=GIB)
    report.note("fabric_allocation", answer.get("error", "allowed"))
    report.metric("fabric_allocation_ok", "error" not in answer)
    rank.kill()


def by_descriptor(report: Report) -> None:
    """The source maps the sink's arena and pushes; then the sink parks, mapping open or closed."""
    source, sink = make()
    shape = {"size_bytes": ARENA_BYTES, "chunk_bytes": 2 * GIB}
    sink.call("allocate", kind="posix", **shape)
    source.call("allocate", kind="malloc", **shape)
    mapped_copy(report, "fd_malloc_push", source, sink, ARENA_BYTES, 2 * GIB, push=True)
    source.call("release")
    source.call("allocate", kind="posix", **shape)
    source.call("close_import")
    mapped_copy(report, "fd_posix_push", source, sink, ARENA_BYTES, 2 * GIB, push=True)
    park_with_mapping(report, source, sink)
    for rank in (source, sink):
        rank.kill()


def park_with_mapping(report: Report, source: Rank, sink: Rank) -> None:
    """Park the sink with the source's mapping still open, then closed."""
    sink.call("release")
    try:
        report.note(
            "park_with_open_mapping",
            {**checkpoints.cuda_out(sink.pid), **checkpoints.cuda_in(sink.pid)},
        )
        report.metric("park_with_open_mapping_ok", 1)
    except SpikeError as error:
        report.metric("park_with_open_mapping_ok", 0)
        report.note("park_with_open_mapping", str(error))
        return
    source.call("close_import")
    report.note(
        "park_after_close", {**checkpoints.cuda_out(sink.pid), **checkpoints.cuda_in(sink.pid)}
    )
    sink.call("allocate", kind="posix", size_bytes=8 * GIB, chunk_bytes=2 * GIB)
    source.call("release")
    source.call("allocate", kind="malloc", size_bytes=8 * GIB, chunk_bytes=2 * GIB)
    mapped_copy(report, "fd_after_second_park", source, sink, 8 * GIB, 2 * GIB, push=True)


def body(report: Report) -> None:
    """The way that must work, then the matrix; every part in a process of its own."""
    isolated(report, "by_descriptor", by_descriptor, timeout_s=150)
    isolated(report, "fabric", fabric_usable)
    fabric = FABRIC_CASES if report.metrics.get("fabric_allocation_ok") else []
    for case in CASES + fabric:
        isolated(report, case.name, case_with_new_pair, case, make, timeout_s=60)


if __name__ == "__main__":
    run_spike("push_vmm", body, kill_all)
