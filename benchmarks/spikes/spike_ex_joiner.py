"""Question 5: a restored engine's arena serves the next joiner.

Rank A (never snapshotted) fills the arena of B, restored from an image; then B fills the arena of
C, restored from another image: by mapped chunks in both directions, and over NIXL into plain device
memory.
"""

from __future__ import annotations

import checkpoints
from common import GpuReadings, Report, SpikeError, run_spike
from rank_process import Rank, kill_all
from streams import GIB, Case, attempt_case, mapped_copy, start_source

SIZE_BYTES, CHUNK_BYTES = 16 * GIB, 2 * GIB
FIRST_PID = 12_000


def restored_from_image(names: list[tuple[str, int]]) -> list[Rank]:
    """Ranks that went through CRIU, each with reserved arena addresses."""
    ranks = []
    for number, (name, gpu) in enumerate(names):
        rank = Rank("stream_rank.py", name, gpu, first_pid=FIRST_PID + 3000 * number).wait_ready()
        rank.call("reserve", size_bytes=SIZE_BYTES)
        ranks.append(rank)
    folder = checkpoints.fresh_folder("/dev/shm")
    images = [checkpoints.to_image(rank, folder)[0] for rank in ranks]
    for rank, image in zip(ranks, images, strict=True):
        checkpoints.from_image(rank, image)
    return ranks


def body(report: Report) -> None:
    """A to B, then B to C."""
    first = start_source(0, "A")
    second, third = restored_from_image([("B", 1), ("C", 0)])
    shape = {"size_bytes": SIZE_BYTES, "chunk_bytes": CHUNK_BYTES}
    first.call("allocate", kind="malloc", **shape)
    for rank in (second, third):
        rank.call("allocate", kind="posix", **shape)
    mapped_copy(report, "serving_to_joiner", first, second, SIZE_BYTES, CHUNK_BYTES, push=True)
    first.call("close_import")
    seed = len("serving_to_joiner")
    if second.call("compare", seed=seed):
        raise SpikeError("the ex-joiner's weights are wrong")
    mapped_copy(report, "ex_joiner_push", second, third, SIZE_BYTES, CHUNK_BYTES, push=True)
    second.call("close_import")
    mapped_copy(report, "ex_joiner_pulled", second, third, SIZE_BYTES, CHUNK_BYTES, push=False)
    third.call("close_import")
    for rank in (second, third):
        rank.call("release")
        report.note(f"agent_{rank.tag}_s", rank.call("open_agent", name=rank.tag, timeout_s=90))
    readings = GpuReadings()
    attempt_case(report, readings, Case("posix", "malloc", size_gib=16, step_gib=2), second, third)
    attempt_case(report, readings, Case("posix", "posix", op="READ", size_gib=2), second, third)


if __name__ == "__main__":
    run_spike("ex_joiner", body, kill_all)
