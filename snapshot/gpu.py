"""The GPU side of this host, or that there is none; and which GPU a process really is on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from dynamo_elastic.errors import GpuMemoryShort, ResourceMissing
from dynamo_elastic.snapshot.base import (
    CudaCapabilities,
    CudaDriver,
    CudaState,
    GpuInfo,
    GpuInventory,
)
from dynamo_elastic.snapshot.process import ProcessRef

_CONTROL_DEVICE = Path("/dev/nvidiactl")
_REMEDY = "use a host with an NVIDIA GPU and driver"


@dataclass(frozen=True, slots=True)
class Gpu:
    """What snapshots need of the GPUs of this host."""

    driver: CudaDriver
    inventory: GpuInventory


class NoGpu:
    """CudaDriver and GpuInventory of a host without a GPU: no process holds CUDA."""

    def capabilities(self) -> CudaCapabilities:
        return CudaCapabilities(version=0, checkpoint=False, gpu_map=False, custom_storage=False)

    def holds_cuda(self, pid: int) -> bool:
        return False

    def state(self, pid: int) -> CudaState:
        self._refuse()

    def lock(self, pid: int, *, timeout_s: float) -> None:
        self._refuse()

    def checkpoint(self, pid: int, *, timeout_s: float) -> None:
        self._refuse()

    def restore(
        self, pid: int, *, gpu_map: Mapping[str, str] | None = None, timeout_s: float
    ) -> None:
        self._refuse()

    def unlock(self, pid: int, *, timeout_s: float) -> None:
        self._refuse()

    def gpus(self) -> tuple[GpuInfo, ...]:
        return ()

    def used_bytes(self, pid: int) -> int | None:
        return None

    def devices_of(self, pid: int) -> Mapping[str, int | None]:
        return {}

    @staticmethod
    def _refuse() -> NoReturn:
        raise ResourceMissing("this host has no GPU", remedy=_REMEDY)


NO_GPU = Gpu(NoGpu(), NoGpu())


def open_gpu(control_device: Path = _CONTROL_DEVICE) -> Gpu:
    """The GPUs of this host; CUDA is initialised here, which takes seconds. NO_GPU where the kernel
    has none. Raises ResourceMissing if it has, but they can't be used."""
    if not control_device.exists():
        return NO_GPU
    # Not at the top: every command would load them, and 0.1 s is much for `--help`.
    from dynamo_elastic.snapshot.cuda_process import Cuda
    from dynamo_elastic.snapshot.nvml import Nvml

    return Gpu(Cuda.open(), Nvml.open())


def true_devices(inventory: GpuInventory, pid: int) -> tuple[GpuInfo, ...]:
    """The GPUs that hold memory of that process, whatever it believes; () if NVML does not list it,
    which it does not in some containers."""
    devices = inventory.devices_of(pid)
    return tuple(gpu for gpu in inventory.gpus() if gpu.uuid in devices)


def devices_of_all(inventory: GpuInventory, processes: Iterable[ProcessRef]) -> dict[str, int]:
    """Uuid of each GPU -> memory of those processes on it, as far as NVML tells."""
    found: dict[str, int] = {}
    for process in processes:
        for uuid, size in inventory.devices_of(process.pid).items():
            if size is not None:
                found[uuid] = found.get(uuid, 0) + size
    return found


def check_free(inventory: GpuInventory, needed_bytes: Mapping[str, int]) -> None:
    """Return if each GPU (by uuid) has that much free. Raises GpuMemoryShort of the first that has
    not; ResourceMissing of one that is not there."""
    free = {gpu.uuid: gpu.free_bytes for gpu in inventory.gpus()}
    for uuid, needed in needed_bytes.items():
        if uuid not in free:
            raise ResourceMissing(f"this host has no GPU {uuid}", remedy="restore onto another one")
        if free[uuid] < needed:
            raise GpuMemoryShort(uuid, needed_bytes=needed, free_bytes=free[uuid])
