"""The CUDA driver behind the VmmDriver seam: the one importer of its calls on our own memory."""

from __future__ import annotations

from typing import Any

import torch
from cuda.bindings import driver

from dynamo_elastic.errors import DeviceMemoryError, DeviceMemoryFull, ResourceMissing

_REMEDY = "run on a host with an NVIDIA GPU and driver, or keep weights in host memory"


class _DeviceBytes:
    """Lets torch see memory that it did not allocate."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class CudaVmm:
    """This process's GPUs, which torch has initialised. Stateless: calls may run side by side.

    Raises ResourceMissing where there is no GPU or no driver.
    """

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise ResourceMissing("torch finds no GPU here", remedy=_REMEDY)
        torch.cuda.synchronize()  # which makes torch's context, if there is none yet

    def granularity_bytes(self, device: int) -> int:
        flag = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        return int(self._call("cuMemGetAllocationGranularity", self._properties(device), flag))

    def free_bytes(self, device: int) -> int:
        return int(torch.cuda.mem_get_info(device)[0])

    def reserve(self, size_bytes: int) -> int:
        return int(self._call("cuMemAddressReserve", size_bytes, 0, 0, 0))

    def free_addresses(self, address: int, size_bytes: int) -> None:
        self._call("cuMemAddressFree", address, size_bytes)

    def create(self, size_bytes: int, device: int) -> int:
        try:
            return int(self._call("cuMemCreate", size_bytes, self._properties(device), 0))
        except DeviceMemoryError as exc:
            if exc.name != "CUDA_ERROR_OUT_OF_MEMORY":
                raise
            free_bytes = self.free_bytes(device)
            raise DeviceMemoryFull(device, needed_bytes=size_bytes, free_bytes=free_bytes) from exc

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", handle)

    def map(self, address: int, size_bytes: int, handle: int) -> None:
        self._call("cuMemMap", address, size_bytes, 0, handle, 0)

    def allow(self, address: int, size_bytes: int, device: int) -> None:
        access = driver.CUmemAccessDesc()
        access.location = self._location(device)
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._call("cuMemSetAccess", address, size_bytes, [access], 1)

    def unmap(self, address: int, size_bytes: int) -> None:
        self._call("cuMemUnmap", address, size_bytes)

    def export_descriptor(self, handle: int) -> int:
        return int(self._call("cuMemExportToShareableHandle", handle, self._posix(), 0))

    def import_descriptor(self, descriptor: int) -> int:
        return int(self._call("cuMemImportFromShareableHandle", descriptor, self._posix()))

    def as_bytes(self, address: int, size_bytes: int, device: int) -> torch.Tensor:
        return torch.as_tensor(_DeviceBytes(address, size_bytes), device=f"cuda:{device}")

    def synchronize(self, device: int) -> None:
        torch.cuda.synchronize(device)

    def _call(self, name: str, *arguments: Any) -> Any:
        """The call's one value, or None. Raises DeviceMemoryError or ResourceMissing."""
        try:
            result, *values = getattr(driver, name)(*arguments)
        except RuntimeError as exc:  # the bindings' own, when the driver's library is not there
            raise ResourceMissing(f"{name}: {exc}", remedy=_REMEDY) from exc
        if result != driver.CUresult.CUDA_SUCCESS:
            raise DeviceMemoryError(name, result.name)
        return values[0] if values else None

    def _posix(self) -> Any:
        kinds = driver.CUmemAllocationHandleType
        return kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def _location(self, device: int) -> Any:
        location = driver.CUmemLocation()
        location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = device
        return location

    def _properties(self, device: int) -> Any:
        # Only with a POSIX handle can a peer map it; a source without any hangs NIXL's reader.
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location = self._location(device)
        properties.requestedHandleTypes = self._posix()
        return properties
