"""Question 1: can a rank that has served be parked, after importing and exporting CUDA IPC memory?

Each way has its own pair of ranks: joint replay, unmap, Buffer destroyed, CUDA checkpoint,
the peer serves on, CUDA restore, fresh Buffer, rebind, connect, joint replay. UCX keeps imported
memory open in a cache of its own; the ways differ in that cache and in who unmaps first. Plain CUDA
IPC without NIXL shows what is the driver's part, and the fallback is a restore from the image.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import checkpoints
import ep_group
from common import GpuReadings, Report, SpikeError, run_spike
from ep_group import EpPeer
from rank_process import Rank, kill_all

GIB = 1 << 30
UNCACHED = {"UCX_CUDA_IPC_CACHE": "n"}
BOUNDED = {"UCX_CUDA_IPC_CACHE_MAX_REGIONS": "0"}  # an import is closed when its last user is gone


def unmap(order: str, peer: EpPeer, leaver: EpPeer) -> None:
    """Take the leaver out; `leaver_first` leaves the peer's mapping open for now."""
    if order == "leaver_first":
        peer.call("set_masks", ranks=[leaver.number], masked=True)
        leaver.call("disconnect", ranks=[peer.number])
    else:
        ep_group.disconnect([peer], [leaver])
    leaver.call("drop")


def cycle(readings: GpuReadings, order: str, peer: EpPeer, leaver: EpPeer) -> dict[str, Any]:
    """One park and return of the leaver."""
    found: dict[str, Any] = {"serving_bytes": readings.used_bytes(leaver.gpu)}
    begin = time.perf_counter()
    unmap(order, peer, leaver)
    found["unmap_s"] = time.perf_counter() - begin
    found |= checkpoints.cuda_out(leaver.pid)
    found["parked_bytes"] = readings.used_bytes(leaver.gpu)
    ep_group.alone(peer)
    if order == "leaver_first":
        peer.call("disconnect", ranks=[leaver.number])
        ep_group.alone(peer)
    begin = time.perf_counter()
    found |= checkpoints.cuda_in(leaver.pid)
    leaver.call("fresh", rank=leaver.number)
    leaver.call("route", world=[leaver.number])
    leaver.call("rebind")
    ep_group.connect([leaver], [peer])
    ep_group.unmask([peer, leaver])
    found["back_s"] = time.perf_counter() - begin
    found["phased"] = ep_group.phased([peer, leaver])
    found["joint"] = ep_group.joint([peer, leaver])
    return found


def after_refusal(report: Report, name: str, leaver: EpPeer) -> None:
    """Is the process still good for anything after the driver refused?"""
    steps = [checkpoints.cuda_state(leaver.pid)]
    try:
        checkpoints.unlock(leaver.pid)
        steps.append("unlocked")
        leaver.call("fresh", rank=leaver.number, timeout_s=20)
        leaver.call("rebind", timeout_s=20)
        steps.append("serves alone again")
    except SpikeError as error:
        steps.append(str(error)[:200])
    report.note(f"{name}_after_refusal", steps)


