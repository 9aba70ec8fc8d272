"""The driver's adapter over made-up bindings: every answer has its error, every call its end."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from dynamo_elastic.errors import CudaError, CudaTimeout, ResourceMissing
from dynamo_elastic.snapshot.base import CudaOperation, CudaState
from dynamo_elastic.snapshot.cuda_process import Cuda, bindings
from dynamo_elastic.testing.cuda import FakeGpuHost, fake_gpus
from dynamo_elastic.testing.cuda_bindings import FakeBindings

PID = 1 << 22  # above pid_max: no process of this host


@pytest.fixture
def host() -> FakeGpuHost:
    host = FakeGpuHost()
    host.start(PID)
    return host


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["/bin/sleep", "600"]) as process:
        yield process
        process.kill()


def parked(host: FakeGpuHost, driver: Cuda, pid: int = PID) -> None:
    driver.lock(pid, timeout_s=1)
    driver.checkpoint(pid, timeout_s=1)
    assert host.processes[pid].state is CudaState.CHECKPOINTED


class NoLibrary:
    CUresult = bindings.CUresult

    def cuInit(self, flags: int) -> tuple[Any]:
        raise RuntimeError('"cuda" is an NVIDIA driver library')


@pytest.mark.parametrize(
    ("driver", "reason"),
    [
        (NoLibrary(), "no CUDA driver"),
        (
            FakeBindings(FakeGpuHost(), initialised=bindings.CUresult.CUDA_ERROR_NO_DEVICE),
            "CUDA_ERROR_NO_DEVICE",
        ),
        (FakeBindings(FakeGpuHost(), symbols=frozenset()), "can't checkpoint"),
    ],
)
def test_without_a_driver_the_remedy_is_named(driver: Any, reason: str) -> None:
    with pytest.raises(ResourceMissing, match=reason) as caught:
        Cuda.open(driver)
    assert "install" in caught.value.remedy


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="needs a host without a GPU")
def test_the_real_module_says_that_there_is_no_driver() -> None:
    with pytest.raises(ResourceMissing, match="no CUDA driver"):
        Cuda.open()


def test_capabilities_come_from_symbols() -> None:
    every = {"Process" + name for name in ("Checkpoint", "Restore")} | {"OperationComplete"}
    found = Cuda.open(
        FakeBindings(FakeGpuHost(), symbols=frozenset(f"cuCheckpoint{name}" for name in every))
    ).capabilities()
    assert (found.checkpoint, found.gpu_map, found.custom_storage) == (True, True, True)
    found = Cuda.open(
        FakeBindings(FakeGpuHost(), symbols=frozenset({"cuCheckpointProcessCheckpoint"}))
    ).capabilities()
    assert (found.checkpoint, found.gpu_map, found.custom_storage) == (True, False, False)


@pytest.mark.parametrize("state", list(CudaState))
def test_every_state_of_the_driver_is_known(host: FakeGpuHost, state: CudaState) -> None:
    host.processes[PID].state = state
    assert Cuda.open(FakeBindings(host)).state(PID) is state
    names = [
        member.name.removeprefix("CU_PROCESS_STATE_").lower() for member in bindings.CUprocessState
    ]
    assert names == [member.value for member in CudaState]


def test_state_of_a_later_driver_is_an_error(host: FakeGpuHost) -> None:
    driver = Cuda.open(FakeBindings(host))
    driver._driver.cuCheckpointProcessGetState = lambda pid: (bindings.CUresult.CUDA_SUCCESS, 9)
    with pytest.raises(CudaError, match="a state that we do not know, 9"):
        driver.state(PID)


def test_a_failure_says_what_why_and_where_it_is_left(host: FakeGpuHost) -> None:
    driver = Cuda.open(FakeBindings(host))
    host.processes[PID].ipc_imports = 1
    parked(host, driver)
    with pytest.raises(CudaError, match="CUDA_ERROR_OPERATING_SYSTEM") as caught:
        driver.restore(PID, timeout_s=1)
    error = caught.value
    assert (error.operation, error.pid, error.code) == (CudaOperation.RESTORE, PID, 304)
    assert error.name == "CUDA_ERROR_OPERATING_SYSTEM"
    assert error.state == CudaState.CHECKPOINTED
    with pytest.raises(CudaError, match="CUDA_ERROR_ILLEGAL_STATE"):
        driver.unlock(PID, timeout_s=1)


def test_lock_that_times_out_leaves_it_running(host: FakeGpuHost) -> None:
    host.processes[PID].busy = True
    with pytest.raises(CudaTimeout) as caught:
        Cuda.open(FakeBindings(host)).lock(PID, timeout_s=0.1)
    assert caught.value.state == CudaState.RUNNING
    assert caught.value.code == 600


@pytest.mark.parametrize("operation", [CudaOperation.CHECKPOINT, CudaOperation.RESTORE])
def test_call_that_hangs_ends_with_its_process(
    operation: CudaOperation, sleeper: subprocess.Popen[bytes]
) -> None:
    host = FakeGpuHost()
    process = host.start(sleeper.pid)
    driver = Cuda.open(FakeBindings(host))
    driver.lock(sleeper.pid, timeout_s=1)
    if operation is CudaOperation.RESTORE:
        driver.checkpoint(sleeper.pid, timeout_s=1)
    process.hangs_in.add(operation)
    began = time.monotonic()
    with pytest.raises(CudaTimeout, match="the process was killed") as caught:
        getattr(driver, operation)(sleeper.pid, timeout_s=0.1)
    assert time.monotonic() - began < 2
    assert caught.value.state is None
    assert sleeper.wait(timeout=5) == -9


def test_hang_of_a_process_that_is_gone_is_told(host: FakeGpuHost) -> None:
    driver = Cuda.open(FakeBindings(host))
    driver.lock(PID, timeout_s=1)

    def never(*_: object) -> tuple[Any]:
        time.sleep(0.3)
        return (bindings.CUresult.CUDA_SUCCESS,)

    driver._driver.cuCheckpointProcessCheckpoint = never
    with pytest.raises(CudaTimeout, match="the process is gone"):
        driver.checkpoint(PID, timeout_s=0.05)


def test_binding_that_raises_is_no_hang(host: FakeGpuHost) -> None:
    driver = Cuda.open(FakeBindings(host))

    def broken(*_: object) -> tuple[Any]:
        raise TypeError("wrong argument")

    driver._driver.cuCheckpointProcessUnlock = broken
    with pytest.raises(TypeError, match="wrong argument"):
        driver.unlock(PID, timeout_s=5)


def test_gpu_map_reaches_the_driver_as_pairs_and_identity_as_none(host: FakeGpuHost) -> None:
    fake = FakeBindings(host)
    driver = Cuda.open(fake)
    first, second = (gpu.uuid for gpu in fake_gpus())
    parked(host, driver)
    driver.restore(PID, gpu_map={first: first, second: second}, timeout_s=1)
    driver.checkpoint(PID, timeout_s=1)
    driver.restore(PID, gpu_map={first: second, second: first}, timeout_s=1)
    a, b = (UUID(uuid.removeprefix("GPU-")).bytes for uuid in (first, second))
    assert fake.restored_with == [(), ((a, b), (b, a))]
    assert list(host.devices_of(PID)) == [second]


class Uncertain(FakeBindings):
    """Answers, of a process without CUDA, with an error that says nothing."""

    def cuCheckpointProcessGetRestoreThreadId(self, pid: int) -> tuple[Any, int]:
        return bindings.CUresult.CUDA_ERROR_OPERATING_SYSTEM, 0


def test_process_without_the_driver_open_holds_no_cuda(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Cuda.open(Uncertain(FakeGpuHost()))
    assert not driver.holds_cuda(sleeper.pid)
    monkeypatch.setattr("dynamo_elastic.snapshot.cuda_process._UVM", "/dev/null")
    # Its output goes to what now stands for the driver's device.
    with subprocess.Popen(["/bin/sleep", "600"], stdout=subprocess.DEVNULL) as other:
        with pytest.raises(CudaError, match="query"):
            driver.holds_cuda(other.pid)
        other.kill()
