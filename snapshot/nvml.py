"""NVML behind the GpuInventory seam: the only importer of pynvml. What it says of a process is true
where the process itself is wrong: restored on another GPU, it still reports the old one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pynvml

from dynamo_elastic.errors import ResourceMissing
from dynamo_elastic.snapshot.base import GpuInfo

_REMEDY = "load the NVIDIA driver (nvidia-smi must work), or run without GPUs"


@dataclass(frozen=True, slots=True)
class GpuModes:
    """Settings of a GPU that snapshots depend on."""

    persistence: bool
    """The driver stays loaded while nobody uses the GPU."""
    mig: bool
    """It is cut into parts: the driver checkpoints none of them."""


class Nvml:
    """The GPUs of this host as NVML sees them. Calls may run side by side."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml

    @classmethod
    def open(cls, nvml: Any = pynvml) -> Nvml:
        """Raises ResourceMissing: no library, no driver."""
        with _errors(nvml, "start"):
            nvml.nvmlInit()
        return cls(nvml)

    def gpus(self) -> tuple[GpuInfo, ...]:
        nvml = self._nvml
        with _errors(nvml, "list of GPUs"):
            driver = nvml.nvmlSystemGetDriverVersion()
            return tuple(self._info(index, handle, driver) for index, handle in self._handles())

    def modes(self) -> dict[str, GpuModes]:
        """Of every GPU, by uuid."""
        nvml = self._nvml
        found = {}
        with _errors(nvml, "modes of GPUs"):
            for _, handle in self._handles():
                try:
                    mig = nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE
                except nvml.NVMLError_NotSupported:
                    mig = False
                persistence = nvml.nvmlDeviceGetPersistenceMode(handle)
                uuid = nvml.nvmlDeviceGetUUID(handle)
                found[uuid] = GpuModes(persistence == nvml.NVML_FEATURE_ENABLED, mig)
        return found

    def used_bytes(self, pid: int) -> int | None:
        known = [size for size in self.devices_of(pid).values() if size is not None]
        return sum(known) if known else None

    def devices_of(self, pid: int) -> Mapping[str, int | None]:
        nvml = self._nvml
        found: dict[str, int | None] = {}
        with _errors(nvml, "list of processes"):
            for _, handle in self._handles():
                for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                    if process.pid == pid:
                        found[nvml.nvmlDeviceGetUUID(handle)] = process.usedGpuMemory
        return found

    def _handles(self) -> Iterator[tuple[int, Any]]:
        for index in range(self._nvml.nvmlDeviceGetCount()):
            yield index, self._nvml.nvmlDeviceGetHandleByIndex(index)

    def _info(self, index: int, handle: Any, driver_version: str) -> GpuInfo:
        nvml = self._nvml
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
        return GpuInfo(
            uuid=nvml.nvmlDeviceGetUUID(handle),
            index=index,
            name=nvml.nvmlDeviceGetName(handle),
            compute_capability=f"{major}.{minor}",
            pci_bus_id=nvml.nvmlDeviceGetPciInfo(handle).busId,
            driver_version=driver_version,
            total_bytes=int(memory.total),
            free_bytes=int(memory.free),
        )


@contextmanager
def _errors(nvml: Any, act: str) -> Iterator[None]:
    try:
        yield
    except nvml.NVMLError as exc:
        raise ResourceMissing(f"NVML: no {act} ({exc})", remedy=_REMEDY) from exc
