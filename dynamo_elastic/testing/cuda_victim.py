"""A process with memory on a real GPU, as small as it can be: no torch, no library but the driver's
bindings and ours for blocks of memory. It is told what to do by lines."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from types import TracebackType
from typing import Self

from dynamo_elastic.snapshot.cuda_findings import IPC_CACHE
from dynamo_elastic.snapshot.process import ProcessRef, identify

MEMORY_BYTES = 256 << 20
_TIMEOUT_S = 30.0
_CODE = """
import contextlib, ctypes, sys
from cuda.bindings import driver as d
from dynamo_elastic.comm.fresh_blocks import DriverHeap, fresh_blocks

def ok(answer):
    if answer[0] != d.CUresult.CUDA_SUCCESS:
        raise SystemExit(f"CUDA: {answer[0].name}")
    return answer[1] if len(answer) > 1 else None

def report():
    uuid = ok(d.cuDeviceGetUuid(device))
    return bytes(uuid.bytes).hex(), ok(d.cuDeviceGetPCIBusId(64, device)).decode().strip("\\0")

def check():
    copy = bytearray(size)
    ok(d.cuMemcpyDtoH(copy, memory, size))
    return "right" if copy == b"*" * size else "wrong"

def share():
    return ctypes.string_at(ok(d.cuIpcGetMemHandle(memory)).getPtr(), 64).hex()

def share_block(fresh):
    with fresh_blocks(DriverHeap(0)) if fresh == "fresh" else contextlib.nullcontext():
        block = ok(d.cuMemAlloc(8))
    return ctypes.string_at(ok(d.cuIpcGetMemHandle(block)).getPtr(), 64).hex()

def opened(text):
    handle = d.CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), bytes.fromhex(text), 64)
    return d.cuIpcOpenMemHandle(handle, d.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value)

def take(text):
    ok(opened(text))
    return "taken"

def look(text):
    result, address = opened(text)
    if result == d.CUresult.CUDA_ERROR_NOT_PERMITTED:
        return "not permitted"
    ok((result,))
    ok(d.cuIpcCloseMemHandle(address))
    return "seen"

def manage(text):
    attach = d.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL.value
    address = ok(d.cuMemAllocManaged(int(text), attach))
    ctypes.memset(int(address), 7, int(text))
    return "managed"

size = int(sys.argv[1])
ok(d.cuInit(0))
device = ok(d.cuDeviceGet(0))
ok(d.cuCtxSetCurrent(ok(d.cuDevicePrimaryCtxRetain(device))))
memory = ok(d.cuMemAlloc(size))
ok(d.cuMemsetD8(memory, ord("*"), size))
ok(d.cuCtxSynchronize())
acts = {f.__name__: f for f in (check, share, share_block, take, look, manage, report)}
print("up", flush=True)
for line in sys.stdin:
    name, *arguments = line.split()
    answer = acts[name](*arguments)
    print(*((answer,) if isinstance(answer, str) else answer), flush=True)
"""


class CudaVictim:
    """`memory_bytes` on the GPU that it sees first. Raises RuntimeError if it does not answer."""

    def __init__(self, memory_bytes: int = MEMORY_BYTES, *, visible: str | None = None) -> None:
        environment = {**os.environ, IPC_CACHE: "n"}
        if visible is not None:
            environment["CUDA_VISIBLE_DEVICES"] = visible
        self._popen = subprocess.Popen(
            [sys.executable, "-c", _CODE, str(memory_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=environment,
        )
        self.pid = self._popen.pid
        self._line()

    @property
    def process(self) -> ProcessRef:
        found = identify(self.pid)
        if found is None:
            raise RuntimeError(f"process {self.pid} has ended")
        return found

    def ask(self, *words: str) -> str:
        """Its answer. It does not answer while it is locked."""
        if self._popen.stdin is None:
            raise RuntimeError("no way to ask")
        self._popen.stdin.write(" ".join(words) + "\n")
        return self._line()

    def _line(self) -> str:
        out = self._popen.stdout
        if out is None or not select.select([out], [], [], _TIMEOUT_S)[0]:
            raise RuntimeError(f"process {self.pid} does not answer in {_TIMEOUT_S:g} s")
        line = out.readline().strip()
        if not line:
            raise RuntimeError(f"process {self.pid} ended with {self._popen.wait(5)}")
        return line

    def end(self) -> None:
        """Idempotent."""
        self._popen.kill()
        with self._popen:
            pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()
