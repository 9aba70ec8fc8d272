"""Extras: CRIU's lazy pages under the driver, and the cost of a restore by size and store."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import checkpoints
from common import Report, SpikeError, run_spike, wait_until
from rank_process import Rank, kill_all

GIB = 1 << 30
BALLAST_GIB = {"1g": 0, "3g": 2, "6g": 5}  # a torch process alone is an image of about 1 GiB
DISK = os.environ.get("SPIKE_DISK", "/var/tmp")
WANTED = 3.0  # what the graph of plain_rank computes


def drop_cache() -> None:
    """Make the next read of an image come from the disk."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def back(report: Report, rank: Rank, image: Path, name: str) -> None:
    """One restore to the first right step; the process is ended again."""
    begin = time.perf_counter()
    timings = checkpoints.from_image(rank, image)
    answer = rank.call("step")
    total_s = time.perf_counter() - begin
    if answer != WANTED:
        raise SpikeError(f"{name}: the graph gives {answer}")
    report.note(name, {**timings, "total_s": total_s})
    report.metric(f"{name}_criu_s", timings["criu_restore_s"])
    report.metric(f"{name}_cuda_s", timings["restore_s"])
    report.metric(f"{name}_total_s", total_s)
    touched = rank.call("touch")
    if not touched["same"]:
        raise SpikeError(f"{name}: host memory differs")
    rank.kill()


def one_size(report: Report, label: str, ballast_gib: int) -> Path:
    """Dump one size and restore it from every store; returns the tmpfs image."""
    rank = Rank("plain_rank.py", label, 0).wait_ready()
    rank.call("warm", ballast_bytes=ballast_gib * GIB, timeout_s=120)
    folder = checkpoints.fresh_folder("/dev/shm")
    image, timings = checkpoints.to_image(rank, folder)
    for key, value in timings.items():
        report.metric(f"{label}_{key}", value)
    back(report, rank, image, f"{label}_tmpfs_first")
    back(report, rank, image, f"{label}_tmpfs")
    on_disk = checkpoints.fresh_folder(DISK) / image.name
    shutil.copytree(image, on_disk)
    drop_cache()
    back(report, rank, on_disk, f"{label}_disk_cold")
    back(report, rank, on_disk, f"{label}_disk_cached")
    shutil.rmtree(on_disk.parent)
    if label == "3g":
        report.attempt("lazy", lazy, rank, image)
    return image


def lazy(report: Report, rank: Rank, image: Path) -> None:
    """Restore with pages served on demand, then let the driver and the process touch them."""
    command = [
        checkpoints.CRIU,
        "lazy-pages",
        "-D",
        str(image),
        "-W",
        str(image),
        "-o",
        "lazy.log",
        "-v2",
    ]
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        path = image / "lazy-pages.socket"
        wait_until(lambda: path.exists() or server.poll() is not None, 10, "lazy-pages server")
        begin = time.perf_counter()
        criu_s = checkpoints.restore(rank, image, 60, "-W", str(image), "--lazy-pages")
        report.metric("lazy_criu_s", criu_s)
        report.note("lazy_cuda", checkpoints.cuda_in(rank.pid))
        answer = rank.call("step")
        report.metric("lazy_to_first_step_s", time.perf_counter() - begin)
        touched = rank.call("touch", timeout_s=90)
        report.metric("lazy_all_pages_s", time.perf_counter() - begin)
        report.note("lazy_result", {"step": answer, **touched})
        if answer != WANTED or not touched["same"]:
            raise SpikeError(f"lazy pages: {answer} {touched}")
    finally:
        log = image / "lazy.log"
        report.note("lazy_log", log.read_text(errors="replace")[-500:] if log.exists() else "none")
        rank.kill()
        server.kill()
        server.wait(10)


def body(report: Report) -> None:
    """Small to large."""
    for label, ballast_gib in BALLAST_GIB.items():
        report.attempt(f"size_{label}", one_size, label, ballast_gib)


if __name__ == "__main__":
    run_spike("restore_size", body, kill_all)