def try_way(report: Report, name: str, order: str, cycles: int, env: dict[str, str]) -> None:
    """A pair of ranks that serves, then parks `cycles` times in one order of unmapping."""
    readings = GpuReadings()
    peer, leaver = ep_group.start([0, 1], timeout_ms=1000, env=env)
    done: list[dict[str, Any]] = []
    try:
        ep_group.capture_alone([peer, leaver])
        ep_group.connect([leaver], [peer])
        ep_group.unmask([peer, leaver])
        report.note(f"{name}_before", ep_group.joint([peer, leaver], count=20))
        for number in range(cycles):
            done.append(cycle(readings, order, peer, leaver))
            report.note(f"{name}_cycle{number}", done[-1])
    except SpikeError as error:
        if "driver" in str(error):
            after_refusal(report, name, leaver)
        raise
    finally:
        report.metric(f"{name}_cycles", len(done))
        for key in ("unmap_s", "checkpoint_s", "restore_s", "back_s", "parked_bytes"):
            values = sorted(float(found[key]) for found in done)
            report.metric(f"{name}_{key}", values[len(values) // 2] if values else None)
        report.note(f"{name}_logs", [peer.log_tail(300), leaver.log_tail(300)])
        peer.kill()
        leaver.kill()


def from_image(report: Report, name: str, cycles: int, env: dict[str, str]) -> None:
    """The fallback: the leaver exits, and comes back from the image taken before it ever served."""
    peer, leaver = ep_group.start([0, 1], timeout_ms=1000, first_pid=20_000, env=env)
    ep_group.capture_alone([peer, leaver])
    leaver.call("drop")
    image, timings = checkpoints.to_image(leaver, checkpoints.fresh_folder("/dev/shm"))
    passed = 0
    try:
        for number in range(cycles):
            timings |= checkpoints.from_image(leaver, Path(image))
            begin = time.perf_counter()
            leaver.call("fresh", rank=1)
            leaver.call("rebind")
            ep_group.connect([leaver], [peer])
            ep_group.unmask([peer, leaver])
            timings["join_s"] = time.perf_counter() - begin
            report.note(f"{name}_phased{number}", ep_group.phased([peer, leaver]))
            report.note(f"{name}_joint{number}", ep_group.joint([peer, leaver], count=20))
            ep_group.disconnect([peer], [leaver])
            leaver.kill()
            passed += 1
    finally:
        report.metric(f"{name}_cycles", passed)
        for key, value in timings.items():
            report.metric(f"{name}_{key}", value)
        peer.kill()
        leaver.kill()


def ipc_round(first: Rank, second: Rank, seed: int, close: bool) -> None:
    """`first` pushes into memory of `second` that it imported; every byte compared."""
    first.call("ipc_open", handle=second.call("ipc_handle"))
    first.call("fill", seed=seed)
    second.call("poison")
    first.call("ipc_push")
    if second.call("compare", seed=seed):
        raise SpikeError(f"plain IPC: wrong bytes from {first.tag} to {second.tag}")
    if close:
        first.call("ipc_close")


def plain_ipc(report: Report, name: str, keep_open: bool) -> None:
    """The driver alone: import and export, close, park, and again in both directions."""
    peer, leaver = (
        Rank("stream_rank.py", tag, gpu).wait_ready() for tag, gpu in (("p", 0), ("l", 1))
    )
    for rank in (peer, leaver):
        rank.call("allocate", kind="malloc", size_bytes=GIB, chunk_bytes=GIB)
    try:
        ipc_round(leaver, peer, 1, close=not keep_open)
        ipc_round(peer, leaver, 2, close=True)
        leaver.call("release")
        report.note(f"{name}_out", checkpoints.cuda_out(leaver.pid))
        report.note(f"{name}_in", checkpoints.cuda_in(leaver.pid))
        leaver.call("allocate", kind="malloc", size_bytes=GIB, chunk_bytes=GIB)
        if keep_open:
            leaver.call("ipc_push")
        ipc_round(peer, leaver, 3, close=True)
        ipc_round(leaver, peer, 4, close=True)
    finally:
        peer.kill()
        leaver.kill()


def body(report: Report) -> None:
    """What the driver can, the ways of parking, the fallback."""
    report.attempt("plain_ipc_closed", plain_ipc, "plain_ipc_closed", False)
    report.attempt("plain_ipc_open", plain_ipc, "plain_ipc_open", True)
    report.attempt("uncached", try_way, "uncached", "both_then_destroy", 3, UNCACHED)
    report.attempt("uncached_first", try_way, "uncached_first", "leaver_first", 2, UNCACHED)
    report.attempt("cached", try_way, "cached", "both_then_destroy", 1, {})
    report.attempt("bounded", try_way, "bounded", "both_then_destroy", 1, BOUNDED)
    report.attempt("image_uncached", from_image, "image_uncached", 3, UNCACHED)
    report.attempt("image_cached", from_image, "image_cached", 2, {})


if __name__ == "__main__":
    run_spike("park_after_serving", body, kill_all)
