"""What a process must not hold when it leaves its GPU, because it would not come back.

Seen from outside: environment, threads, descriptors, mappings. What can't be seen there its engine
has to say itself, in section `cuda` of the file that says it is ready.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dynamo_elastic.errors import NotQuiescent
from dynamo_elastic.snapshot.process import PROC, ProcessRef

REPORT = "cuda"
"""In the engine's own report: how much it holds of each of REPORTED, 0 of all when it is ready."""

REPORTED: Mapping[str, str] = {
    "multicast": "multicast objects: the driver hangs in its checkpoint",
    "ipc_imports": "memory imported from other processes: it could never be restored",
    "managed_bytes": "bytes of managed memory: the driver can't checkpoint it",
}

IPC_CACHE = "UCX_CUDA_IPC_CACHE"
_OFF = frozenset({"n", "no", "off", "0"})

MANAGED_LIMIT_BYTES = 8 << 20
"""A process without managed memory maps 2 MiB of /dev/nvidia-uvm, and one with it as much more as
it has (docs/findings.md, 11; one GPU, driver 580). The rest is room for other drivers."""

_LIBRARIES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"^(NCCL|pt_nccl)"), "NCCL"),
    (re.compile(r"^async$"), "UCX (a NIXL agent or Buffer)"),
)
"""Names of threads, and whose they are."""

_TRACES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"^/dev/shm/nccl-"), "NCCL is alive: destroy its communicators first"),
    (re.compile(r"^/dev/shm/ucx_shm_"), "UCX is alive: destroy NIXL agents and Buffers first"),
    (re.compile(r"^/dev/nvidia-caps-imex-channels/"), "fabric memory can't be checkpointed"),
    (re.compile(r"^/dev/infiniband/"), "RDMA registrations can't be checkpointed"),
    (re.compile(r"^/dev/gdrdrv"), "GDRCopy mappings can't be checkpointed"),
)
"""Files, open or mapped, and what they tell."""

_DRIVER_DEVICE = re.compile(r"^/dev/nvidia(\d+|ctl|-)")
_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ \S+\s*(.*)$", re.MULTILINE)


def is_driver_device(path: str) -> bool:
    """True of devices that every CUDA process has open while it is on its GPU."""
    return _DRIVER_DEVICE.match(path) is not None


def check_parkable(processes: Sequence[ProcessRef], engine: Mapping[str, Any]) -> None:
    """Return if all of them, which hold CUDA, may leave their GPU. Raises NotQuiescent with every
    finding. `engine`: what it says of itself."""
    findings = tuple(holder_findings(processes, engine))
    if findings:
        raise NotQuiescent(findings)


def holder_findings(processes: Sequence[ProcessRef], engine: Mapping[str, Any]) -> Iterator[str]:
    """All that is in the way of those processes, which hold CUDA; nothing if there are none."""
    for process in processes:
        yield from cuda_findings(process.pid)
    if processes:
        yield from report_findings(engine)


def cuda_findings(pid: int) -> Iterator[str]:
    """All that can be seen from outside of a process that holds CUDA."""
    directory = PROC / str(pid)
    names = list(thread_names(directory / "task"))
    maps = (directory / "maps").read_text()
    files = set(open_files(directory / "fd"))
    files |= {match[4] for match in _MAPPING.finditer(maps)}
    yield from ipc_cache_findings((directory / "environ").read_bytes())
    yield from library_findings(names)
    yield from trace_findings(files)
    yield from managed_findings(maps)


def thread_names(tasks: Path) -> Iterator[str]:
    """Of the threads; one that ends meanwhile is none."""
    for task in tasks.iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            yield (task / "comm").read_text().strip()


def open_files(descriptors: Path) -> Iterator[str]:
    """What is open; a descriptor that is closed meanwhile is not."""
    for descriptor in descriptors.iterdir():
        with suppress(FileNotFoundError):
            yield os.readlink(descriptor)


def ipc_cache_findings(environ: bytes) -> Iterator[str]:
    """UCX keeps imports open in a cache of its own, unless told at its start."""
    prefix = f"{IPC_CACHE}=".encode()
    values = [item.removeprefix(prefix) for item in environ.split(b"\0") if item.startswith(prefix)]
    if not values or values[-1].decode(errors="replace").lower() not in _OFF:
        yield f"environment variable {IPC_CACHE} is not 'n': start the engine with {IPC_CACHE}=n"


def library_findings(thread_names: Collection[str]) -> Iterator[str]:
    """Communication libraries that are alive, by their threads."""
    for pattern, library in _LIBRARIES:
        count = sum(pattern.match(name) is not None for name in thread_names)
        if count:
            yield f"{library} is alive ({count} of its threads): destroy it first"


def trace_findings(files: Collection[str]) -> Iterator[str]:
    """Open or mapped files that tell of something that does not come back."""
    for path in sorted(files):
        for pattern, meaning in _TRACES:
            if pattern.match(path):
                yield f"{path}: {meaning}"


def managed_findings(maps: str) -> Iterator[str]:
    """Managed memory, which is mapped from /dev/nvidia-uvm; a little of that every process has."""
    size = sum(
        int(match[2], 16) - int(match[1], 16)
        for match in _MAPPING.finditer(maps)
        if match[4] == "/dev/nvidia-uvm" and "w" in match[3]
    )
    if size > MANAGED_LIMIT_BYTES:
        yield f"{size} bytes of /dev/nvidia-uvm are mapped: managed memory can't be checkpointed"


def report_findings(engine: Mapping[str, Any]) -> Iterator[str]:
    """What the engine says of itself that is in the way, or does not say at all."""
    report = engine.get(REPORT)
    if not isinstance(report, dict):
        yield f"the engine does not say what it holds: write {REPORT!r} into its ready file"
        return
    for name, meaning in REPORTED.items():
        value = report.get(name)
        if not isinstance(value, int):
            yield f"the engine does not say {REPORT}.{name} in its ready file"
        elif value:
            yield f"{value} {meaning}"
