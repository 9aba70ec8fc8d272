"""`python -m dynamo_elastic.testing.gpu_meter`: answers every line with the memory in use on each
GPU, in MiB. For a process that must not use NVML itself, because it forks; and the GPUs stay
initialised for as long as it runs, without which every start of a process costs a second more."""

from __future__ import annotations

import subprocess
import sys

from dynamo_elastic.snapshot.base import GpuInventory
from dynamo_elastic.snapshot.nvml import Nvml


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


def main() -> None:
    """Answer until the other end is closed."""
    inventory = Nvml.open()
    for _ in sys.stdin:
        used = (gpu.total_bytes - gpu.free_bytes for gpu in inventory.gpus())
        sys.stdout.write(" ".join(str(size >> 20) for size in used) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
