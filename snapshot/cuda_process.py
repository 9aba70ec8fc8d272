"""The CUDA driver behind the CudaDriver seam: the only importer of cuda.bindings.

Every call runs in a thread of its own, because some never return: a process that holds a multicast
object hangs in its checkpoint. Killing that process is the only way to end such a call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from queue import Empty, SimpleQueue
from typing import Any
from uuid import UUID

from cuda.bindings import driver as bindings

from dynamo_elastic.errors import CudaError, CudaTimeout, EngineError, ResourceMissing
from dynamo_elastic.snapshot.base import CudaCapabilities, CudaOperation, CudaState
from dynamo_elastic.snapshot.gpu_map import moves
from dynamo_elastic.snapshot.process import (
    PROC,
    ProcessRef,
    identify,
    kill_and_wait,
)

__all__ = ["Cuda", "bindings"]

_NO_DRIVER = "install the NVIDIA driver, or run without GPUs"
_OLD_DRIVER = "install an NVIDIA driver from 580 on"
_QUERY_TIMEOUT_S = 10.0
_GRACE_S = 2.0
"""How long a call may outlast what the driver itself was told, or the process it works on."""
_UVM = "/dev/nvidia-uvm"
_STATES = dict(enumerate(CudaState))
"""CUprocessState -> CudaState: declared in the driver's order. 4 and 5 came with CUDA 13.4."""

Answer = tuple[Any, ...]
Call = Callable[..., Answer]


class Cuda:
    """The driver of this host, initialised once: make one in a process that lives long, since that
    takes seconds where there are many GPUs."""

    def __init__(
        self, driver: Any, gpus: Mapping[str, Any], capabilities: CudaCapabilities
    ) -> None:
        """`gpus`: uuid -> the driver's own form of it."""
        self._driver = driver
        self._gpus = dict(gpus)
        self._capabilities = capabilities

    @classmethod
    def open(cls, driver: Any = bindings) -> Cuda:
        """cuInit() was done here. Raises ResourceMissing: no driver, no GPU, too old."""
        try:
            answer = driver.cuInit(0)
        except RuntimeError as exc:  # cuda.pathfinder's, of a library that is not there
            raise ResourceMissing(f"no CUDA driver ({exc})", remedy=_NO_DRIVER) from exc
        if answer[0] != driver.CUresult.CUDA_SUCCESS:
            raise ResourceMissing(f"cuInit answers {answer[0].name}", remedy=_NO_DRIVER)
        found = _probe(driver)
        if not found.checkpoint:
            raise ResourceMissing(
                f"CUDA {found.version} can't checkpoint processes", remedy=_OLD_DRIVER
            )
        return cls(driver, _gpu_uuids(driver), found)

    def capabilities(self) -> CudaCapabilities:
        return self._capabilities

    def holds_cuda(self, pid: int) -> bool:
        """Asked by its restore thread: its state is also told of processes without CUDA."""
        answer = self._query(self._driver.cuCheckpointProcessGetRestoreThreadId, pid)
        if answer is None:
            raise _no_answer("query", pid)
        if answer[0] == self._driver.CUresult.CUDA_SUCCESS:
            return True
        # An invalid process is one without CUDA. Of other errors nothing is said anywhere; but
        # whoever has CUDA has this device open.
        invalid = answer[0] == self._driver.CUresult.CUDA_ERROR_INVALID_VALUE
        if not invalid and _has_open(pid, _UVM):
            raise self._error("query", pid, answer[0])
        return False

    def state(self, pid: int) -> CudaState:
        answer = self._query(self._driver.cuCheckpointProcessGetState, pid)
        if answer is None:
            raise _no_answer("query", pid)
        if answer[0] != self._driver.CUresult.CUDA_SUCCESS:
            raise self._error("query", pid, answer[0])
        state = _STATES.get(int(answer[1]))
        if state is None:
            why = f"the driver answers with a state that we do not know, {answer[1]}"
            raise CudaError("query", pid, code=0, name="", state=None, why=why)
        return state

    def lock(self, pid: int, *, timeout_s: float) -> None:
        args = self._driver.CUcheckpointLockArgs()
        args.timeoutMs = max(1, round(timeout_s * 1000))  # 0 is for ever
        call = self._driver.cuCheckpointProcessLock
        self._act(CudaOperation.LOCK, pid, call, args, timeout_s=timeout_s + _GRACE_S)

    def checkpoint(self, pid: int, *, timeout_s: float) -> None:
        args = self._driver.CUcheckpointCheckpointArgs()
        call = self._driver.cuCheckpointProcessCheckpoint
        self._act(CudaOperation.CHECKPOINT, pid, call, args, timeout_s=timeout_s)

    def restore(
        self, pid: int, *, gpu_map: Mapping[str, str] | None = None, timeout_s: float
    ) -> None:
        args = self._restore_args(moves(gpu_map, self._gpus, pid))
        call = self._driver.cuCheckpointProcessRestore
        self._act(CudaOperation.RESTORE, pid, call, args, timeout_s=timeout_s)

    def unlock(self, pid: int, *, timeout_s: float) -> None:
        args = self._driver.CUcheckpointUnlockArgs()
        call = self._driver.cuCheckpointProcessUnlock
        self._act(CudaOperation.UNLOCK, pid, call, args, timeout_s=timeout_s)

    def _restore_args(self, moved: Mapping[str, str]) -> Any:
        args = self._driver.CUcheckpointRestoreArgs()
        pairs = []
        for old, new in moved.items():
            pair = self._driver.CUcheckpointGpuPair()
            pair.oldUuid, pair.newUuid = self._gpus[old], self._gpus[new]
            pairs.append(pair)
        if pairs:
            args.gpuPairs, args.gpuPairsCount = pairs, len(pairs)
        return args

    def _act(
        self, operation: CudaOperation, pid: int, call: Call, args: Any, *, timeout_s: float
    ) -> None:
        target = identify(pid)
        running = _Running(call, pid, args)
        answer = running.wait(timeout_s)
        if answer is None:
            raise CudaTimeout(
                operation,
                pid,
                code=0,
                name="",
                state=None,
                why=f"no answer in {timeout_s:g} s, {_end(target, running)}",
            )
        if answer[0] != self._driver.CUresult.CUDA_SUCCESS:
            raise self._error(operation, pid, answer[0])

    def _query(self, call: Call, pid: int) -> Answer | None:
        return _Running(call, pid).wait(_QUERY_TIMEOUT_S)

    def _error(self, operation: str, pid: int, result: Any) -> CudaError:
        answer = self._query(self._driver.cuCheckpointProcessGetState, pid)
        known = answer is not None and answer[0] == self._driver.CUresult.CUDA_SUCCESS
        state = _STATES.get(int(answer[1])) if answer is not None and known else None
        not_ready = result == self._driver.CUresult.CUDA_ERROR_NOT_READY
        timed_out = operation == CudaOperation.LOCK and not_ready
        kind = CudaTimeout if timed_out else CudaError
        why = f"its work did not end in time ({result.name})" if timed_out else ""
        return kind(operation, pid, code=int(result), name=result.name, state=state, why=why)


