"""Real CRIU, a real torch process: what is restored computes the same and is somebody new."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from dynamo_elastic.agent.images import Images
from dynamo_elastic.agent.rehearse import rehearse
from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.errors import (
    EngineError,
    ImagerError,
    NotQuiescent,
    SnapshotDamaged,
    SnapshotError,
    SnapshotMismatch,
)
from dynamo_elastic.snapshot.base import TakePhase
from dynamo_elastic.snapshot.catalog import Catalog
from dynamo_elastic.snapshot.criu import Criu
from dynamo_elastic.snapshot.namespace import create_namespace
from dynamo_elastic.snapshot.process import alive, kill_and_wait
from dynamo_elastic.testing.deployments import deployment, standin_argv
from dynamo_elastic.testing.gpu_world import wait_for_process

pytestmark = [pytest.mark.root, pytest.mark.criu]


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeploymentConfig]:
    with tempfile.TemporaryDirectory(prefix="de-") as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield deployment(Path(directory))
        assert _traces(directory) == set()


def _traces(directory: str) -> set[str]:
    """What a snapshot could leave behind: processes, mounts, temporary directories."""
    processes = subprocess.run(
        ["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True
    )
    lines = [*processes.stdout.splitlines(), *Path("/proc/self/mounts").read_text().splitlines()]
    found = {line for line in lines if directory in line}
    return found | {str(p) for p in Path(directory).glob("dynamo-elastic-*")}


def open_images(config: DeploymentConfig, *flags: str) -> Images:
    return Images(config, Criu.find(), Catalog(config.snapshot.catalog), standin_argv(*flags))


def test_image_is_made_and_runs(config: DeploymentConfig) -> None:
    images = open_images(config, "--torch")
    manifest = images.create(1)
    assert manifest.root_pid == 2000
    assert manifest.pages_bytes > 50 << 20
    assert manifest.engine["probe"]
    assert images.newest(1) == manifest.image_id
    assert "no image of slot 0" in str(images.obstacle(0))
    for _ in range(2):
        timings = asyncio.run(rehearse(images, manifest, timeout_s=30))
        assert timings["ready"] < 30


@pytest.mark.parametrize(
    ("flag", "reason"), [("--socket", "listening TCP socket"), ("--child", "child process")]
)
def test_foreign_descriptors_are_refused(config: DeploymentConfig, flag: str, reason: str) -> None:
    images = open_images(config, flag)
    with pytest.raises(NotQuiescent, match=reason):
        images.create(0)
    assert images.catalog.entries() == {}


def test_engine_that_crashes_leaves_no_image(config: DeploymentConfig) -> None:
    with pytest.raises(SnapshotError, match="planted crash"):
        open_images(config, "--crash").create(0)


def test_engine_that_ends_as_it_is_looked_at_leaves_no_image(config: DeploymentConfig) -> None:
    def end_it(_: int, phase: TakePhase) -> None:
        if phase is TakePhase.FREEZE:
            engine = wait_for_process("standin_engine", str(config.control_dir(0)), timeout_s=5)
            kill_and_wait(engine, timeout_s=5)

    images = open_images(config)
    with pytest.raises(SnapshotError, match="ended as its image was made"):
        images.create(0, end_it)
    assert images.catalog.entries() == {}


def test_image_of_another_model_is_not_run(config: DeploymentConfig) -> None:
    images = open_images(config)
    manifest = images.create(0)
    (config.model.path / "config.json").write_text("{}")
    assert "model" in str(images.obstacle(0))
    with pytest.raises(SnapshotMismatch, match="model"):
        asyncio.run(rehearse(images, manifest, timeout_s=30))


@pytest.mark.parametrize("name", ["pages-1.img", "core-1000.img"])
def test_damaged_image_is_not_run(config: DeploymentConfig, name: str) -> None:
    images = open_images(config)
    manifest = images.create(0)
    path = images.catalog.directory(manifest.image_id) / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(SnapshotDamaged, match=name):
        asyncio.run(rehearse(images, manifest, timeout_s=30))
    path.unlink()
    with pytest.raises(SnapshotDamaged, match=name):
        asyncio.run(rehearse(images, manifest, timeout_s=30))


def test_copy_that_does_not_answer_is_ended(config: DeploymentConfig) -> None:
    images = open_images(config, "--mute")
    manifest = images.create(0)
    with pytest.raises(EngineError, match="not ready in time"):
        asyncio.run(rehearse(images, manifest, timeout_s=1.0))


def test_restore_that_takes_too_long_leaves_nothing(config: DeploymentConfig) -> None:
    images = open_images(config, "--mb", "256")
    manifest = images.create(0)
    namespace = create_namespace()
    try:
        for timeout_s in (0.01, 0.03, 0.05, 0.07, 0.09):
            with suppress(ImagerError):
                restored = images.restore_image(manifest, namespace, timeout_s=timeout_s)
                kill_and_wait(restored.process, timeout_s=5)
            assert namespace.processes() == ()
        with pytest.raises(ImagerError, match="no end after"):
            images.restore_image(manifest, namespace, timeout_s=0.01)
        assert alive(images.restore_image(manifest, namespace, timeout_s=30).process)
    finally:
        namespace.end(timeout_s=5)


def test_new_image_takes_the_place_of_the_old(config: DeploymentConfig) -> None:
    images = open_images(config)
    kept = images.create(1)
    old = images.create(0)
    with pytest.raises(SnapshotError):
        open_images(config, "--crash").create(0)
    assert old.image_id in images.catalog.entries()
    new = images.create(0)
    assert set(images.catalog.entries()) == {kept.image_id, new.image_id}


def test_environment_is_by_allow_list(
    config: DeploymentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    images = open_images(config)
    manifest = images.create(0)
    directory = images.catalog.directory(manifest.image_id)
    assert os.environ["SECRET_TOKEN"] == "hunter2"
    assert not any(b"hunter2" in p.read_bytes() for p in directory.iterdir())
