"""What the GPU benchmarks share: a deadline, readings, a result that is written in any case."""

from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import shutil
import signal
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from provenance import write_result

from dynamo_elastic.errors import ElasticError
from dynamo_elastic.snapshot.base import GpuInventory
from dynamo_elastic.snapshot.gpu import NoGpu
from dynamo_elastic.snapshot.nvml import Nvml
from dynamo_elastic.snapshot.process import children_of, kill_tree

_GRACE_S = 25.0
"""For what the deadline cancelled to put its things away."""

SMALL = {
    "device": "cpu",
    "weights_bytes": 100_000_000,
    "state_bytes": 50_000_000,
    "host_bytes": 400_000_000,
    "graphs": 3,
}
"""An engine without a GPU, to try a benchmark out: its numbers mean nothing."""


@dataclass
class Report:
    """Numbers under flat names, everything else under `detail`. Written also if the run fails, and
    as far as it has come to the folder that OUT names, should it be killed."""

    name: str
    metrics: dict[str, float] = field(default_factory=dict)
    detail: dict[str, Any] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    """Parts that failed while the others went on."""

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part whose failure is a result too: it is noted, and the next parts run."""
        try:
            yield
        except ElasticError as exc:
            self.failed.append(name)
            self.note(f"{name}_failed", f"{type(exc).__name__}: {exc}")

    def metric(self, name: str, value: float) -> None:
        self.metrics[name] = round(value, 4)
        self._said(name, f"{self.metrics[name]:g}")

    def median(self, name: str, values: Sequence[float]) -> None:
        """The median under its name, all values in the detail."""
        self.detail[name] = [round(value, 4) for value in values]
        self.metric(name, statistics.median(values))

    def note(self, name: str, value: Any) -> None:
        self.detail[name] = value
        self._said(name, json.dumps(value, default=str)[:1500])

    def _said(self, name: str, text: str) -> None:
        print(f"{self.name}: {name} {text}", flush=True)
        if folder := os.environ.get("OUT"):
            so_far = {"metrics": self.metrics, "detail": self.detail}
            Path(folder, f"{self.name}.partial.json").write_text(json.dumps(so_far, default=str))

    def write(self) -> None:
        """The result, also to the folder that OUT names."""
        path = write_result(self.name, self.metrics, self.detail)
        if folder := os.environ.get("OUT"):
            shutil.copy(path, folder)
        print("wrote", path, flush=True)


def run(name: str, body: Callable[[Report], Awaitable[None]], *, deadline_s: float) -> None:
    """Run `body` within its deadline, write the result, exit with 1 if it did not end well. What
    does not end even then is killed, with all that it started."""
    report = Report(name)

    async def bounded() -> None:
        task = asyncio.current_task()
        if task is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        async with asyncio.timeout(deadline_s):
            await body(report)

    began_s = time.monotonic()
    with _last_resort(report, deadline_s + _GRACE_S):
        try:
            asyncio.run(bounded())
            report.metric("completed", not report.failed)
        except (Exception, asyncio.CancelledError) as exc:  # noqa: BLE001 - any end is a result
            traceback.print_exc()
            report.metric("completed", 0)
            report.note("stopped_by", f"{type(exc).__name__}: {exc}"[:3000])
        report.metric("wall_s", time.monotonic() - began_s)
        report.write()
    sys.exit(0 if report.metrics["completed"] else 1)


@contextmanager
def _last_resort(report: Report, after_s: float) -> Iterator[None]:
    """After so long this process ends, whatever it waits for: driver calls don't end by asking."""

    def end() -> None:
        faulthandler.dump_traceback(all_threads=True)
        report.metric("completed", 0)
        report.note("stopped_by", f"killed after {after_s:g} s")
        report.write()
        for child in children_of(os.getpid()):
            with suppress(ElasticError):
                kill_tree(child, timeout_s=5.0)
        os._exit(1)

    timer = threading.Timer(after_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def inventory(device: str) -> GpuInventory:
    """NVML, or nothing for a trial without a GPU."""
    return Nvml.open() if device == "cuda" else NoGpu()
