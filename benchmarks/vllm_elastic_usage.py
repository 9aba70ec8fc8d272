"""What the processes of a rank hold: memory, descriptors, threads, GPU memory; and what grew."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from dynamo_elastic.errors import ResourceMissing
from dynamo_elastic.snapshot.process import command, tree_of

KINDS = ("rss_bytes", "descriptors", "threads", "gpu_bytes")
_PROC = Path("/proc")


def usage(pid: int) -> dict[str, Any]:
    """Of the process tree of `pid`: sums by kind, and its processes. `gpu_bytes` only where NVML
    lists them."""
    processes = {}
    for each in sorted(tree_of(pid)):
        try:
            processes[each] = _of_process(each)
        except OSError:
            continue  # it ended meanwhile
    found: dict[str, Any] = {"processes": processes}
    for kind in KINDS:
        known = [p[kind] for p in processes.values() if kind in p]
        if known:
            found[kind] = sum(known)
    return found


def _of_process(pid: int) -> dict[str, Any]:
    status = (_PROC / str(pid) / "status").read_text()
    values = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    found = {
        "what": command(pid),
        "rss_bytes": 1024 * int(values.get("VmRSS", "0").split()[0]),
        "descriptors": len(list((_PROC / str(pid) / "fd").iterdir())),
        "threads": int(values["Threads"]),
    }
    nvml = _nvml()
    held = nvml.used_bytes(pid) if nvml is not None else None
    return found if held is None else found | {"gpu_bytes": held}


@cache
def _nvml() -> Any:
    try:
        from dynamo_elastic.snapshot.nvml import Nvml

        return Nvml.open()
    except (ImportError, ResourceMissing):
        return None


def slope(values: Sequence[float]) -> float:
    """Of the line through them by least squares, for each step.

    >>> slope([1.0, 3.0, 5.0])
    2.0
    """
    if len(values) < 2:
        return 0.0
    return statistics.linear_regression(range(len(values)), values).slope


def growth(values: Sequence[float]) -> float:
    """How much that line rises from the first to the last, as a share of the mean.

    >>> growth([100.0, 100.0, 100.0])
    0.0
    >>> round(growth([99.0, 100.0, 101.0]), 3)
    0.02
    """
    mean = statistics.fmean(values) if values else 0.0
    return slope(values) * (len(values) - 1) / mean if mean else 0.0


def growths(rounds: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The worst growth of each kind over `rounds` (rank -> usage), of any rank that is in all of
    them."""
    found: dict[str, float] = {}
    if not rounds:
        return found
    for rank in set.intersection(*(set(each) for each in rounds)):
        for kind in KINDS:
            values = [each[rank][kind] for each in rounds if kind in each[rank]]
            if len(values) == len(rounds):
                found[kind] = max(growth(values), found.get(kind, float("-inf")))
    return found
