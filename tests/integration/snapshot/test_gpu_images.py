"""Real CRIU and made-up GPUs: images of processes that hold CUDA as the driver leaves them."""

from __future__ import annotations

import fcntl
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from dynamo_elastic.errors import (
    ImagerError,
    NotQuiescent,
    ProcessesLost,
    SnapshotDamaged,
    SnapshotError,
    SnapshotMismatch,
)
from dynamo_elastic.failpoints import set_hook
from dynamo_elastic.snapshot.base import CudaOperation, CudaState, TakePhase, first_pid
from dynamo_elastic.snapshot.criu import Criu, find_criu
from dynamo_elastic.snapshot.gpu import Gpu
from dynamo_elastic.snapshot.manifest import Manifest
from dynamo_elastic.snapshot.namespace import PidNamespace, create_namespace, temporary_namespace
from dynamo_elastic.snapshot.process import alive, identify, kill_and_wait
from dynamo_elastic.testing.cuda import FakeGpuHost
from dynamo_elastic.testing.imager import GpuImager
from dynamo_elastic.testing.snapshot_world import (
    CLEAN,
    WAIT,
    SnapshotWorld,
    come_up,
    fake_gpu_host,
)

pytestmark = [pytest.mark.root, pytest.mark.criu]

_SHARED_BYTES = 8 << 20
# As libcuda leaves a process: with its listener, and its state in memory without a name.
PLANT = f"""
import mmap, os, socket
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(f"\\0cuda-uvmfd-4026531836-{{os.getpid()}}")
listener.listen()
state = mmap.mmap(-1, {_SHARED_BYTES})
state.write(os.urandom({_SHARED_BYTES}))
"""
UP = PLANT + come_up(CLEAN)
# As libcuda opens the memory of another process: it looks up where that is now.
FIND_LISTENER = """
import os, socket, sys
pid = sys.argv[1]
peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
peer.connect(f"\\0cuda-uvmfd-{os.stat(f'/proc/{pid}/ns/pid').st_ino}-{pid}")
"""


@pytest.fixture
def host() -> FakeGpuHost:
    return fake_gpu_host()


def make_world(root: Path, host: FakeGpuHost, criu: Criu, slot: int = 0) -> SnapshotWorld:
    gpu = Gpu(host, host)
    return SnapshotWorld(root, GpuImager(criu, host), gpu=gpu, real=True, slot=slot)


@pytest.fixture
def world(tmp_path: Path, host: FakeGpuHost) -> SnapshotWorld:
    return make_world(tmp_path, host, Criu.find())


@pytest.fixture
def namespace() -> Iterator[PidNamespace]:
    namespace = create_namespace()
    yield namespace
    namespace.end(timeout_s=10)


def whole(world: SnapshotWorld, *manifests: Manifest) -> bool:
    ids = {manifest.image_id for manifest in manifests}
    catalog = world.catalog
    sound = all(catalog.findings(image_id) == () for image_id in ids)
    return sound and set(catalog.entries()) == ids and catalog.partials() == ()


def no_process(root: Path) -> bool:
    """No process of these tests, be it a zombie or stopped, is left."""
    done = subprocess.run(["ps", "-eo", "stat,args"], capture_output=True, text=True, check=True)
    return not any(str(root) in line for line in done.stdout.splitlines())


def empties(namespace: PidNamespace) -> None:
    deadline = time.monotonic() + 5
    while namespace.processes():
        assert time.monotonic() < deadline, namespace.processes()
        time.sleep(0.01)


def test_goes_to_an_image_and_back(
    world: SnapshotWorld, host: FakeGpuHost, namespace: PidNamespace
) -> None:
    manifest = world.take(UP)
    assert manifest.gpu.processes == 1
    assert manifest.sizes.shared_bytes >= _SHARED_BYTES
    assert manifest.sizes.private_bytes > 1 << 20
    sizes = manifest.sizes
    kinds = (sizes.private_bytes, sizes.shared_bytes, sizes.cuda_bytes, sizes.other_bytes)
    assert sum(kinds) == manifest.size_bytes
    process = world.restore(manifest, namespace).process
    assert alive(process)
    assert host.state(process.pid) is CudaState.RUNNING


