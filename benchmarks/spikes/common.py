"""What every spike shares: timing, results with provenance, GPU readings, a deadline."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
NVLINK_TX_KIB, NVLINK_RX_KIB = 138, 139  # NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_{TX,RX}, in KiB
ALL_LINKS = 0xFFFFFFFF
PACKAGES = ("torch", "nixl-cu13", "nvidia-nccl-cu13", "cuda-bindings")


class SpikeError(RuntimeError):
    """An experiment could not go on; the message says at which step."""


class OutOfTime(RuntimeError):
    """The whole spike is over; unlike a SpikeError it ends every part."""


def timed(call: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[float, Any]:
    """Run `call` and return (seconds, its value)."""
    begin = time.perf_counter()
    value = call(*args, **kwargs)
    return time.perf_counter() - begin, value


def wait_until(condition: Callable[[], bool], timeout_s: float, step: str) -> None:
    """Poll `condition` every 2 ms; raise SpikeError naming `step` when the deadline passes."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise SpikeError(f"{step}: not done after {timeout_s} s")
        time.sleep(0.002)


@dataclass
class Report:
    """Numbers under flat names, and everything else under `detail`."""

    name: str
    metrics: dict[str, float] = field(default_factory=dict)
    detail: dict[str, Any] = field(default_factory=dict)

    def metric(self, name: str, value: float | None) -> None:
        """Keep one number; a missing one is left out rather than written as zero."""
        if value is not None:
            self.metrics[name] = round(float(value), 6)

    def note(self, name: str, value: Any) -> None:
        """Keep a finding that is not one number, and show it at once."""
        self.detail[name] = value
        print(f"[{self.name}] {name}: {json.dumps(value, default=str)[:900]}", flush=True)

    def attempt(self, name: str, step: Callable[..., Any], *args: Any) -> bool:
        """Run a part of a spike whose failure is an answer too; the later parts still run."""
        try:
            step(self, *args)
        except (SpikeError, OSError, ValueError, LookupError) as error:
            self.note(f"{name}_failed", f"{type(error).__name__}: {error}"[:1500])
            self.metric(f"{name}_ok", 0)
            return False
        self.metric(f"{name}_ok", 1)
        return True

    def write(self, folder: Path) -> Path:
        """Write the result file."""
        today = os.environ.get("SPIKE_DATE") or datetime.date.today().isoformat()
        path = folder / f"spike_{self.name}-{today}.json"
        record = {
            "benchmark": f"spike_{self.name}",
            "date": today,
            "commit": commit(),
            "command": " ".join(
                ["python3", f"benchmarks/spikes/{Path(sys.argv[0]).name}", *sys.argv[1:]]
            ),
            "hardware": hardware(),
            "versions": versions(),
            "metrics": self.metrics,
            "detail": self.detail,
        }
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1, default=str) + "\n")
        return path


def commit() -> str:
    """The scripts' commit; SPIKE_COMMIT names it where the tree travels without git."""
    if named := os.environ.get("SPIKE_COMMIT"):
        return named
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def hardware() -> dict[str, object]:
    """Every GPU with memory and driver, and the host's cores."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(
            query, capture_output=True, text=True, check=False
        ).stdout.splitlines()
    except OSError:
        lines = []
    return {"cores": os.cpu_count() or 1, "gpus": lines}


def versions() -> dict[str, str]:
    """Package and kernel versions that a result depends on."""
    found = {"python": platform.python_version(), "kernel": platform.release()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


class GpuReadings:
    """NVML from outside the ranks: memory in use, and the bytes that really crossed NVLink."""

    def __init__(self) -> None:
        import pynvml

        self._nvml = pynvml
        pynvml.nvmlInit()
        self.count: int = pynvml.nvmlDeviceGetCount()
        self._handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(self.count)]

    def used_bytes(self, gpu: int) -> int:
        """Memory in use on the GPU, by any process."""
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handles[gpu]).used)

    def nvlink_bytes(self, gpu: int) -> int | None:
        """Payload bytes over all NVLinks so far, both ways; None where it is not readable."""
        total = 0
        for counter in (NVLINK_TX_KIB, NVLINK_RX_KIB):
            value = self._nvml.nvmlDeviceGetFieldValues(self._handles[gpu], [(counter, ALL_LINKS)])[
                0
            ]
            if value.nvmlReturn != 0:
                return None
            total += int(value.value.ullVal) * 1024
        return total

    def nvlink_during(self, gpu: int, call: Callable[[], Any]) -> tuple[int | None, Any]:
        """Run `call` and return (bytes over NVLink meanwhile, its value)."""
        before = self.nvlink_bytes(gpu)
        value = call()
        after = self.nvlink_bytes(gpu)
        return (None if before is None or after is None else after - before), value


def _out_of_time(signum: int, frame: FrameType | None) -> None:
    raise OutOfTime("the spike's own deadline passed")


def run_spike(name: str, body: Callable[[Report], None], cleanup: Callable[[], None]) -> None:
    """Run one spike under its deadline and write its result whatever happens."""
    parser = argparse.ArgumentParser(description=f"GPU spike: {name}")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "benchmarks" / "results")
    parser.add_argument("--timeout-s", type=int, default=420)
    options = parser.parse_args()
    report = Report(name)
    signal.signal(signal.SIGALRM, _out_of_time)
    signal.alarm(options.timeout_s)
    begin = time.monotonic()
    try:
        body(report)
        report.metric("completed", 1)
    except (RuntimeError, OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        report.metric("completed", 0)
        report.note("stopped_by", f"{type(error).__name__}: {error}"[:2000])
        traceback.print_exc()
    finally:
        signal.alarm(0)
        cleanup()
        report.metric("wall_s", time.monotonic() - begin)
        print(json.dumps(report.metrics))
        print("wrote", report.write(options.out), flush=True)
