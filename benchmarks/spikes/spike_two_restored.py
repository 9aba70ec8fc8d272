"""Question 3: two restored engines do NIXL EP with each other and with a retained rank.

Rank 0 (GPU 0) never stops. Ranks 1 (GPU 1) and 2 (GPU 0) are images with pid ranges of their own,
restored into one pid namespace; ranks 0 and 2 share a GPU, so what rank 1 exchanges crosses NVLink.
Last, the same images are restored into two pid namespaces, to know what happens there.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import checkpoints
import ep_group
from common import GpuReadings, Report, SpikeError, run_spike
from ep_group import EpPeer
from rank_process import call_all, kill_all

FIRST_PID = 12_000
QUEUED = 3000


def bring_up(ranks: list[EpPeer]) -> float:
    """Fresh Buffers and rebound graphs."""
    begin = time.perf_counter()
    for rank in ranks:
        rank.call("fresh", rank=rank.number)
        rank.call("route", world=[rank.number])
    call_all(ranks, "rebind")
    return time.perf_counter() - begin


def renew(ranks: list[EpPeer]) -> None:
    """Everybody back to an unconnected Buffer, so that the parts do not disturb each other."""
    call_all(ranks, "drop")
    bring_up(ranks)


def one_namespace(
    report: Report, retained: EpPeer, joiners: list[EpPeer], images: list[Path]
) -> None:
    """Restore both beside the retained rank and prove tokens and lanes."""
    begin = time.perf_counter()
    for joiner, image in zip(joiners, images, strict=True):
        report.note(f"restore_{joiner.tag}", checkpoints.from_image(joiner, image))
    report.metric("restore_two_in_turn_s", time.perf_counter() - begin)
    report.metric("fresh_and_rebind_two_s", bring_up(joiners))
    everyone = [retained, *joiners]
    report.attempt("three", three, retained, joiners)
    renew(everyone)
    report.attempt("restored_pair", pair, joiners[0], joiners[1], "restored_pair")
    renew(everyone)
    report.attempt("retained_pair", pair, retained, joiners[0], "retained_pair")
    renew(everyone)
    report.attempt("under_load", under_load, retained, joiners[:1])
    renew(everyone)
    report.attempt("three_under_load", under_load, retained, joiners)
    renew([retained])


def three(report: Report, retained: EpPeer, joiners: list[EpPeer]) -> None:
    """All three in one group, in steps of four turns: two of them share a GPU."""
    ep_group.alone(retained)
    seconds = ep_group.connect(joiners, [retained])
    report.metric("connect_worst_s", max(seconds))
    ep_group.alone(retained)
    everyone = [retained, *joiners]
    ep_group.unmask(everyone)
    for seed in range(5):
        report.note(f"three_{seed}", ep_group.phased(everyone, seed=seed))
    report.note("three_lanes", call_all(everyone, "lanes"))


def pair(report: Report, first: EpPeer, second: EpPeer, name: str) -> None:
    """Two ranks on two GPUs: ordinary steps, and every byte on the links is theirs."""
    ep_group.connect([second], [first])
    ep_group.unmask([first, second])
    for seed in range(5):
        report.note(f"{name}_{seed}", ep_group.joint([first, second], seed=seed))
    found = ep_group.assert_nvlink(report, GpuReadings(), [first, second], name)
    if found["nvlink_bytes"] is not None and found["nvlink_bytes"] < 1e6:
        raise SpikeError(f"no bytes on the links: {found}")


def under_load(report: Report, retained: EpPeer, joiners: list[EpPeer]) -> None:
    """Connect while the retained rank's graphs run: is it stalled, and are its tokens right?

    The step afterwards is an ordinary one, whose kernels wait for each other.
    """
    name = f"under_load_{len(joiners)}"
    retained.call("queue", count=QUEUED)
    seconds = ep_group.connect(joiners, [retained])
    report.metric(f"{name}_connect_s", max(seconds))
    ep_group.alone(retained)
    everyone = [retained, *joiners]
    ep_group.unmask(everyone)
    report.note(f"{name}_phased", ep_group.phased(everyone))
    report.note(f"{name}_joint", ep_group.joint(everyone))


def two_namespaces(
    report: Report, retained: EpPeer, joiners: list[EpPeer], images: list[Path]
) -> None:
    """The same images, each in its own pid namespace."""
    holders: list[subprocess.Popen[bytes]] = []
    try:
        for joiner, image in zip(joiners, images, strict=True):
            holders.append(checkpoints.restore_in_namespace(joiner, image))
            report.note(f"namespace_cuda_{joiner.tag}", checkpoints.cuda_in(joiner.pid))
        report.metric("namespaces_cuda_restore_ok", 1)
        bring_up(joiners)
        ep_group.connect(joiners, [retained], timeout_s=25)
        everyone = [retained, *joiners]
        ep_group.unmask(everyone)
        report.note("namespaces_phased", ep_group.phased(everyone))
    finally:
        report.note("namespace_logs", [rank.log_tail(700) for rank in (retained, *joiners)])
        for holder in holders:
            holder.kill()
            holder.wait(20)


def body(report: Report) -> None:
    """Images first, then both ways of restoring them."""
    retained, *joiners = ep_group.start([0, 1, 0], first_pid=FIRST_PID)
    ep_group.capture_alone([retained, *joiners])
    call_all(joiners, "drop")
    folder = checkpoints.fresh_folder("/dev/shm")
    images = []
    for joiner in joiners:
        image, timings = checkpoints.to_image(joiner, folder)
        images.append(image)
        report.note(f"dump_{joiner.tag}", timings)
    if report.attempt("one_namespace", one_namespace, retained, joiners, images):
        for joiner in joiners:
            joiner.kill()
        report.attempt("two_namespaces", two_namespaces, retained, joiners, images)


if __name__ == "__main__":
    run_spike("two_restored", body, kill_all)