def test_every_process_of_a_tree_leaves_its_gpu_before_the_dump(
    tmp_path: Path, host: FakeGpuHost, namespace: PidNamespace
) -> None:
    gpu = Gpu(host, host)
    imager = GpuImager(Criu.find(), host)
    world = SnapshotWorld(tmp_path, imager, gpu=gpu, real=True, tree=True)
    manifest = world.take(f"import os; os.fork() or exec({WAIT!r})\n" + come_up(CLEAN))
    operations = [operation for operation, _ in host.calls]
    assert operations == [CudaOperation.LOCK] * 2 + [CudaOperation.CHECKPOINT] * 2
    assert manifest.gpu.processes == 2
    world.restore(manifest, namespace)
    processes = namespace.processes()
    assert len(processes) == 2
    assert {host.state(process.pid) for process in processes} == {CudaState.RUNNING}


def test_a_peer_finds_what_was_restored(world: SnapshotWorld, namespace: PidNamespace) -> None:
    manifest = world.take(UP)
    world.restore(manifest, namespace)
    peer = [sys.executable, "-I", "-S", "-c", FIND_LISTENER, str(manifest.root_pid)]
    with temporary_namespace({}) as other:
        world.restore(manifest, other)  # the first one lives: it has another name
        for place in (namespace, other):
            done = subprocess.run(place.enter(peer), capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
    assert whole(world, manifest)


def test_other_abstract_sockets_are_refused(world: SnapshotWorld) -> None:
    with pytest.raises(NotQuiescent, match="a listening unix socket @mine"):
        world.take(PLANT.replace("cuda-uvmfd", "mine") + come_up(CLEAN))
    assert whole(world)


def test_lock_on_a_file_is_taken_again(world: SnapshotWorld, namespace: PidNamespace) -> None:
    path = world.control_dir / "cache.lock"
    plant = f"""
import fcntl
held = open({str(path)!r}, "a"); fcntl.flock(held, fcntl.LOCK_EX)
"""
    manifest = world.take(plant + UP)
    path.touch(mode=0o600)

    def taken() -> bool:
        with path.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False

    assert not taken()
    restored = world.restore(manifest, namespace)
    assert taken()
    kill_and_wait(restored.process, timeout_s=5)
    assert not taken()


def test_slots_are_restored_side_by_side(tmp_path: Path, host: FakeGpuHost) -> None:
    worlds = [make_world(tmp_path, host, Criu.find(), slot) for slot in range(3)]
    manifests = [world.take(UP) for world in worlds]
    with ExitStack() as stack:
        namespace = create_namespace()
        stack.callback(namespace.end, timeout_s=10)
        pool = stack.enter_context(ThreadPoolExecutor(3))
        pairs = zip(worlds, manifests, strict=True)
        running = [pool.submit(world.restore, m, namespace) for world, m in pairs]
        processes = [future.result(timeout=30).process for future in running]
        assert all(map(alive, processes))
        states = {host.state(process.pid) for process in processes}
        assert states == {CudaState.RUNNING}


def killing(directory: Path, hook: str, victim: str = "$PPID") -> Criu:
    """A CRIU that ends `victim`, itself by default, at `hook`, which is one of its own."""
    script = directory / "hook.sh"
    script.write_text(f'#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" != {hook} ] || kill -9 {victim}\n')
    criu = directory / "criu.sh"
    criu.write_text(f'#!/bin/sh\nexec {find_criu({})} "$@" --action-script {script}\n')
    for path in (script, criu):
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    found = Criu.find()
    return Criu(criu, found.version(), page_server=found.page_server)


def test_criu_dies_in_the_middle_of_a_dump(tmp_path: Path, host: FakeGpuHost) -> None:
    world = make_world(tmp_path, host, killing(tmp_path, "post-dump"))
    with pytest.raises(ImagerError):
        world.take(UP)
    assert world.phases[-2:] == [TakePhase.DUMP, TakePhase.FAILED]
    assert whole(world)
    assert no_process(tmp_path)


def test_target_dies_in_the_middle_of_a_dump(tmp_path: Path, host: FakeGpuHost) -> None:
    world = make_world(tmp_path, host, killing(tmp_path, "pre-dump", str(first_pid(0))))
    with pytest.raises(SnapshotError):
        world.take(UP)
    assert world.phases[-2:] == [TakePhase.DUMP, TakePhase.FAILED]
    assert whole(world)
    assert no_process(tmp_path)


@pytest.mark.parametrize("hook", ["pre-restore", "post-restore", "post-resume"])
def test_criu_dies_in_the_middle_of_a_restore(
    tmp_path: Path, host: FakeGpuHost, namespace: PidNamespace, hook: str
) -> None:
    world = make_world(tmp_path, host, Criu.find())
    manifest = world.take(UP)
    broken = make_world(tmp_path, host, killing(tmp_path, hook))
    with pytest.raises(ImagerError):
        broken.restore(manifest, namespace)
    empties(namespace)  # the script that killed CRIU is ending, too
    assert whole(world, manifest)
    assert alive(world.restore(manifest, namespace).process)


@pytest.mark.parametrize("step", ["cuda.lock", "cuda.checkpoint", "take.frozen"])
def test_target_dies_while_its_image_is_made(
    world: SnapshotWorld, host: FakeGpuHost, tmp_path: Path, step: str
) -> None:
    def kill(name: str) -> None:
        if name == step:
            for pid in list(host.processes):
                process = identify(pid)
                assert process is not None
                kill_and_wait(process, timeout_s=5)
                del host.processes[pid]

    set_hook(kill)
    try:
        with pytest.raises(SnapshotError):
            world.take(UP)
    finally:
        set_hook(None)
    assert whole(world)
    assert no_process(tmp_path)


@pytest.mark.parametrize("step", ["restore.before_thaw", "cuda.restore", "cuda.unlock"])
def test_target_dies_while_it_comes_back(
    world: SnapshotWorld, host: FakeGpuHost, namespace: PidNamespace, step: str
) -> None:
    manifest = world.take(UP)

    def kill(name: str) -> None:
        if name == step:
            (process,) = namespace.processes()
            kill_and_wait(process, timeout_s=5)
            host.processes.clear()

    set_hook(kill)
    try:
        with pytest.raises(ProcessesLost):
            world.restore(manifest, namespace)
    finally:
        set_hook(None)
    assert namespace.processes() == ()
    assert whole(world, manifest)
    host.processes.clear()
    assert alive(world.restore(manifest, namespace).process)


def test_failed_thaw_leaves_the_namespace_empty(
    world: SnapshotWorld, host: FakeGpuHost, namespace: PidNamespace
) -> None:
    manifest = world.take(UP)

    def plant(name: str) -> None:
        if name == "cuda.restore":
            (process,) = host.processes.values()
            process.hangs_in.add(CudaOperation.RESTORE)

    set_hook(plant)
    try:
        with pytest.raises(ProcessesLost):
            world.restore(manifest, namespace)
    finally:
        set_hook(None)
    assert namespace.processes() == ()
    assert whole(world, manifest)


def test_full_disk_leaves_no_image(world: SnapshotWorld, tmp_path: Path) -> None:
    images = world.catalog.root
    images.mkdir(mode=0o700, exist_ok=True)
    options = f"size={_SHARED_BYTES // 2},mode=0700"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(images)], check=True)
    try:
        with pytest.raises(SnapshotError):
            world.take(UP)
        assert whole(world)
        assert no_process(tmp_path)
    finally:
        subprocess.run(["umount", "-l", str(images)], check=True)


def test_damaged_and_foreign_images_are_not_run(
    world: SnapshotWorld, namespace: PidNamespace
) -> None:
    manifest = world.take(UP)
    world.here = replace(world.here, gpu_driver="590.48.01", host_gpus="GPU-other")
    with pytest.raises(SnapshotMismatch) as caught:
        world.restore(manifest, namespace)
    assert [line.partition(":")[0] for line in caught.value.mismatches] == [
        "gpu_driver",
        "host_gpus",
    ]
    world.here = manifest.fingerprint
    directory = world.catalog.directory(manifest.image_id)
    pages = max(directory.glob("pages-*.img"), key=lambda path: path.stat().st_size)
    data = bytearray(pages.read_bytes())
    data[len(data) // 2] ^= 0xFF
    pages.write_bytes(data)
    with pytest.raises(SnapshotDamaged, match=pages.name):
        world.restore(manifest, namespace)
    assert namespace.processes() == ()
