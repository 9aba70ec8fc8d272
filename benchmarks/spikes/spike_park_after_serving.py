"""Question 1: can a rank that has served be parked, after importing and exporting CUDA IPC memory?

Each order of unmapping is tried with its own pair of ranks: joint replay, unmap, Buffer destroyed,
CUDA checkpoint, the peer serves on, CUDA restore, fresh Buffer, rebind, connect, joint replay.
"""

from __future__ import annotations

import time
from pathlib import Path

import ep_group
from common import GpuReadings, Report, run_spike
from ep_group import EpPeer
from rank_process import kill_all

import snapshot

CYCLES = 3


def unmap(order: str, peer: EpPeer, leaver: EpPeer) -> None:
    """Take the leaver out; `leaver_first` leaves the peer's mapping open for now."""
    if order == "both_then_destroy":
        ep_group.disconnect([peer], [leaver])
    elif order == "peer_then_destroy":
        peer.call("disconnect", ranks=[leaver.number])
    elif order == "leaver_first":
        peer.call("set_masks", ranks=[leaver.number], masked=True)
        leaver.call("disconnect", ranks=[peer.number])
    leaver.call("drop")
    if order == "all_destroyed":
        peer.call("drop")


def cycle(
    report: Report, readings: GpuReadings, order: str, peer: EpPeer, leaver: EpPeer
) -> tuple[dict[str, float], dict[str, object]]:
    """One park and return of the leaver."""
    serving_bytes = readings.used_bytes(leaver.gpu)
    begin = time.perf_counter()
    unmap(order, peer, leaver)
    unmap_s = time.perf_counter() - begin
    timings = {"unmap_s": unmap_s, **snapshot.cuda_out(leaver.pid)}
    parked_bytes = readings.used_bytes(leaver.gpu)
    if order != "all_destroyed":
        ep_group.alone(peer)
    if order == "leaver_first":
        peer.call("disconnect", ranks=[leaver.number])
        ep_group.alone(peer)
    begin = time.perf_counter()
    timings |= snapshot.cuda_in(leaver.pid)
    if order == "all_destroyed":
        peer.call("fresh", rank=peer.number)
        peer.call("rebind")
    leaver.call("fresh", rank=leaver.number)
    rebound = leaver.call("rebind")
    ep_group.connect([leaver], [peer])
    ep_group.unmask([peer, leaver])
    timings["back_s"] = time.perf_counter() - begin
    result = ep_group.joint([peer, leaver])
    memory = {"serving_bytes": serving_bytes, "parked_bytes": parked_bytes}
    return timings, {**memory, "rebind": rebound, "joint": result}


def try_order(report: Report, order: str, cycles: int, env: dict[str, str]) -> None:
    """A pair of ranks that serves, then parks `cycles` times in one order of unmapping."""
    readings = GpuReadings()
    peer, leaver = ep_group.start([0, 1], env=env)
    try:
        ep_group.capture_alone([peer, leaver])
        ep_group.connect([leaver], [peer])
        ep_group.unmask([peer, leaver])
        report.note(f"{order}_before", ep_group.joint([peer, leaver], count=20))
        lines = []
        for number in range(cycles):
            timings, found = cycle(report, readings, order, peer, leaver)
            lines.append(
                timings | {key: value for key, value in found.items() if key.endswith("bytes")}
            )
            report.note(f"{order}_cycle{number}", {**timings, **found})
        for key in lines[-1]:
            values = sorted(float(line[key]) for line in lines)
            report.metric(f"{order}_{key}", values[len(values) // 2])
    finally:
        report.note(f"{order}_logs", [peer.log_tail(500), leaver.log_tail(500)])
        peer.kill()
        leaver.kill()


def from_image(report: Report) -> None:
    """The fallback: the leaver exits, and comes back from the image taken before it ever served."""
    peer, leaver = ep_group.start([0, 1], first_pid=20_000)
    ep_group.capture_alone([peer, leaver])
    leaver.call("drop")
    image, timings = snapshot.to_image(leaver, snapshot.fresh_folder("/dev/shm"))
    for number in range(2):
        timings |= snapshot.from_image(leaver, Path(image))
        begin = time.perf_counter()
        leaver.call("fresh", rank=1)
        leaver.call("rebind")
        ep_group.connect([leaver], [peer])
        ep_group.unmask([peer, leaver])
        timings["join_s"] = time.perf_counter() - begin
        report.note(f"image_joint{number}", ep_group.joint([peer, leaver], count=20))
        ep_group.disconnect([peer], [leaver])
        leaver.kill()
    for key, value in timings.items():
        report.metric(f"image_{key}", value)


def body(report: Report) -> None:
    """All orders, the fallback last."""
    report.attempt("both_then_destroy", try_order, "both_then_destroy", CYCLES, {})
    report.attempt("leaver_first", try_order, "leaver_first", 1, {})
    report.attempt("peer_then_destroy", try_order, "peer_then_destroy", 1, {})
    if not report.metrics["both_then_destroy_ok"]:
        report.attempt("uncached", try_order, "both_then_destroy", 1, {"UCX_CUDA_IPC_CACHE": "n"})
        report.attempt("all_destroyed", try_order, "all_destroyed", 1, {})
    report.attempt("image", from_image)


if __name__ == "__main__":
    run_spike("park_after_serving", body, kill_all)
