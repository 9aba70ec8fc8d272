"""NVML's adapter over a made-up pynvml, and where a process really is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dynamo_elastic.errors import GpuMemoryShort, ResourceMissing
from dynamo_elastic.snapshot.base import CudaOperation
from dynamo_elastic.snapshot.gpu import (
    NO_GPU,
    check_free,
    devices_of_all,
    open_gpu,
    true_devices,
)
from dynamo_elastic.snapshot.nvml import Nvml
from dynamo_elastic.snapshot.process import ProcessRef
from dynamo_elastic.testing.cuda import GIB, FakeGpuHost, fake_gpus


@dataclass
class Process:
    pid: int
    usedGpuMemory: int | None


@dataclass
class Memory:
    total: int
    free: int


@dataclass
class Pci:
    busId: str


@dataclass
class Module:
    """pynvml with two GPUs. `processes`: by index of the GPU."""

    processes: dict[int, Sequence[Process]] = field(default_factory=dict)
    broken: str = ""

    class NVMLError(Exception):
        pass

    def nvmlInit(self) -> None:
        if self.broken == "init":
            raise self.NVMLError("Driver Not Loaded")

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.159.04"

    def nvmlDeviceGetCount(self) -> int:
        if self.broken == "count":
            raise self.NVMLError("GPU is lost")
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA H200"

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return 9, 0

    def nvmlDeviceGetPciInfo(self, handle: int) -> Pci:
        return Pci(f"00000000:{handle}B:00.0")

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Memory:
        return Memory(total=141 * GIB, free=140 * GIB)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> Sequence[Process]:
        return self.processes.get(handle, ())


def test_gpus_are_told_in_the_drivers_order() -> None:
    first, second = Nvml.open(Module()).gpus()
    assert (first.uuid, first.index, second.uuid, second.index) == ("GPU-0", 0, "GPU-1", 1)
    assert (first.name, first.compute_capability) == ("NVIDIA H200", "9.0")
    assert (first.pci_bus_id, first.driver_version) == ("00000000:0B:00.0", "580.159.04")
    assert (first.total_bytes, first.free_bytes) == (141 * GIB, 140 * GIB)


def test_memory_of_a_process_over_all_gpus() -> None:
    nvml = Nvml(Module({0: [Process(7, 5), Process(8, 1)], 1: [Process(7, 6)]}))
    assert nvml.used_bytes(7) == 11
    assert nvml.devices_of(7) == {"GPU-0": 5, "GPU-1": 6}


def test_what_nvml_does_not_tell_is_unknown_not_zero() -> None:
    nvml = Nvml(Module({1: [Process(7, None)]}))
    assert nvml.used_bytes(7) is None
    assert nvml.devices_of(7) == {"GPU-1": None}
    assert nvml.used_bytes(9) is None
    assert nvml.devices_of(9) == {}
    assert devices_of_all(nvml, [ProcessRef(7, 1), ProcessRef(9, 1)]) == {}


@pytest.mark.parametrize("broken", ["init", "count"])
def test_a_driver_that_is_gone_is_a_missing_resource(broken: str) -> None:
    with pytest.raises(ResourceMissing, match="nvidia-smi"):
        Nvml.open(Module(broken=broken)).gpus()


def test_true_device_of_a_process_that_was_moved() -> None:
    host = FakeGpuHost(fake_gpus(2))
    first, second = host.gpus()
    host.start(7, gpu=0)
    assert [gpu.pci_bus_id for gpu in true_devices(host, 7)] == [first.pci_bus_id]
    host.lock(7, timeout_s=1)
    host.checkpoint(7, timeout_s=1)
    assert true_devices(host, 7) == ()
    swapped = {first.uuid: second.uuid, second.uuid: first.uuid}
    host.restore(7, gpu_map=swapped, timeout_s=1)
    host.unlock(7, timeout_s=1)
    assert [gpu.pci_bus_id for gpu in true_devices(host, 7)] == [second.pci_bus_id]
    assert true_devices(FakeGpuHost(lists_processes=False), 7) == ()


def test_free_memory_is_checked_by_gpu() -> None:
    host = FakeGpuHost(fake_gpus(2, total_bytes=10 * GIB))
    first, second = (gpu.uuid for gpu in host.gpus())
    host.start(7, used_bytes=8 * GIB, gpu=1)
    check_free(host, {})
    check_free(host, {first: 10 * GIB, second: 2 * GIB})
    with pytest.raises(GpuMemoryShort) as caught:
        check_free(host, {first: 1, second: 3 * GIB})
    error = caught.value
    assert (error.uuid, error.needed_bytes, error.free_bytes) == (second, 3 * GIB, 2 * GIB)
    with pytest.raises(ResourceMissing, match="GPU-x"):
        check_free(host, {"GPU-x": 1})


def test_host_without_a_gpu(tmp_path: Path) -> None:
    gpu = open_gpu(tmp_path / "nvidiactl")
    assert gpu is NO_GPU
    assert not gpu.driver.holds_cuda(1)
    assert not gpu.driver.capabilities().checkpoint
    assert gpu.inventory.gpus() == ()
    assert gpu.inventory.used_bytes(1) is None
    assert gpu.inventory.devices_of(1) == {}
    calls: list[Any] = [getattr(gpu.driver, operation) for operation in CudaOperation]
    for call in calls:
        with pytest.raises(ResourceMissing, match="no GPU"):
            call(1, timeout_s=1)
    with pytest.raises(ResourceMissing, match="no GPU"):
        gpu.driver.state(1)
