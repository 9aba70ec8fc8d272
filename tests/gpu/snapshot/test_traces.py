"""What our rules take for granted of a process with CUDA, as it shows from outside, on its GPU and
off it. Where a driver differs, these tests say how."""

from __future__ import annotations

import pytest

from dynamo_elastic.snapshot.cuda_findings import MANAGED_LIMIT_BYTES, cuda_findings
from dynamo_elastic.snapshot.cuda_process import Cuda
from dynamo_elastic.snapshot.inspect_process import Allowed, quiescence_findings
from dynamo_elastic.snapshot.nvml import Nvml
from dynamo_elastic.snapshot.park import park, unpark
from dynamo_elastic.snapshot.process import PROC
from dynamo_elastic.testing.cuda_victim import MEMORY_BYTES, CudaVictim
from dynamo_elastic.testing.snapshot_world import CLEAN

pytestmark = pytest.mark.gpu(1)

TIMEOUT_S = 30.0
STANDARD = tuple(f"descriptor {fd} (" for fd in range(3))
"""Of a victim, these lead to the test."""


def unexpected(victim: CudaVictim, *, gpu: bool) -> list[str]:
    """What an image could not hold of it."""
    findings = quiescence_findings(victim.process, Allowed((), lambda _: True, gpu=gpu))
    return [finding for finding in findings if not finding.startswith(STANDARD)]


def test_on_its_gpu_it_has_the_driver_open_and_nothing_else_that_matters() -> None:
    with CudaVictim() as victim:
        assert list(cuda_findings(victim.pid)) == []
        assert unexpected(victim, gpu=True) == []
        assert unexpected(victim, gpu=False) != []


def test_off_its_gpu_nothing_of_the_driver_is_open_or_mapped() -> None:
    driver, inventory = Cuda.open(), Nvml.open()
    with CudaVictim() as victim:
        before = inventory.used_bytes(victim.pid)
        assert before is not None
        assert before > MEMORY_BYTES
        parked = park(victim.process, driver, inventory, engine=CLEAN, timeout_s=TIMEOUT_S)
        assert parked.gpu_bytes == 0
        assert parked.host_bytes > MEMORY_BYTES
        assert unexpected(victim, gpu=False) == []
        unpark(parked, driver, inventory, timeout_s=TIMEOUT_S)
        assert victim.ask("check") == "right"
        assert unexpected(victim, gpu=True) == []


@pytest.mark.parametrize("size_bytes", [2 * MANAGED_LIMIT_BYTES, 1 << 30])
def test_managed_memory_shows_in_its_mappings(size_bytes: int) -> None:
    with CudaVictim() as victim:
        assert victim.ask("manage", str(size_bytes)) == "managed"
        maps = (PROC / str(victim.pid) / "maps").read_text().splitlines()
        uvm = [line for line in maps if "/dev/nvidia" in line]
        findings = list(cuda_findings(victim.pid))
        assert any("managed memory" in finding for finding in findings), uvm
