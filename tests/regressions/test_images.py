"""Public reports about images: what must not be in one, and where one must not be run."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynamo_elastic.agent.images import Images
from dynamo_elastic.agent.rehearse import running_copy
from dynamo_elastic.errors import NotQuiescent, SnapshotMismatch
from dynamo_elastic.ipc import RpcClient
from dynamo_elastic.snapshot.catalog import Catalog
from dynamo_elastic.snapshot.criu import Criu
from dynamo_elastic.snapshot.gpu import Gpu
from dynamo_elastic.testing.deployments import deployment, standin_argv
from dynamo_elastic.testing.imager import FakeImager, GpuImager
from dynamo_elastic.testing.snapshot_world import CLEAN, SnapshotWorld, come_up, fake_gpu_host


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="de-") as made:
        monkeypatch.setattr(tempfile, "tempdir", made)
        yield Path(made)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[SnapshotWorld]:
    """Plain processes, a fake imager, and two made-up GPUs."""
    host = fake_gpu_host()
    world = SnapshotWorld(tmp_path, GpuImager(FakeImager(), host), gpu=Gpu(host, host))
    yield world
    world.close()


def images(directory: Path, *flags: str) -> Images:
    config = deployment(directory)
    return Images(config, Criu.find(), Catalog(config.snapshot.catalog), standin_argv(*flags))


@pytest.mark.root
@pytest.mark.criu
def test_no_port_is_in_an_image_and_each_copy_opens_its_own_socket(directory: Path) -> None:
    """dynamo#10665: a process that listens on a port is not made an image of, since the port may
    not be free where it is restored; what is restored binds its socket itself, every time."""
    with pytest.raises(NotQuiescent, match="listening TCP socket"):
        images(directory, "--socket").create(0)
    made = images(directory, "--mb", "4")
    manifest = made.create(0)

    async def answers() -> str:
        async with running_copy(made, manifest, timeout_s=30) as copy:
            client = RpcClient(copy.socket_path)
            try:
                status = await client.call("status", {}, timeout_s=5.0)
            finally:
                await client.close()
            return str(status["incarnation"])

    assert len({asyncio.run(answers()) for _ in range(2)}) == 2


SEMAPHORE = """
import multiprocessing
held = multiprocessing.get_context("spawn").Semaphore()
"""


def test_a_semaphore_in_shared_memory_is_refused(world: SnapshotWorld) -> None:
    """criu#2980: a deleted file of /dev/shm, as every semaphore of multiprocessing is, would make
    an image that can be restored once only: it is refused, by name, before anything is dumped."""
    with pytest.raises(NotQuiescent, match="/dev/shm/sem"):
        world.take(SEMAPHORE + come_up(CLEAN))
    assert world.catalog.entries() == {}
    assert world.catalog.partials() == ()


@pytest.mark.root
@pytest.mark.criu
def test_an_image_is_restored_again_and_again(directory: Path) -> None:
    """criu#2980: no restore changes its image: every byte of it is as it was, and the next restore
    of it works."""
    made = images(directory, "--mb", "4")
    manifest = made.create(0)

    async def run() -> None:
        async with running_copy(made, manifest, timeout_s=30):
            return

    for _ in range(2):
        asyncio.run(run())
        made.catalog.verify(manifest)


@pytest.mark.parametrize(
    ("field", "there"),
    [
        ("gpu_model", "NVIDIA L4 8.9"),
        ("host_gpus", "GPU-1, GPU-0"),
        ("host_gpus", "GPU-0"),
        ("host_gpus", "GPU-0, GPU-1, GPU-2"),
        ("gpu", "GPU-7"),
    ],
)
def test_other_gpus_than_those_of_the_image_are_found_out_before_anything_runs(
    world: SnapshotWorld, monkeypatch: pytest.MonkeyPatch, field: str, there: str
) -> None:
    """cuda-checkpoint#18: type, order and number of the GPUs must be those of the image; a host on
    which they differ is told so, line by line, and no process is started."""
    world.here = replace(world.here, gpu_model="NVIDIA H200 9.0", host_gpus="GPU-0, GPU-1")
    manifest = world.take(come_up(CLEAN))

    def never(*_: object, **__: object) -> None:
        raise AssertionError("something of the image was run")

    monkeypatch.setattr(world.imager, "restore", never)
    change: dict[str, Any] = {field: there}
    world.here = replace(world.here, **change)
    with pytest.raises(SnapshotMismatch) as caught:
        world.restore(manifest)
    (line,) = caught.value.mismatches
    assert line.startswith(f"{field}: ")
