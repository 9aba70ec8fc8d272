"""A process of a given size restored from memory by CRIU alone and with our page server; no GPU.

Run as root: `python benchmarks/snapshot_fill.py`. Several copies at once show what restores of
different slots cost each other. Every copy's memory is compared with the original's.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from gpu_report import Report, run

from dynamo_elastic.errors import EngineGone, SnapshotError
from dynamo_elastic.snapshot.base import Command
from dynamo_elastic.snapshot.criu import Criu, find_criu
from dynamo_elastic.snapshot.namespace import PidNamespace, create_namespace
from dynamo_elastic.snapshot.process import ProcessRef, alive, kill_and_wait
from dynamo_elastic.testing.gpu_agent import work_area

DEADLINE_S = 230.0
PID = 1000
MEMORY = """
import mmap, os, signal, sys, time, xxhash
directory, size = sys.argv[1], int(sys.argv[2])
memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
block = os.urandom(1 << 26)
for start in range(0, size, len(block)):
    memory[start:start + len(block)] = block[:size - start]
    memory[start:start + 8] = start.to_bytes(8, "little")
def say(*_):
    path = directory + "/digest"
    with open(path + ".tmp", "w") as file:
        file.write(xxhash.xxh3_128(memory).hexdigest())
    os.rename(path + ".tmp", path)
signal.signal(signal.SIGUSR1, say)
say()
while True:
    time.sleep(0.02)
"""
"""Writes the digest of its memory into its directory, and again at SIGUSR1."""


class Copy:
    """A namespace in which the image is restored again and again; `shown` is its /control."""

    def __init__(self, shown: Path, image: Path, work: Path) -> None:
        self.shown, self.image, self.work = shown, image, work
        for path in (shown, work):
            path.mkdir()
        (shown / "log").touch(0o600)  # CRIU finds it by its name and mode
        self.namespace: PidNamespace = create_namespace({shown.parent / "control": shown})

    def restore(self, criu: Criu) -> ProcessRef:
        return criu.restore(self.image, self.namespace, work_dir=self.work, timeout_s=60)

    def digest(self, process: ProcessRef) -> str:
        """Of its memory now; it has ended then."""
        os.kill(process.pid, signal.SIGUSR1)
        said = wait_digest(self.shown, process)
        kill_and_wait(process, timeout_s=20)
        self.namespace.wait_reaped(PID, timeout_s=20)
        return said


def wait_digest(directory: Path, process: ProcessRef) -> str:
    path = directory / "digest"
    while not path.exists():
        if not alive(process):
            raise EngineGone(f"process {process.pid} ended: {(directory / 'log').read_text()}")
        time.sleep(0.01)
    said = path.read_text()
    path.unlink()
    return said


@contextmanager
def copies(area: Path, image: Path, count: int) -> Iterator[list[Copy]]:
    with ExitStack() as stack:
        made = []
        for number in range(count):
            copy = Copy(area / f"shown{number}", image, area / f"work{number}")
            stack.callback(copy.namespace.end, timeout_s=20)
            made.append(copy)
        yield made


def dump(criu: Criu, area: Path, size_bytes: int) -> tuple[Path, str]:
    """An image of a process of that size, and the digest of its memory."""
    control, shown, image = area / "control", area / "shown", area / "images" / "image"
    for path in (control, shown, image):
        path.mkdir()
    namespace = create_namespace({control: shown})
    try:
        argv = (sys.executable, "-c", MEMORY, str(control), str(size_bytes))
        process = namespace.spawn(Command(argv, dict(os.environ), control / "log"), pid=PID)
        digest = wait_digest(shown, process)
        criu.dump(process, image, namespace, timeout_s=60)
    finally:
        namespace.end(timeout_s=20)
    return image, digest


def compare(report: Report, *, size_bytes: int, repeats: int, at_once: int) -> None:
    version = Criu.find().version()
    criu = {
        name: Criu(find_criu(os.environ), version, page_server=name == "filled")
        for name in ("alone", "filled")
    }
    with work_area(size_bytes + (1 << 29)) as area:
        image, digest = dump(criu["alone"], area, size_bytes)
        report.metric("image_bytes", sum(path.stat().st_size for path in image.iterdir()))
        with copies(area, image, at_once) as made:
            for count in sorted({1, at_once}):
                seconds: dict[str, list[float]] = {name: [] for name in criu}
                for _ in range(repeats):
                    for name, which in criu.items():
                        seconds[name].append(together(which, made[:count], digest))
                        report.median(f"{name}_{count}_s", seconds[name])
    report.metric("speedup", report.metrics["alone_1_s"] / report.metrics["filled_1_s"])
    ratio = report.metrics[f"filled_{at_once}_s"] / report.metrics["filled_1_s"]
    report.metric("ratio_at_once", ratio)


def together(criu: Criu, made: list[Copy], digest: str) -> float:
    """Seconds until all run. Raises SnapshotError if the memory of one differs."""
    with ThreadPoolExecutor(len(made)) as threads:
        began_s = time.perf_counter()
        processes = list(threads.map(lambda copy: copy.restore(criu), made))
        elapsed_s = time.perf_counter() - began_s
        said = set(threads.map(Copy.digest, made, processes))
    if said != {digest}:
        raise SnapshotError("the memory of a restored process differs")
    return elapsed_s


async def measure(report: Report, *, size_bytes: int, repeats: int, at_once: int) -> None:
    await asyncio.to_thread(
        compare, report, size_bytes=size_bytes, repeats=repeats, at_once=at_once
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size-bytes", type=int, default=4_000_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--at-once", type=int, default=2, help="copies restored side by side")
    given = parser.parse_args()
    body = functools.partial(
        measure, size_bytes=given.size_bytes, repeats=given.repeats, at_once=given.at_once
    )
    run("snapshot_fill", body, deadline_s=DEADLINE_S)
