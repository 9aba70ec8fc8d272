"""Plants in a GPU test engine what an image, or a parked process, must not hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from cuda.bindings import driver

from dynamo_elastic.errors import DeviceMemoryError
from dynamo_elastic.memory.arena import layout
from dynamo_elastic.memory.cuda_vmm import CudaVmm
from dynamo_elastic.memory.vmm import ImportedArena, VmmArena, close_chunks
from dynamo_elastic.testing.gpu_settings import Fault

_MANAGED_BYTES = 64 << 20
_SHARED_BYTES = 2 << 20
_CLEAN = {"multicast": 0, "ipc_imports": 0, "managed_bytes": 0}


@dataclass(frozen=True, slots=True)
class Planted:
    """`report`: what the engine has to say of itself when it is ready. `kept`: what has to be kept
    alive for the fault to last."""

    report: dict[str, int] = field(default_factory=_CLEAN.copy)
    kept: Any = None


def plant(fault: Fault) -> Planted:
    """Raises ResourceMissing or DeviceMemoryError."""
    return _PLANTS[fault]()


def _managed() -> Planted:
    attach_global = driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL.value
    error, address = driver.cuMemAllocManaged(_MANAGED_BYTES, attach_global)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise DeviceMemoryError("cuMemAllocManaged", error.name)
    return Planted(_CLEAN | {"managed_bytes": _MANAGED_BYTES}, address)


def _multicast() -> Planted:
    # Only said, not done: nothing can be seen of it from outside, so what the engine says is all
    # there is to test; and a real one that is lost can take a whole NVLink group out of service.
    return Planted(_CLEAN | {"multicast": 1})


def _ipc_import() -> Planted:
    vmm = CudaVmm()
    shared = VmmArena(layout([("shared", _SHARED_BYTES)]), vmm)
    chunks = shared.export_chunks()
    imported = ImportedArena(chunks, vmm)
    close_chunks(chunks)
    return Planted(_CLEAN | {"ipc_imports": 1}, (shared, imported))


def _nccl() -> Planted:
    import torch.distributed as dist

    store = dist.HashStore()  # type: ignore[attr-defined]
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
    total = torch.ones(1, device="cuda")
    dist.all_reduce(total)
    torch.cuda.synchronize()
    return Planted(kept=total)


def _nixl() -> Planted:
    from dynamo_elastic.comm.nixl_agent import NixlAgent

    return Planted(kept=NixlAgent("planted"))


_PLANTS: dict[Fault, Callable[[], Planted]] = {
    Fault.NONE: Planted,
    Fault.MANAGED: _managed,
    Fault.MULTICAST: _multicast,
    Fault.IPC_IMPORT: _ipc_import,
    Fault.NCCL: _nccl,
    Fault.NIXL: _nixl,
}
