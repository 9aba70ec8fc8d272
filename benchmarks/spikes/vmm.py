"""A weight arena: one reservation over physical chunks, unmapped for a snapshot, mapped again."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch
from cuda.bindings import driver
from graph_patch import check

HANDLE_TYPES = {
    "posix": driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
    "fabric": driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC,
    "none": driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE,
}
POSIX = HANDLE_TYPES["posix"]


class _Raw:
    """Lets torch see memory it did not allocate."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes // 4,),
            "typestr": "<i4",
            "data": (address, False),
            "version": 3,
        }


def as_tensor(address: int, size_bytes: int) -> torch.Tensor:
    """An int32 view of device memory."""
    return torch.as_tensor(_Raw(address, size_bytes), device="cuda")


def _location() -> Any:
    location = driver.CUmemLocation()
    location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = torch.cuda.current_device()
    return location


def _allow_access(address: int, size_bytes: int) -> None:
    access = driver.CUmemAccessDesc()
    access.location = _location()
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    check(driver.cuMemSetAccess(address, size_bytes, [access], 1))


def reserve(size_bytes: int) -> int:
    """Addresses without memory."""
    return int(check(driver.cuMemAddressReserve(size_bytes, 0, 0, 0)))


def fabric_supported() -> bool:
    """What the device claims; an allocation may still be refused."""
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED
    return bool(check(driver.cuDeviceGetAttribute(attribute, check(driver.cuCtxGetDevice()))))


class Arena:
    """Own memory behind a reservation."""

    def __init__(self, address: int, size_bytes: int, chunk_bytes: int, kind: str) -> None:
        self.address, self.size_bytes, self.chunk_bytes, self.kind = (
            address,
            size_bytes,
            chunk_bytes,
            kind,
        )
        self.handles: list[Any] = []

    def map(self) -> None:
        """Create the chunks and map them side by side."""
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location = _location()
        properties.requestedHandleTypes = HANDLE_TYPES[self.kind]
        for offset in range(0, self.size_bytes, self.chunk_bytes):
            handle = check(driver.cuMemCreate(self.chunk_bytes, properties, 0))
            check(driver.cuMemMap(self.address + offset, self.chunk_bytes, 0, handle, 0))
            self.handles.append(handle)
        _allow_access(self.address, self.size_bytes)

    def unmap(self) -> None:
        """Give the memory back; the addresses stay reserved."""
        check(driver.cuMemUnmap(self.address, self.size_bytes))
        for handle in self.handles:
            check(driver.cuMemRelease(handle))
        self.handles = []

    def send_handles(self, path: str, timeout_s: float = 20) -> None:
        """Pass the chunks' file descriptors to the one process that connects to the unix socket."""
        descriptors = [
            int(check(driver.cuMemExportToShareableHandle(handle, POSIX, 0)))
            for handle in self.handles
        ]
        with socket.socket(socket.AF_UNIX) as server:
            server.settimeout(timeout_s)
            server.bind(path)
            server.listen(1)
            connection, _ = server.accept()
            with connection:
                socket.send_fds(connection, [b"chunks"], descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        os.unlink(path)


class Imported:
    """Another process's arena, mapped here through the file descriptors of its chunks."""

    def __init__(self, path: str, size_bytes: int, chunk_bytes: int) -> None:
        self.size_bytes = size_bytes
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(20)
            client.connect(path)
            _, descriptors, _, _ = socket.recv_fds(client, 64, 250)
        self.address = reserve(size_bytes)
        self.handles = []
        for index, descriptor in enumerate(descriptors):
            handle = check(driver.cuMemImportFromShareableHandle(descriptor, POSIX))
            os.close(descriptor)
            check(driver.cuMemMap(self.address + index * chunk_bytes, chunk_bytes, 0, handle, 0))
            self.handles.append(handle)
        _allow_access(self.address, size_bytes)

    def close(self) -> None:
        """Unmap and release, so that the owner's memory can really go."""
        check(driver.cuMemUnmap(self.address, self.size_bytes))
        for handle in self.handles:
            check(driver.cuMemRelease(handle))
        check(driver.cuMemAddressFree(self.address, self.size_bytes))
