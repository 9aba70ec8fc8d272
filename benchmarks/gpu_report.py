"""What the GPU benchmarks share: a deadline, readings, a result that is written in any case."""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from provenance import write_result

from dynamo_elastic.errors import ElasticError
from dynamo_elastic.snapshot.base import GpuInventory
from dynamo_elastic.snapshot.gpu import NoGpu
from dynamo_elastic.snapshot.nvml import Nvml

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
    """Numbers under flat names, everything else under `detail`. Written also if the run fails."""

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
        print(f"{self.name}: {name} {self.metrics[name]:g}", flush=True)

    def median(self, name: str, values: Sequence[float]) -> None:
        """The median under its name, all values in the detail."""
        self.detail[name] = [round(value, 4) for value in values]
        self.metric(name, statistics.median(values))

    def note(self, name: str, value: Any) -> None:
        self.detail[name] = value
        print(f"{self.name}: {name} {json.dumps(value, default=str)[:1500]}", flush=True)


def run(name: str, body: Callable[[Report], Awaitable[None]], *, deadline_s: float) -> None:
    """Run `body` within its deadline, write the result, exit with 1 if it did not end well."""
    report = Report(name)

    async def bounded() -> None:
        async with asyncio.timeout(deadline_s):
            await body(report)

    began_s = time.monotonic()
    try:
        asyncio.run(bounded())
        report.metric("completed", not report.failed)
    except (ElasticError, OSError, TimeoutError, ValueError, LookupError) as exc:
        report.metric("completed", 0)
        report.note("stopped_by", f"{type(exc).__name__}: {exc}")
    finally:
        report.metric("wall_s", time.monotonic() - began_s)
        print("wrote", write_result(name, report.metrics, report.detail))
    sys.exit(0 if report.metrics["completed"] else 1)


def inventory(device: str) -> GpuInventory:
    """NVML, or nothing for a trial without a GPU."""
    return Nvml.open() if device == "cuda" else NoGpu()
