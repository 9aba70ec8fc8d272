"""CUDA checkpoint and CRIU calls, as plain functions over a pid."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from common import SpikeError, timed, wait_until
from cuda.bindings import driver
from rank_process import Rank

CRIU = os.environ.get("SPIKE_CRIU", "/opt/dynamo-elastic/criu/bin/criu")
DUMP_FLAGS = ("--file-locks", "--ext-unix-sk", "--link-remap", "--tcp-close")
RESTORE_FLAGS = ("--file-locks", "--tcp-close")
LOCK_TIMEOUT_MS = 20_000


def check(result: tuple[Any, ...], call: str = "call") -> Any:
    """Unpack a driver call's answer, or raise SpikeError with the driver's code."""
    if result[0] != driver.CUresult.CUDA_SUCCESS:
        raise SpikeError(f"driver {call}: {result[0].name}")
    values = result[1:]
    return values[0] if len(values) == 1 else (values or None)


def gpu_uuids() -> list[Any]:
    """Uuids of all GPUs the driver shows, in CUDA order."""
    check(driver.cuInit(0))
    count = check(driver.cuDeviceGetCount())
    return [
        check(driver.cuDeviceGetUuid(check(driver.cuDeviceGet(index)))) for index in range(count)
    ]


def swapped(first: int, second: int) -> list[Any]:
    """A full permutation of the host's GPUs that swaps two: a partial map is refused."""
    uuids = gpu_uuids()
    targets = list(uuids)
    targets[first], targets[second] = targets[second], targets[first]
    pairs = []
    for old, new in zip(uuids, targets, strict=True):
        pair = driver.CUcheckpointGpuPair()
        pair.oldUuid, pair.newUuid = old, new
        pairs.append(pair)
    return pairs


def cuda_out(pid: int) -> dict[str, float]:
    """Lock and checkpoint; the process then holds no GPU."""
    check(driver.cuInit(0))
    args = driver.CUcheckpointLockArgs()
    args.timeoutMs = LOCK_TIMEOUT_MS
    lock_s, result = timed(driver.cuCheckpointProcessLock, pid, args)
    check(result, "lock")
    empty = driver.CUcheckpointCheckpointArgs()
    checkpoint_s, result = timed(driver.cuCheckpointProcessCheckpoint, pid, empty)
    check(result, "checkpoint")
    return {"lock_s": lock_s, "checkpoint_s": checkpoint_s}


def cuda_in(pid: int, gpu_pairs: list[Any] | None = None) -> dict[str, float]:
    """Restore and unlock."""
    check(driver.cuInit(0))
    args = driver.CUcheckpointRestoreArgs()
    if gpu_pairs:
        args.gpuPairs = gpu_pairs
    restore_s, result = timed(driver.cuCheckpointProcessRestore, pid, args)
    check(result, "restore")
    return {"restore_s": restore_s, "unlock_s": unlock(pid)}


def unlock(pid: int) -> float:
    """Let a locked process use CUDA again."""
    seconds, result = timed(driver.cuCheckpointProcessUnlock, pid, driver.CUcheckpointUnlockArgs())
    check(result, "unlock")
    return float(seconds)


def cuda_state(pid: int) -> str:
    """What the driver says about the process."""
    return str(check(driver.cuCheckpointProcessGetState(pid), "get state"))


def _run_criu(arguments: list[str], log: Path, timeout_s: float) -> float:
    begin = time.perf_counter()
    done = subprocess.run(
        [CRIU, *arguments], capture_output=True, text=True, timeout=timeout_s, check=False
    )
    if done.returncode:
        text = _text(log).splitlines()
        worst = [line for line in text if "Error" in line or "Warn" in line][-8:]
        raise SpikeError(f"criu {arguments[0]} rc {done.returncode}: {done.stderr[-200:]} {worst}")
    return time.perf_counter() - begin


def dump(rank: Rank, folder: Path, timeout_s: float = 120) -> tuple[Path, dict[str, float]]:
    """Write the CRIU image of a rank that is CUDA-checkpointed already; the rank ends with it."""
    image = Path(tempfile.mkdtemp(prefix=f"image-{rank.tag}-", dir=folder))
    rank.mark()
    arguments = [
        "dump",
        "-t",
        str(rank.pid),
        "-D",
        str(image),
        "-o",
        "dump.log",
        "-v2",
        *DUMP_FLAGS,
    ]
    dump_s = _run_criu(arguments, image / "dump.log", timeout_s)
    if rank.process is not None:
        rank.process.wait(30)  # a zombie would hold the pid
    return image, {"dump_s": dump_s, "image_bytes": image_bytes(image)}


def image_bytes(image: Path) -> int:
    """Size of the image's files."""
    return sum(path.stat().st_size for path in image.iterdir() if path.is_file())


def restore(rank: Rank, image: Path, timeout_s: float = 120, *extra: str) -> float:
    """Bring a dumped rank back into this pid namespace; CUDA is still checkpointed afterwards."""
    arguments = ["restore", "-D", str(image), "-o", "restore.log", "-v2", "-d"]
    arguments += [*RESTORE_FLAGS, *extra]
    rank.rewind()
    return _run_criu(arguments, image / "restore.log", timeout_s)


def restore_in_namespace(rank: Rank, image: Path, timeout_s: float = 60) -> subprocess.Popen[bytes]:
    """Bring a dumped rank back into a pid namespace of its own.

    `rank.pid` becomes the pid seen from here; ending the returned process ends the rank.
    """
    inner_pid = rank.pid
    rank.rewind()
    log = image / "restore-ns.log"
    command = ["unshare", "--pid", "--fork", "--mount", "--mount-proc", "--kill-child"]
    command += [CRIU, "restore", "-D", str(image), "-o", log.name, "-v4", *RESTORE_FLAGS]
    quiet = subprocess.DEVNULL
    holder = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet)

    def ready() -> bool:
        return holder.poll() is not None or "Restore finished successfully" in _text(log)

    try:
        wait_until(ready, timeout_s, f"{rank.tag} restore in a namespace")
        found = [pid for pid in _pids() if _is_inner(pid, inner_pid)]
        if holder.poll() is not None or not found:
            raise SpikeError(f"{rank.tag} in a namespace: {_text(log)[-600:]}")
    except SpikeError:
        holder.kill()
        holder.wait(10)
        raise
    rank.pid = found[0]
    return holder


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _is_inner(pid: int, inner_pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    line = next((line for line in text.splitlines() if line.startswith("NSpid:")), "")
    return line.split()[1:] == [str(pid), str(inner_pid)]


def fresh_folder(root: str) -> Path:
    """An empty folder for images under `root`, which says which store is measured."""
    folder = Path(root) / "spike-images"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def to_image(rank: Rank, folder: Path) -> tuple[Path, dict[str, float]]:
    """Checkpoint, dump, and return (image folder, timings)."""
    timings = cuda_out(rank.pid)
    image, dumped = dump(rank, folder)
    return image, {**timings, **dumped}


def from_image(rank: Rank, image: Path) -> dict[str, float]:
    """Restore with CRIU, then CUDA."""
    criu_s = restore(rank, image)
    return {"criu_restore_s": criu_s, **cuda_in(rank.pid)}
