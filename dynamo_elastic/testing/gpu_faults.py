"""Plants in a GPU test engine what an image, or a parked process, must not hold."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from cuda.bindings import driver

from dynamo_elastic.errors import ConfigError, DeviceMemoryError, ResourceMissing
from dynamo_elastic.testing.gpu_settings import Fault

ALLOW_MULTICAST = "DYNAMO_ELASTIC_TEST_MULTICAST"
"""A multicast object that is lost can take all GPUs of an NVLink group out of service, also for
others. Set to 1 only where the whole machine is yours."""

_BYTES = 2 << 20


def plant(fault: Fault) -> Any:
    """What has to be kept alive for `fault` to last. Raises ResourceMissing, ConfigError or
    DeviceMemoryError."""
    return _PLANTS[fault]()


def _managed() -> Any:
    attach_global = driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL.value
    return _check("cuMemAllocManaged", driver.cuMemAllocManaged(_BYTES, attach_global))


def _multicast() -> Any:
    if os.environ.get(ALLOW_MULTICAST) != "1":
        raise ConfigError([f"{ALLOW_MULTICAST}: a multicast object can harm the host; see there"])
    if torch.cuda.device_count() < 2:
        raise ResourceMissing("a multicast object needs two GPUs", remedy="show the engine two")
    properties = driver.CUmulticastObjectProp()
    properties.numDevices = 2
    posix = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    properties.handleTypes = posix.value
    properties.size = _BYTES
    return _check("cuMulticastCreate", driver.cuMulticastCreate(properties))


def _check(call: str, answer: tuple[Any, ...]) -> Any:
    if answer[0] != driver.CUresult.CUDA_SUCCESS:
        raise DeviceMemoryError(call, answer[0].name)
    return answer[1]


def _nccl() -> Any:
    import torch.distributed as dist

    store = dist.HashStore()  # type: ignore[attr-defined]
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
    total = torch.ones(1, device="cuda")
    dist.all_reduce(total)
    torch.cuda.synchronize()
    return total


def _nixl() -> Any:
    from dynamo_elastic.comm.nixl_agent import NixlAgent

    return NixlAgent("planted")


_PLANTS: dict[Fault, Callable[[], Any]] = {
    Fault.NONE: lambda: None,
    Fault.MANAGED: _managed,
    Fault.MULTICAST: _multicast,
    Fault.NCCL: _nccl,
    Fault.NIXL: _nixl,
}
