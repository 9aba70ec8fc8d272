"""Extra: a restored process creates NCCL communicators.

Once for a process that never used NCCL before its image was taken, once for one that did and
destroyed its group.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import checkpoints
from common import Report, SpikeError, run_spike
from rank_process import Rank, kill_all, value_of

ENV = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "NCCL_DEBUG": "WARN",
}


def together(ranks: list[Rank]) -> list[dict[str, Any]]:
    """All ranks make one communicator; every result is right or this raises."""
    path = str(Path(tempfile.mkdtemp()) / "store")
    posted = [
        (rank, rank.send("join", path=path, rank=number, world=len(ranks)))
        for number, rank in enumerate(ranks)
    ]
    found = [value_of(rank, "join", rank.receive(index, 60)) for rank, index in posted]
    if not all(answer["right"] for answer in found):
        raise SpikeError(f"all-reduce is wrong: {found}")
    return found


def leave(ranks: list[Rank]) -> None:
    """Everybody destroys the group at once."""
    posted = [(rank, rank.send("leave")) for rank in ranks]
    for rank, index in posted:
        value_of(rank, "leave", rank.receive(index, 40))


def pair(report: Report, name: str, used_before: bool) -> None:
    """A retained rank and one from an image."""
    ranks = [Rank("plain_rank.py", f"{name}{gpu}", gpu, env=ENV).wait_ready() for gpu in (0, 1)]
    for rank in ranks:
        rank.call("warm", timeout_s=90)
    if used_before:
        report.note(f"{name}_before", together(ranks))
        leave(ranks)
    image, timings = checkpoints.to_image(ranks[1], checkpoints.fresh_folder("/dev/shm"))
    report.note(f"{name}_dump", timings)
    report.note(f"{name}_restore", checkpoints.from_image(ranks[1], image))
    for number in range(2):
        found = together(ranks)
        report.note(f"{name}_{number}", found)
        report.metric(
            f"{name}_communicator{number}_s", max(answer["first_all_reduce_s"] for answer in found)
        )
        report.metric(f"{name}_communicator{number}_gbps", min(answer["gbps"] for answer in found))
        leave(ranks)
    for rank in ranks:
        rank.kill()


def body(report: Report) -> None:
    """Fresh and used."""
    report.attempt("first_after_restore", pair, "first_after_restore", False)
    report.attempt("destroyed_before", pair, "destroyed_before", True)


if __name__ == "__main__":
    run_spike("nccl", body, kill_all)
