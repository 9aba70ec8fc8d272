"""cuda.bindings.driver over FakeGpuHost: the same arguments and answers as the real module's."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any
from uuid import UUID

from dynamo_elastic.errors import CudaError, CudaTimeout
from dynamo_elastic.snapshot.base import CudaState
from dynamo_elastic.snapshot.cuda_process import bindings
from dynamo_elastic.snapshot.process import identify
from dynamo_elastic.testing.cuda import FakeGpuHost

_OK = bindings.CUresult.CUDA_SUCCESS
_NUMBERS = {state: number for number, state in enumerate(CudaState)}
_FOREVER_S = 600.0
_ALL_SYMBOLS = frozenset({"cuCheckpointProcessCheckpoint", "cuCheckpointProcessRestore"})


class FakeBindings:
    """What snapshot.cuda_process uses of the module. `initialised`: the answer of cuInit.
    `symbols`: what the driver has. A call that hangs blocks until its process has ended."""

    CUresult = bindings.CUresult
    CUcheckpointLockArgs = bindings.CUcheckpointLockArgs
    CUcheckpointCheckpointArgs = bindings.CUcheckpointCheckpointArgs
    CUcheckpointRestoreArgs = bindings.CUcheckpointRestoreArgs
    CUcheckpointUnlockArgs = bindings.CUcheckpointUnlockArgs
    CUcheckpointGpuPair = bindings.CUcheckpointGpuPair

    def __init__(
        self,
        host: FakeGpuHost,
        *,
        initialised: Any = _OK,
        symbols: frozenset[str] = _ALL_SYMBOLS,
    ) -> None:
        self._host = host
        self._initialised = initialised
        self._symbols = symbols
        self._uuids = [_uuid(gpu.uuid) for gpu in host.gpus()]
        self.restored_with: list[tuple[tuple[bytes, bytes], ...]] = []

    def cuInit(self, flags: int) -> tuple[Any]:
        return (self._initialised,)

    def cuDriverGetVersion(self) -> tuple[Any, int]:
        return _OK, 13000

    def cuGetProcAddress(self, symbol: bytes, version: int, flags: int) -> tuple[Any, int, int]:
        known = symbol.decode() in self._symbols
        return (_OK if known else bindings.CUresult.CUDA_ERROR_NOT_FOUND), int(known), 0

    def cuDeviceGetCount(self) -> tuple[Any, int]:
        return _OK, len(self._uuids)

    def cuDeviceGet(self, ordinal: int) -> tuple[Any, int]:
        return _OK, ordinal

    def cuDeviceGetUuid(self, device: int) -> tuple[Any, Any]:
        return _OK, self._uuids[device]

    def cuCheckpointProcessGetRestoreThreadId(self, pid: int) -> tuple[Any, int]:
        known = self._host.holds_cuda(pid)
        return (_OK if known else bindings.CUresult.CUDA_ERROR_INVALID_VALUE), pid + 1

    def cuCheckpointProcessGetState(self, pid: int) -> tuple[Any, int]:
        try:
            return _OK, _NUMBERS[self._host.state(pid)]
        except CudaError as exc:
            return bindings.CUresult(exc.code), 0

    def cuCheckpointProcessLock(self, pid: int, args: Any) -> tuple[Any]:
        return self._answer(pid, lambda: self._host.lock(pid, timeout_s=args.timeoutMs / 1000))

    def cuCheckpointProcessCheckpoint(self, pid: int, args: Any) -> tuple[Any]:
        return self._answer(pid, lambda: self._host.checkpoint(pid, timeout_s=_FOREVER_S))

    def cuCheckpointProcessRestore(self, pid: int, args: Any) -> tuple[Any]:
        pairs = tuple((bytes(p.oldUuid.bytes), bytes(p.newUuid.bytes)) for p in args.gpuPairs)
        self.restored_with.append(pairs[: args.gpuPairsCount])
        gpu_map = {_text(old): _text(new) for old, new in pairs} or None
        return self._answer(
            pid, lambda: self._host.restore(pid, gpu_map=gpu_map, timeout_s=_FOREVER_S)
        )

    def cuCheckpointProcessUnlock(self, pid: int, args: Any) -> tuple[Any]:
        return self._answer(pid, lambda: self._host.unlock(pid, timeout_s=_FOREVER_S))

    @staticmethod
    def _answer(pid: int, act: Callable[[], None]) -> tuple[Any]:
        try:
            act()
        except CudaTimeout as exc:
            if exc.state is None:
                deadline = time.monotonic() + _FOREVER_S
                while identify(pid) is not None and time.monotonic() < deadline:
                    time.sleep(0.005)
                return (bindings.CUresult.CUDA_ERROR_UNKNOWN,)
            return (bindings.CUresult(exc.code),)
        except CudaError as exc:
            return (bindings.CUresult(exc.code),)
        return (_OK,)


def _uuid(text: str) -> Any:
    uuid = bindings.CUuuid()
    ctypes.memmove(uuid.getPtr(), UUID(text.removeprefix("GPU-")).bytes, 16)
    return uuid


def _text(uuid: bytes) -> str:
    return f"GPU-{UUID(bytes=uuid)}"
