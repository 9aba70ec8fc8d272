"""What may not leave a GPU, and what may not come back to it: refused, and named."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from dynamo_elastic.agent.base import Tier
from dynamo_elastic.agent.rehearse import rehearse
from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.errors import (
    EngineError,
    NotQuiescent,
    SnapshotDamaged,
    SnapshotError,
    SnapshotMismatch,
)
from dynamo_elastic.snapshot.manifest import MANIFEST_FILE, encode
from dynamo_elastic.testing import gpu_hog
from dynamo_elastic.testing.deployments import asyncio_test, deployment
from dynamo_elastic.testing.gpu_agent import GpuAgent
from dynamo_elastic.testing.gpu_settings import Fault
from dynamo_elastic.testing.gpu_world import SIZES, image_of, images_of, world

pytestmark = [pytest.mark.gpu(1), pytest.mark.root, pytest.mark.criu]

_LEFT_BYTES = 256 << 20


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (Fault.MANAGED, "managed memory"),
        (Fault.MULTICAST, "multicast"),
        (Fault.IPC_IMPORT, "imported from other processes"),
        (Fault.NCCL, "NCCL is alive"),
        (Fault.NIXL, "UCX"),
    ],
)
def test_what_would_not_come_back_is_refused_and_named(fault: Fault, named: str) -> None:
    if fault is Fault.NIXL and importlib.util.find_spec("nixl_cu13") is None:
        pytest.skip("needs the NIXL wheel")
    config = world()
    images = images_of(config, fault)
    before = set(images.catalog.entries())
    with pytest.raises(NotQuiescent, match=named):
        images.create(0)
    assert set(images.catalog.entries()) == before


@asyncio_test
async def test_an_engine_that_may_not_be_parked_is_ended() -> None:
    async with GpuAgent(world(), **SIZES, fault=Fault.NCCL) as agent:
        started = await agent.start(0, Tier.COLD)
        with pytest.raises(EngineError, match="NCCL is alive"):
            await agent.park(started)
        (slot,) = await agent.client.slots()
        assert slot.pid == 0


@contextmanager
def hog(left_bytes: int) -> Iterator[None]:
    """Another process has all memory of the first GPU but `left_bytes`."""
    argv = [sys.executable, "-m", gpu_hog.__name__, str(left_bytes)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline().strip() == "ready"
            yield
        finally:
            other.kill()


@asyncio_test
async def test_no_gpu_memory_for_what_is_to_come_back() -> None:
    config = world()
    await asyncio.to_thread(image_of, config)
    async with GpuAgent(config, **SIZES) as agent:
        started = await agent.start(0, Tier.IMAGE)
        await agent.park(started)
        with hog(_LEFT_BYTES):
            with pytest.raises(EngineError, match="bytes free"):
                await agent.start(0, Tier.PARKED)
            with pytest.raises(EngineError, match="bytes free"):
                await agent.start(0, Tier.IMAGE)
        await agent.probe(await agent.start(0), host=True)


def test_a_full_disk_leaves_no_image() -> None:
    with tempfile.TemporaryDirectory(prefix="de-gpu-") as directory:
        images = Path(directory) / "images"
        images.mkdir(mode=0o700)
        mount = ["mount", "-t", "tmpfs", "-o", "size=128m,mode=0700", "tmpfs", str(images)]
        subprocess.run(mount, check=True, timeout=10)
        try:
            made = images_of(deployment(Path(directory), slots=1))
            with pytest.raises(SnapshotError):
                made.create(0)
            assert made.catalog.entries() == {}
            assert made.catalog.partials() == ()
        finally:
            subprocess.run(["umount", "-l", str(images)], check=True, timeout=10)


@contextmanager
def changed(path: Path, data: bytes) -> Iterator[None]:
    """`path` holds `data` for a while."""
    before = path.read_bytes()
    path.write_bytes(data)
    try:
        yield
    finally:
        path.write_bytes(before)


def largest(directory: Path) -> Path:
    return max(directory.glob("pages-*.img"), key=lambda path: path.stat().st_size)


def restore(config: DeploymentConfig) -> None:
    images = images_of(config)
    (manifest,) = images.catalog.manifests()
    asyncio.run(rehearse(images, manifest, timeout_s=60))


def test_a_damaged_image_is_not_run() -> None:
    config = world()
    manifest = image_of(config)
    path = largest(images_of(config).catalog.directory(manifest.image_id))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    with changed(path, bytes(data)), pytest.raises(SnapshotDamaged, match=path.name):
        restore(config)
    restore(config)


def test_an_image_of_another_driver_is_not_run() -> None:
    config = world()
    manifest = image_of(config)
    path = images_of(config).catalog.directory(manifest.image_id) / MANIFEST_FILE
    foreign = replace(manifest, fingerprint=replace(manifest.fingerprint, gpu_driver="999.1"))
    with changed(path, encode(foreign)), pytest.raises(SnapshotMismatch, match=r"gpu_driver.*999"):
        restore(config)
