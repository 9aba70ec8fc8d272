"""`python -m dynamo_elastic.testing.gpu_meter`: answers every line with the memory in use on each
GPU, in MiB. For a process that must not use NVML itself, because it forks; and the GPUs stay
initialised for as long as it runs, without which every start of a process costs a second more."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable

from dynamo_elastic.snapshot.base import GpuInventory
from dynamo_elastic.snapshot.nvml import Nvml

_DRIVER_MIB = 64
_POLL_S = 0.05


def used_bytes(inventory: GpuInventory) -> int:
    """Memory in use on all GPUs of the host, by anybody."""
    return sum(gpu.total_bytes - gpu.free_bytes for gpu in inventory.gpus())


class Meter:
    """A meter in a process of its own; close it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dynamo_elastic.testing.gpu_meter"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def used_mib(self) -> list[int]:
        """Of each GPU of this host, by whomever."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the meter has no pipes")
        self._process.stdin.write("\n")
        return [int(word) for word in self._process.stdout.readline().split()]

    def close(self) -> None:
        """Idempotent."""
        self._process.kill()
        self._process.communicate()


async def not_freed(used_mib: Callable[[], int], before_mib: int, *, within_s: float = 5.0) -> str:
    """What a GPU holds more than before, when the processes of a run had time to let go of it; ''
    if it is no more than a driver's own."""
    deadline_s = time.monotonic() + within_s
    while (used := used_mib()) > before_mib + _DRIVER_MIB:
        if time.monotonic() > deadline_s:
            return f"{used - before_mib} MiB are left on the GPU"
        await asyncio.sleep(_POLL_S)
    return ""


def main() -> None:
    """Answer until the other end is closed."""
    inventory = Nvml.open()
    for _ in sys.stdin:
        used = (gpu.total_bytes - gpu.free_bytes for gpu in inventory.gpus())
        sys.stdout.write(" ".join(str(size >> 20) for size in used) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
