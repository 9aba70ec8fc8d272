"""A process that keeps its GPU busy for a while, or measures how long a small kernel takes."""

from __future__ import annotations

import sys
import time
from ctypes import c_longlong
from pathlib import Path
from typing import Any

import rank_process
import torch
from checkpoints import check
from common import SpikeError
from cuda.bindings import driver, nvrtc

CYCLES_PER_S = 1.98e9
"""An H200's clock under load: how long a spin takes is measured, not assumed."""
_SPIN = b"""
extern "C" __global__ void spin(long long cycles) {
  long long begin = clock64();
  while (clock64() - begin < cycles) {}
}
"""


class SharedRank:
    """Operations the driver may ask for."""

    def __init__(self) -> None:
        self.x = torch.ones(1 << 10, device="cuda")
        self.streams = {"first": torch.cuda.Stream()}
        self.begun_s = 0.0
        self.tick(3)
        torch.cuda._sleep(1000)
        self.wait()

    def stream(self, name: str, priority: int = 0) -> None:
        """One more stream."""
        self.streams[name] = torch.cuda.Stream(priority=priority)

    def spin(self, seconds: float, stream: str = "first") -> None:
        """Launch a kernel that does nothing for so long, and return at once."""
        self.begun_s = time.perf_counter()
        with torch.cuda.stream(self.streams[stream]):
            torch.cuda._sleep(int(seconds * CYCLES_PER_S))

    def wait(self) -> float:
        """Seconds from the launch to the end of everything."""
        torch.cuda.synchronize()
        return time.perf_counter() - self.begun_s

    def tick(self, number: int) -> list[float]:
        """Milliseconds of small kernels, one after the other."""
        found = []
        for _ in range(number):
            begun_s = time.perf_counter()
            with torch.cuda.stream(self.streams["first"]):
                self.x += 1
            self.streams["first"].synchronize()
            found.append(round(1e3 * (time.perf_counter() - begun_s), 3))
        return found

    def spin_in_new_context(self, seconds: float) -> None:
        """The same spin in a context that is made for it."""
        program = nvrtc_ok(nvrtc.nvrtcCreateProgram(_SPIN, b"spin", 0, [], []))
        nvrtc_ok(nvrtc.nvrtcCompileProgram(program, 1, [b"--gpu-architecture=sm_90"]))
        size: int = nvrtc_ok(nvrtc.nvrtcGetCUBINSize(program))
        code = b" " * size
        nvrtc_ok(nvrtc.nvrtcGetCUBIN(program, code))
        own = check(driver.cuCtxGetCurrent())
        check(driver.cuCtxCreate(None, 0, check(driver.cuDeviceGet(0))), "context")
        module = check(driver.cuModuleLoadData(code), "module")
        function = check(driver.cuModuleGetFunction(module, b"spin"))
        cycles = int(seconds * CYCLES_PER_S)
        launch = (function, 1, 1, 1, 1, 1, 1, 0, 0, ((cycles,), (c_longlong,)), 0)
        check(driver.cuLaunchKernel(*launch), "launch")
        check(driver.cuCtxSetCurrent(own))


def nvrtc_ok(result: tuple[Any, ...]) -> Any:
    """As `check`: nvrtc has a status of its own."""
    if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise SpikeError(f"nvrtc: {result[0]}")
    return result[1] if len(result) > 1 else None


if __name__ == "__main__":
    torch.cuda.init()
    rank_process.serve(SharedRank(), Path(sys.argv[1]))
