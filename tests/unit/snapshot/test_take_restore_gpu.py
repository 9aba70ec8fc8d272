"""Images of processes that hold CUDA, over a fake imager and made-up GPUs: the order of things, and
what is left after each failure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import pytest

from dynamo_elastic.errors import (
    CudaTimeout,
    GpuMemoryShort,
    ImagerError,
    NotQuiescent,
    ProcessesLost,
    ResourceMissing,
    SnapshotMismatch,
)
from dynamo_elastic.failpoints import set_hook
from dynamo_elastic.snapshot.base import CudaOperation, CudaState, RestorePhase, TakePhase
from dynamo_elastic.snapshot.gpu import NO_GPU, Gpu
from dynamo_elastic.snapshot.process import ProcessRef, alive, identify
from dynamo_elastic.testing.cuda import CODES, GIB, FakeCudaProcess, FakeGpuHost
from dynamo_elastic.testing.imager import FakeImager, GpuImager
from dynamo_elastic.testing.snapshot_world import (
    CLEAN,
    SnapshotWorld,
    come_up,
    fake_gpu_host,
)

UP = come_up(CLEAN)
_Op = CudaOperation
Change = Callable[[FakeCudaProcess], object]
Plant = Callable[[Change], None]


@pytest.fixture
def host() -> FakeGpuHost:
    return fake_gpu_host()


@pytest.fixture
def world(tmp_path: Path, host: FakeGpuHost) -> Iterator[SnapshotWorld]:
    world = SnapshotWorld(tmp_path, GpuImager(FakeImager(), host), gpu=Gpu(host, host))
    yield world
    world.close()


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch, host: FakeGpuHost) -> Plant:
    """Changes the process as soon as it holds CUDA."""

    def planted(change: Change) -> None:
        start = host.start

        def changed(pid: int, used_bytes: int = GIB, *, gpu: int = 0) -> FakeCudaProcess:
            process = start(pid, used_bytes, gpu=gpu)
            change(process)
            return process

        monkeypatch.setattr(host, "start", changed)

    return planted


def remembered(host: FakeGpuHost) -> list[ProcessRef]:
    return [p for pid in host.processes if (p := identify(pid)) is not None]


def test_image_says_what_was_on_the_gpu_and_goes_back_there(
    world: SnapshotWorld, host: FakeGpuHost
) -> None:
    manifest = world.take(UP)
    assert [operation for operation, _ in host.calls] == [_Op.LOCK, _Op.CHECKPOINT]
    assert manifest.gpu.processes == 1
    assert manifest.gpu.device_bytes == {host.gpus()[0].uuid: GIB}
    sizes = manifest.sizes
    kinds = (sizes.private_bytes, sizes.shared_bytes, sizes.cuda_bytes, sizes.other_bytes)
    assert sum(kinds) == manifest.size_bytes
    assert manifest.timings_s.keys() >= {"freeze", "dump"}

    restored = world.restore(manifest)
    assert [operation for operation, _ in host.calls[2:]] == [_Op.RESTORE, _Op.UNLOCK]
    assert host.processes[restored.process.pid].state is CudaState.RUNNING
    assert restored.timings_s.keys() >= {"restore", "thaw"}
    assert world.phases[-3:] == [RestorePhase.RESTORE, RestorePhase.THAW, RestorePhase.DONE]


@pytest.mark.parametrize(
    ("report", "reason"),
    [
        ({}, "does not say what it holds"),
        ({"cuda": {**CLEAN["cuda"], "multicast": 1}}, "1 multicast objects"),
        ({"cuda": {**CLEAN["cuda"], "ipc_imports": 3}}, "imported from other processes"),
        ({"cuda": {**CLEAN["cuda"], "managed_bytes": 4096}}, "managed memory"),
    ],
)
def test_what_the_engine_says_of_itself_is_refused(
    world: SnapshotWorld, host: FakeGpuHost, report: dict[str, object], reason: str
) -> None:
    with pytest.raises(NotQuiescent, match=reason):
        world.take(come_up(report))
    assert host.calls == []
    assert world.catalog.entries() == {}


def test_engine_on_a_gpu_that_nobody_looks_for_is_not_dumped(world: SnapshotWorld) -> None:
    world.gpu = NO_GPU
    with pytest.raises(ImagerError, match="/dev/nvidia0"):
        world.take(UP)
    assert world.catalog.entries() == {}


def hangs(operation: CudaOperation) -> Change:
    return lambda process: process.hangs_in.add(operation)


def fails(operation: CudaOperation, name: str, left: CudaState) -> Change:
    return lambda process: process.fails_in.update({operation: (name, left)})


def busy(process: FakeCudaProcess) -> None:
    process.busy = True


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (busy, CudaTimeout),
        (hangs(_Op.CHECKPOINT), ProcessesLost),
        (fails(_Op.CHECKPOINT, "CUDA_ERROR_UNKNOWN", CudaState.FAILED), ProcessesLost),
        (fails(_Op.LOCK, "CUDA_ERROR_UNKNOWN", CudaState.FAILED), ProcessesLost),
    ],
)
def test_failed_freeze_leaves_nothing(
    world: SnapshotWorld,
    host: FakeGpuHost,
    plant: Plant,
    change: Change,
    error: type[Exception],
) -> None:
    plant(change)
    with pytest.raises(error):
        world.take(UP)
    assert world.phases[-2:] == [TakePhase.FREEZE, TakePhase.FAILED]
    assert world.catalog.entries() == {}
    assert world.catalog.partials() == ()
    assert remembered(host) == []


def test_failed_thaw_leaves_nothing_running_and_the_image_whole(
    world: SnapshotWorld, host: FakeGpuHost, plant: Plant
) -> None:
    def import_open(process: FakeCudaProcess) -> None:
        process.ipc_imports = 1

    plant(import_open)
    manifest = world.take(UP)
    with pytest.raises(ProcessesLost, match="CUDA_ERROR_OPERATING_SYSTEM"):
        world.restore(manifest)
    assert world.phases[-2:] == [RestorePhase.THAW, RestorePhase.FAILED]
    assert remembered(host) == []
    assert world.catalog.findings(manifest.image_id) == ()


@pytest.mark.parametrize("operation", [_Op.RESTORE, _Op.UNLOCK])
@pytest.mark.parametrize("name", sorted(CODES))
def test_any_error_in_thaw_ends_the_process(
    world: SnapshotWorld, host: FakeGpuHost, plant: Plant, operation: CudaOperation, name: str
) -> None:
    left = CudaState.CHECKPOINTED if operation is _Op.RESTORE else CudaState.LOCKED
    plant(fails(operation, name, left))
    manifest = world.take(UP)
    with pytest.raises(ProcessesLost, match=name):
        world.restore(manifest)
    assert remembered(host) == []


def test_restore_that_hangs_ends_at_the_deadline(
    world: SnapshotWorld, host: FakeGpuHost, plant: Plant
) -> None:
    plant(hangs(_Op.RESTORE))
    manifest = world.take(UP)
    with pytest.raises(ProcessesLost):
        world.restore(manifest)
    assert remembered(host) == []


def test_cuda_that_is_lost_on_the_way_is_noticed(
    world: SnapshotWorld, host: FakeGpuHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = world.take(UP)
    restored: list[ProcessRef] = []

    def forgets(pid: int) -> bool:
        process = identify(pid)
        assert process is not None
        restored.append(process)
        return False

    monkeypatch.setattr(host, "holds_cuda", forgets)
    with pytest.raises(ProcessesLost, match="1 held CUDA when the image was made, 0 do"):
        world.restore(manifest)
    assert len(restored) == 1
    assert not alive(restored[0])


def never(*_: object, **__: object) -> ProcessRef:
    raise AssertionError("the imager was asked")


def test_too_little_memory_is_seen_before_anything_runs(
    world: SnapshotWorld, host: FakeGpuHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = world.take(UP)
    host.start(1 << 22, used_bytes=host.gpus()[0].total_bytes - 1)
    monkeypatch.setattr(world.imager, "restore", never)
    with pytest.raises(GpuMemoryShort) as caught:
        world.restore(manifest)
    assert caught.value.needed_bytes == GIB
    world.gpu = NO_GPU
    with pytest.raises(ResourceMissing, match="this host has no GPU"):
        world.restore(manifest)


def test_another_driver_touches_no_process(
    world: SnapshotWorld, host: FakeGpuHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.here = replace(world.here, gpu_driver="580.159.04")
    manifest = world.take(UP)
    host.calls.clear()
    monkeypatch.setattr(world.imager, "restore", never)
    world.here = replace(world.here, gpu_driver="590.48.01")
    with pytest.raises(SnapshotMismatch) as caught:
        world.restore(manifest)
    (line,) = caught.value.mismatches
    assert line == "gpu_driver: the image has 580.159.04, here is 590.48.01"
    assert host.calls == []


def test_failpoints_stand_at_every_step(world: SnapshotWorld) -> None:
    seen: list[str] = []
    set_hook(seen.append)
    try:
        world.restore(world.take(UP))
    finally:
        set_hook(None)
    steps = [name for name in seen if not name.startswith("catalog.")]
    assert steps == [
        *("take.boot", "take.inspect", "take.freeze"),
        *("cuda.lock", "cuda.checkpoint", "take.frozen", "take.dump", "take.dumped", "take.store"),
        *("restore.compare", "restore.verify", "restore.restore", "restore.thaw"),
        *("restore.before_thaw", "cuda.restore", "cuda.unlock", "restore.thawed"),
    ]


@pytest.mark.parametrize("step", ["take.frozen", "take.dumped", "restore.before_thaw"])
def test_interrupt_at_a_step_leaves_nothing(
    world: SnapshotWorld, host: FakeGpuHost, step: str
) -> None:
    def interrupt(name: str) -> None:
        if name == step:
            raise KeyboardInterrupt

    set_hook(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            world.restore(world.take(UP))
    finally:
        set_hook(None)
    assert remembered(host) == []
    assert world.catalog.partials() == ()


def test_restores_of_several_images_run_side_by_side(tmp_path: Path, host: FakeGpuHost) -> None:
    together = Barrier(3, timeout=10)

    def meet(name: str) -> None:
        if name == "restore.before_thaw":
            together.wait()

    worlds = [
        SnapshotWorld(tmp_path, GpuImager(FakeImager(), host), gpu=Gpu(host, host), slot=slot)
        for slot in range(3)
    ]
    manifests = [world.take(UP) for world in worlds]
    set_hook(meet)
    try:
        with ThreadPoolExecutor(3) as pool:
            pairs = zip(worlds, manifests, strict=True)
            running = [pool.submit(world.restore, manifest) for world, manifest in pairs]
            restored = [future.result(timeout=20) for future in running]
    finally:
        set_hook(None)
        for world in worlds:
            world.close()
    assert len({r.process.pid for r in restored}) == 3
