"""Parking: what is refused, what is proven, what is left after each failure."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from dynamo_elastic.errors import (
    CudaError,
    CudaTimeout,
    EngineGone,
    GpuMemoryShort,
    NotQuiescent,
    ProcessesLost,
    ResourceMissing,
)
from dynamo_elastic.snapshot.base import CudaOperation, CudaState
from dynamo_elastic.snapshot.cuda_findings import IPC_CACHE
from dynamo_elastic.snapshot.gpu import NoGpu
from dynamo_elastic.snapshot.park import ParkedReport, park, unpark
from dynamo_elastic.snapshot.process import (
    ProcessRef,
    alive,
    children_of,
    identify,
    kill_and_wait,
)
from dynamo_elastic.testing.cuda import GIB, FakeCudaProcess, FakeGpuHost, fake_gpus
from dynamo_elastic.testing.snapshot_world import CLEAN


class SlowToRelease(FakeGpuHost):
    """NVML shows the memory of a checkpointed process for as many looks as `looks`."""

    looks = 0

    def devices_of(self, pid: int) -> dict[str, int | None]:
        if self.processes[pid].state is CudaState.CHECKPOINTED and self.looks:
            self.looks -= 1
            return {self.gpus()[0].uuid: 22 << 20}
        return dict(super().devices_of(pid))


@dataclass
class Engine:
    """A shell and its child on one GPU each."""

    process: ProcessRef
    child: ProcessRef
    host: SlowToRelease

    def park(self, timeout_s: float = 1) -> ParkedReport:
        return park(self.process, self.host, self.host, engine=CLEAN, timeout_s=timeout_s)

    def unpark(self, parked: ParkedReport, gpu_map: dict[str, str] | None = None) -> None:
        unpark(parked, self.host, self.host, gpu_map=gpu_map, timeout_s=1)

    @property
    def cuda(self) -> FakeCudaProcess:
        return self.host.processes[self.process.pid]

    def states(self) -> set[CudaState]:
        return {process.state for process in self.host.processes.values()}


def start(environment: dict[str, str]) -> subprocess.Popen[bytes]:
    # It has its child once it answers.
    script = "sleep 600 & echo; exec sleep 600"
    shell = subprocess.Popen(
        ["/bin/sh", "-c", script],
        env={"PATH": "/usr/bin:/bin", **environment},
        stdout=subprocess.PIPE,
    )
    assert shell.stdout is not None
    shell.stdout.readline()
    for pid in (shell.pid, children_of(shell.pid)[0]):
        until_asleep(pid)
    return shell


def until_asleep(pid: int) -> None:
    """It is the program that it becomes: until then its environment may read as empty."""
    deadline_s = time.monotonic() + 5
    while not Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sleep\0"):
        assert time.monotonic() < deadline_s
        os.sched_yield()


def engine_of(shell: subprocess.Popen[bytes]) -> Engine:
    process = identify(shell.pid)
    child = identify(children_of(shell.pid)[0])
    assert process is not None
    assert child is not None
    host = SlowToRelease(fake_gpus(2, total_bytes=10 * GIB))
    host.start(process.pid, used_bytes=4 * GIB, gpu=0)
    host.start(child.pid, used_bytes=1 * GIB, gpu=1)
    return Engine(process, child, host)


@contextmanager
def running(environment: dict[str, str]) -> Iterator[Engine]:
    with start(environment) as shell:
        engine = engine_of(shell)
        yield engine
        for process in (engine.child, engine.process):
            kill_and_wait(process, timeout_s=5)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with running({IPC_CACHE: "n"}) as engine:
        yield engine


def test_parked_tree_holds_no_gpu_and_comes_back(engine: Engine) -> None:
    first, second = (gpu.uuid for gpu in engine.host.gpus())
    parked = engine.park()
    assert parked.frozen == (engine.process, engine.child)
    assert parked.device_bytes == {first: 4 * GIB, second: 1 * GIB}
    assert parked.gpu_bytes == 0
    assert parked.host_bytes > 0
    assert set(parked.timings_s) == {"lock", "checkpoint", "release"}
    assert [gpu.free_bytes for gpu in engine.host.gpus()] == [10 * GIB, 10 * GIB]
    engine.unpark(parked)
    assert engine.states() == {CudaState.RUNNING}
    assert [gpu.free_bytes for gpu in engine.host.gpus()] == [6 * GIB, 9 * GIB]


def test_process_without_cuda_is_parked_by_doing_nothing(engine: Engine) -> None:
    none = NoGpu()
    parked = park(engine.process, none, none, engine=CLEAN, timeout_s=1)
    assert (parked.frozen, parked.gpu_bytes, parked.device_bytes) == ((), 0, {})
    unpark(parked, none, none, timeout_s=1)
    assert alive(engine.process)


def test_without_numbers_of_nvml_the_release_is_unknown(engine: Engine) -> None:
    engine.host.lists_processes = False
    parked = engine.park()
    assert parked.gpu_bytes is None
    engine.unpark(parked)


def test_engine_that_keeps_ipc_imports_cached_is_refused_before_it_is_locked() -> None:
    with running({}) as engine:
        with pytest.raises(NotQuiescent, match=IPC_CACHE):
            engine.park()
        assert engine.host.calls == []


def test_engine_that_says_it_holds_imports_is_refused(engine: Engine) -> None:
    said = {"cuda": {**CLEAN["cuda"], "ipc_imports": 1}}
    with pytest.raises(NotQuiescent, match="imported from other processes"):
        park(engine.process, engine.host, engine.host, engine=said, timeout_s=1)
    assert engine.host.calls == []


def test_busy_engine_runs_on(engine: Engine) -> None:
    engine.cuda.busy = True
    with pytest.raises(CudaTimeout):
        engine.park()
    assert alive(engine.process)
    assert engine.states() == {CudaState.RUNNING}


def test_failed_checkpoint_kills(engine: Engine) -> None:
    engine.cuda.fails_in[CudaOperation.CHECKPOINT] = ("CUDA_ERROR_UNKNOWN", CudaState.FAILED)
    with pytest.raises(ProcessesLost):
        engine.park()
    assert not alive(engine.process)


def test_memory_is_waited_for_and_what_never_goes_is_an_error(engine: Engine) -> None:
    engine.host.looks = 6
    parked = engine.park()
    assert engine.host.looks == 0
    engine.unpark(parked)
    engine.host.looks = 1_000_000
    with pytest.raises(ProcessesLost, match="stayed on the GPU"):
        engine.park(timeout_s=0.1)
    assert not alive(engine.process)
    assert not alive(engine.child)


def test_too_little_memory_leaves_it_parked_until_there_is(engine: Engine) -> None:
    parked = engine.park()
    engine.host.start(1 << 22, used_bytes=8 * GIB)
    with pytest.raises(GpuMemoryShort) as caught:
        engine.unpark(parked)
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (4 * GIB, 2 * GIB)
    assert engine.cuda.state is CudaState.CHECKPOINTED
    del engine.host.processes[1 << 22]
    engine.unpark(parked)
    assert engine.states() == {CudaState.RUNNING}


def test_on_another_gpu_the_memory_there_counts(engine: Engine) -> None:
    first, second = (gpu.uuid for gpu in engine.host.gpus())
    swapped = {first: second, second: first}
    parked = engine.park()
    engine.host.start(1 << 22, used_bytes=7 * GIB, gpu=1)
    with pytest.raises(GpuMemoryShort) as caught:
        engine.unpark(parked, swapped)
    assert caught.value.uuid == second
    engine.host.processes.pop(1 << 22)
    engine.unpark(parked, swapped)
    assert engine.host.devices_of(engine.process.pid) == {second: 4 * GIB}


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({0: 1}, "is missing"),
        ({0: 1, 1: 1}, "two GPUs go to one place"),
        ({0: 1, 1: 0, 2: 2}, "is no GPU of this host"),
    ],
)
def test_map_that_is_no_permutation_is_refused_and_costs_nothing(
    engine: Engine, wrong: dict[int, int], reason: str
) -> None:
    uuids = [*(gpu.uuid for gpu in engine.host.gpus()), "GPU-of-another-host"]
    parked = engine.park()
    with pytest.raises(CudaError, match=reason):
        engine.unpark(parked, {uuids[old]: uuids[new] for old, new in wrong.items()})
    assert alive(engine.process)
    engine.unpark(parked)


def test_driver_that_can_not_move_processes_is_told_before_it_tries(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (gpu.uuid for gpu in engine.host.gpus())
    old = replace(engine.host.capabilities(), gpu_map=False)
    monkeypatch.setattr(engine.host, "capabilities", lambda: old)
    parked = engine.park()
    with pytest.raises(ResourceMissing, match="can't move"):
        engine.unpark(parked, {first: second, second: first})
    assert alive(engine.process)
    engine.unpark(parked, {first: first, second: second})
    assert engine.states() == {CudaState.RUNNING}


def test_gpu_that_is_gone_is_named(engine: Engine) -> None:
    parked = engine.park()
    left = FakeGpuHost(fake_gpus(1))
    with pytest.raises(ResourceMissing, match="this host has no GPU"):
        unpark(parked, engine.host, left, timeout_s=1)
    assert alive(engine.process)


def test_failed_restore_is_not_tried_again(engine: Engine) -> None:
    engine.cuda.ipc_imports = 1
    parked = engine.park()
    with pytest.raises(ProcessesLost, match="CUDA_ERROR_OPERATING_SYSTEM"):
        engine.unpark(parked)
    assert not alive(engine.process)
    with pytest.raises(EngineGone):
        engine.unpark(parked)
    assert [operation for operation, _ in engine.host.calls].count(CudaOperation.RESTORE) == 1


def test_one_that_died_while_parked_is_told(engine: Engine) -> None:
    parked = engine.park()
    kill_and_wait(engine.child, timeout_s=5)
    with pytest.raises(EngineGone, match=str(engine.child.pid)):
        engine.unpark(parked)
    assert engine.cuda.state is CudaState.CHECKPOINTED