class _Running:
    """One driver call in a thread, which may outlive us: nothing waits for it at exit."""

    def __init__(self, call: Call, *args: Any) -> None:
        self._answers: SimpleQueue[Answer | BaseException] = SimpleQueue()
        thread = threading.Thread(target=self._run, args=(call, args), daemon=True)
        thread.start()

    def _run(self, call: Call, args: Collection[Any]) -> None:
        try:
            self._answers.put(call(*args))
        except BaseException as exc:  # noqa: BLE001 - it belongs to whoever waits
            self._answers.put(exc)

    def wait(self, timeout_s: float) -> Answer | None:
        """What it answered, or None. Raises what it raised."""
        try:
            answer = self._answers.get(timeout=timeout_s)
        except Empty:
            return None
        if isinstance(answer, BaseException):
            raise answer
        return answer


def _end(target: ProcessRef | None, running: _Running) -> str:
    """Kill the process that a call hangs in, so that the call returns; what came of it."""
    if target is None:
        return "and the process is gone"
    try:
        kill_and_wait(target, timeout_s=_GRACE_S)
    except EngineError as exc:
        return str(exc)
    ended = running.wait(_GRACE_S) is not None
    return "the process was killed" + ("" if ended else ", and the call still hangs")


def _no_answer(operation: str, pid: int) -> CudaTimeout:
    why = f"no answer in {_QUERY_TIMEOUT_S:g} s"
    return CudaTimeout(operation, pid, code=0, name="", state=None, why=why)


def _probe(driver: Any) -> CudaCapabilities:
    answer = driver.cuDriverGetVersion()
    version = int(answer[1]) if answer[0] == driver.CUresult.CUDA_SUCCESS else 0
    return CudaCapabilities(
        version=version,
        checkpoint=_has(driver, b"cuCheckpointProcessCheckpoint", 12080),
        # Pairs of GPUs came as new arguments of an old function; the interface that has them is
        # that of 13.0, which an older driver does not hand out.
        gpu_map=_has(driver, b"cuCheckpointProcessRestore", 13000),
        custom_storage=_has(driver, b"cuCheckpointOperationComplete", 13040),
    )


def _has(driver: Any, symbol: bytes, interface: int) -> bool:
    answer = driver.cuGetProcAddress(symbol, interface, 0)
    return bool(answer[0] == driver.CUresult.CUDA_SUCCESS and answer[1])


def _gpu_uuids(driver: Any) -> dict[str, Any]:
    count = _value(driver, driver.cuDeviceGetCount())
    devices = [_value(driver, driver.cuDeviceGet(index)) for index in range(count)]
    uuids = [_value(driver, driver.cuDeviceGetUuid(device)) for device in devices]
    return {f"GPU-{UUID(bytes=bytes(uuid.bytes))}": uuid for uuid in uuids}


def _value(driver: Any, answer: Answer) -> Any:
    if answer[0] != driver.CUresult.CUDA_SUCCESS:
        raise ResourceMissing(f"the GPUs can't be listed: {answer[0].name}", remedy=_NO_DRIVER)
    return answer[1]


def _has_open(pid: int, device: str) -> bool:
    try:
        return any(str(fd.readlink()) == device for fd in (PROC / str(pid) / "fd").iterdir())
    except OSError:
        return False
