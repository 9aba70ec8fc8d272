"""The parked tier: a process stays, and its GPU is free. Without CUDA that is nothing to do."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynamo_elastic.errors import EngineGone, ProcessesLost, ResourceMissing
from dynamo_elastic.failpoints import failpoint
from dynamo_elastic.snapshot.base import CudaDriver, CudaState, GpuInventory
from dynamo_elastic.snapshot.cuda_findings import check_parkable
from dynamo_elastic.snapshot.freeze import Kill, cuda_processes, freeze, kill_lost, thaw
from dynamo_elastic.snapshot.gpu import check_free, devices_of_all
from dynamo_elastic.snapshot.gpu_map import moves
from dynamo_elastic.snapshot.process import ProcessRef, alive, memory_of

_NEWER_DRIVER = "bring it back onto its own GPU, or install a driver from 580 on"
_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class ParkedReport:
    """A parked process. `frozen`: those of its tree that hold CUDA; () if none does."""

    process: ProcessRef
    frozen: tuple[ProcessRef, ...]
    device_bytes: dict[str, int]
    """What they had on each GPU (by uuid), and need to come back; {} if NVML does not list them."""
    gpu_bytes: int | None
    """What they have there now: 0, or None if NVML does not list them."""
    host_bytes: int
    """Host memory of `frozen`, now with what was on the GPU."""
    timings_s: dict[str, float]
    """Of lock, checkpoint and release (until NVML saw the memory free)."""


def park(
    process: ProcessRef,
    driver: CudaDriver,
    inventory: GpuInventory,
    *,
    engine: Mapping[str, Any],
    timeout_s: float,
    kill: Kill = kill_lost,
) -> ParkedReport:
    """The process holds no GPU. Its engine must have let go of peers, agents and buffers; `engine`:
    what it says of itself, see cuda_findings.REPORT.

    Raises NotQuiescent (what it still holds) or CudaError (it could not be locked): it runs as
    before. Raises ProcessesLost if it could not be checkpointed, or its memory was not free at the
    deadline: it was killed.
    """
    deadline = time.monotonic() + timeout_s
    failpoint("park.begin")
    frozen = cuda_processes(process, driver)
    check_parkable(frozen, engine)
    device_bytes = devices_of_all(inventory, frozen)
    timings_s = freeze(frozen, driver, timeout_s=timeout_s, kill=kill)
    failpoint("park.frozen")
    began = time.monotonic()
    _wait_released(frozen, inventory, deadline, kill)
    failpoint("park.released")
    return ParkedReport(
        process=process,
        frozen=frozen,
        device_bytes=device_bytes,
        gpu_bytes=0 if device_bytes or not frozen else None,
        host_bytes=memory_of(frozen).total_bytes,
        timings_s=timings_s | {"release": time.monotonic() - began},
    )


def _wait_released(
    frozen: Sequence[ProcessRef], inventory: GpuInventory, deadline: float, kill: Kill
) -> None:
    """Return once NVML shows no memory of theirs: whoever comes next counts on it."""
    while any(held := devices_of_all(inventory, frozen).values()):
        if time.monotonic() > deadline:
            for process in frozen:
                kill(process)
            raise ProcessesLost(
                {process.pid: CudaState.CHECKPOINTED for process in frozen},
                f"{sum(held)} bytes stayed on the GPU after the checkpoint",
            )
        time.sleep(_POLL_S)


def unpark(
    parked: ParkedReport,
    driver: CudaDriver,
    inventory: GpuInventory,
    *,
    gpu_map: Mapping[str, str] | None = None,
    timeout_s: float,
    kill: Kill = kill_lost,
) -> dict[str, float]:
    """The process runs on its GPU again, with addresses and graphs as they were; seconds by
    operation. `gpu_map`: see CudaDriver.restore(), for processes that were parked on this host.

    Raises GpuMemoryShort or ResourceMissing, or CudaError of the map: nothing was tried, it stays
    parked. Raises EngineGone if it died meanwhile; ProcessesLost if it could not be restored, which
    is for good: it was killed.
    """
    for process in (parked.process, *parked.frozen):
        if not alive(process):
            raise EngineGone(f"process {process.pid} ended while it was parked")
    if parked.frozen:
        uuids = [gpu.uuid for gpu in inventory.gpus()]
        moved = moves(gpu_map, uuids, parked.process.pid)
        if moved and not driver.capabilities().gpu_map:
            raise ResourceMissing("this driver can't move processes", remedy=_NEWER_DRIVER)
        needed = {moved.get(uuid, uuid): size for uuid, size in parked.device_bytes.items()}
        check_free(inventory, needed)
        failpoint("unpark.checked")
    return thaw(parked.frozen, driver, gpu_map=gpu_map, timeout_s=timeout_s, kill=kill)
