"""GPUs and processes that hold them, by the driver's rules, where there is none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock

from dynamo_elastic.errors import CudaError, CudaTimeout
from dynamo_elastic.snapshot.base import (
    CUDA_MOVES,
    CudaCapabilities,
    CudaOperation,
    CudaState,
    GpuInfo,
)
from dynamo_elastic.snapshot.gpu_map import moves

CODES = {
    "CUDA_ERROR_INVALID_VALUE": 1,
    "CUDA_ERROR_OUT_OF_MEMORY": 2,
    "CUDA_ERROR_OPERATING_SYSTEM": 304,
    "CUDA_ERROR_ILLEGAL_STATE": 401,
    "CUDA_ERROR_NOT_READY": 600,
    "CUDA_ERROR_UNKNOWN": 999,
}
GIB = 1 << 30
_Op = CudaOperation


def fake_gpus(count: int = 2, *, total_bytes: int = 80 * GIB) -> tuple[GpuInfo, ...]:
    """`count` equal GPUs, all free."""
    return tuple(
        GpuInfo(
            uuid=f"GPU-{index:08x}-0000-0000-0000-000000000000",
            index=index,
            name="NVIDIA Fake",
            compute_capability="9.0",
            pci_bus_id=f"00000000:{index:02X}:00.0",
            driver_version="580.159.04",
            total_bytes=total_bytes,
            free_bytes=total_bytes,
        )
        for index in range(count)
    )


@dataclass
class FakeCudaProcess:
    """One process. `used_bytes`: uuid of a GPU -> its memory there while it is not checkpointed.
    `ipc_imports` that are open at the checkpoint make every restore fail. `hangs_in` and
    `fails_in` name operations; a failure leaves it in the state given."""

    used_bytes: dict[str, int]
    state: CudaState = CudaState.RUNNING
    ipc_imports: int = 0
    busy: bool = False
    """Its work does not come to an end: it can't be locked."""
    hangs_in: set[CudaOperation] = field(default_factory=set)
    fails_in: dict[CudaOperation, tuple[str, CudaState]] = field(default_factory=dict)
    doomed: bool = False
    """No restore can succeed any more."""


class FakeGpuHost:
    """A CudaDriver and a GpuInventory over the same made-up processes, which tests put in and
    change in `processes`. A call that hangs is over at once: `kill` is called, and it is gone.
    `lists_processes`: False of an NVML that tells nothing of processes, as in some containers.
    `adopts`: a process of which it is true holds CUDA from the first look at it on."""

    def __init__(
        self,
        gpus: Sequence[GpuInfo] | None = None,
        *,
        kill: Callable[[int], None] = lambda _: None,
        lists_processes: bool = True,
        adopts: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self._gpus = tuple(fake_gpus() if gpus is None else gpus)
        self._kill = kill
        self.lists_processes = lists_processes
        self._adopts = adopts
        self._lock = Lock()
        self.processes: dict[int, FakeCudaProcess] = {}
        self.calls: list[tuple[CudaOperation, int]] = []

    def start(self, pid: int, used_bytes: int = GIB, *, gpu: int = 0) -> FakeCudaProcess:
        """`pid` holds CUDA from now on, with that much memory on that GPU."""
        process = FakeCudaProcess({self._gpus[gpu].uuid: used_bytes})
        self.processes[pid] = process
        return process

    def capabilities(self) -> CudaCapabilities:
        return CudaCapabilities(version=13000, checkpoint=True, gpu_map=True, custom_storage=False)

    def holds_cuda(self, pid: int) -> bool:
        if pid not in self.processes and self._adopts(pid):
            self.start(pid)
        return pid in self.processes

    def state(self, pid: int) -> CudaState:
        return self._find("state", pid).state

    def lock(self, pid: int, *, timeout_s: float) -> None:
        with self._lock:
            process = self._begin(_Op.LOCK, pid)
            if process.busy:
                why = f"its work did not end in {timeout_s:g} s"
                name = "CUDA_ERROR_NOT_READY"
                left = process.state
                raise CudaTimeout(_Op.LOCK, pid, code=CODES[name], name=name, state=left, why=why)
            process.state = CudaState.LOCKED

    def checkpoint(self, pid: int, *, timeout_s: float) -> None:
        with self._lock:
            process = self._begin(_Op.CHECKPOINT, pid)
            process.doomed = process.ipc_imports > 0
            process.state = CudaState.CHECKPOINTED

    def restore(
        self, pid: int, *, gpu_map: Mapping[str, str] | None = None, timeout_s: float
    ) -> None:
        with self._lock:
            moved = moves(gpu_map, [gpu.uuid for gpu in self._gpus], pid)
            process = self._begin(_Op.RESTORE, pid)
            if process.doomed:
                raise _error(_Op.RESTORE, pid, "CUDA_ERROR_OPERATING_SYSTEM", process.state)
            wanted = {moved.get(old, old): size for old, size in process.used_bytes.items()}
            free = {gpu.uuid: gpu.free_bytes for gpu in self.gpus()}
            if any(free[uuid] < size for uuid, size in wanted.items()):
                process.doomed = True
                raise _error(_Op.RESTORE, pid, "CUDA_ERROR_OUT_OF_MEMORY", process.state)
            process.used_bytes = wanted
            process.state = CudaState.LOCKED

    def unlock(self, pid: int, *, timeout_s: float) -> None:
        with self._lock:
            self._begin(_Op.UNLOCK, pid).state = CudaState.RUNNING

    def gpus(self) -> tuple[GpuInfo, ...]:
        used: dict[str, int] = {}
        for process in self.processes.values():
            for uuid, size in _on_gpu(process).items():
                used[uuid] = used.get(uuid, 0) + size
        return tuple(
            replace(gpu, free_bytes=gpu.free_bytes - used.get(gpu.uuid, 0)) for gpu in self._gpus
        )

    def used_bytes(self, pid: int) -> int | None:
        devices = self._listed(pid)
        return sum(devices.values()) if devices else None

    def devices_of(self, pid: int) -> Mapping[str, int | None]:
        return dict(self._listed(pid))

    def _listed(self, pid: int) -> dict[str, int]:
        process = self.processes.get(pid)
        return _on_gpu(process) if process is not None and self.lists_processes else {}

    def _find(self, operation: str, pid: int) -> FakeCudaProcess:
        process = self.processes.get(pid)
        if process is None:
            raise _error(operation, pid, "CUDA_ERROR_INVALID_VALUE", None)
        return process

    def _begin(self, operation: CudaOperation, pid: int) -> FakeCudaProcess:
        """The process, if `operation` may go on. Raises what the driver would."""
        self.calls.append((operation, pid))
        process = self._find(operation, pid)
        if (process.state, operation) not in CUDA_MOVES:
            raise _error(operation, pid, "CUDA_ERROR_ILLEGAL_STATE", process.state)
        if operation in process.hangs_in:
            del self.processes[pid]
            self._kill(pid)
            raise CudaTimeout(operation, pid, code=0, name="", state=None, why="no answer; killed")
        if operation in process.fails_in:
            name, process.state = process.fails_in[operation]
            raise _error(operation, pid, name, process.state)
        return process


def _on_gpu(process: FakeCudaProcess) -> dict[str, int]:
    released = process.state in (CudaState.CHECKPOINTED, CudaState.RESTORING)
    return {} if released else process.used_bytes


def _error(operation: str, pid: int, name: str, state: CudaState | None) -> CudaError:
    return CudaError(operation, pid, code=CODES[name], name=name, state=state)
