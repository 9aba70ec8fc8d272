"""An image that was on a GPU is kept only if it has come back from there once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynamo_elastic.agent import open_images as module
from dynamo_elastic.agent.images import Images
from dynamo_elastic.agent.open_images import create_images, images_or_reason
from dynamo_elastic.errors import EngineError, SnapshotNotFound
from dynamo_elastic.snapshot.catalog import Catalog
from dynamo_elastic.snapshot.manifest import GpuState, Manifest
from dynamo_elastic.testing.deployments import deployment
from dynamo_elastic.testing.imager import FakeImager
from dynamo_elastic.testing.snapshots import publish_image


class Made(Images):
    """Images that are made at once, of engines with so many CUDA processes."""

    processes = 0

    def create(self, slot: int, progress: Any = None) -> Manifest:
        manifest = publish_image(self.catalog, f"slot{slot}-new", slot=slot)
        return replace(manifest, gpu=GpuState(self.processes))


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    config = deployment(tmp_path)
    made = Made(config, FakeImager(), Catalog(config.snapshot.catalog))
    monkeypatch.setattr(module, "open_images", lambda _: made)
    return made


@pytest.mark.parametrize("processes", [0, 1])
def test_what_was_on_a_gpu_is_tried(
    images: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    tried: list[str] = []

    async def rehearse(_: Images, manifest: Manifest, *, timeout_s: float) -> dict[str, float]:
        tried.append(manifest.image_id)
        return {}

    monkeypatch.setattr(module, "rehearse", rehearse)
    images.processes = processes
    create_images(deployment(tmp_path), (0, 1))
    assert tried == ["slot0-new", "slot1-new"] * processes


def test_what_does_not_come_back_is_no_image(
    images: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def rehearse(_: Images, manifest: Manifest, *, timeout_s: float) -> dict[str, float]:
        raise EngineError("the engine was not ready in time")

    monkeypatch.setattr(module, "rehearse", rehearse)
    images.processes = 1
    with pytest.raises(EngineError, match="not ready"):
        create_images(deployment(tmp_path), (0,))
    with pytest.raises(SnapshotNotFound):
        images.catalog.inspect("slot0-new")


def test_images_that_are_off_are_a_reason(tmp_path: Path) -> None:
    off = images_or_reason(deployment(tmp_path, snapshot={"enabled": False}))
    obstacle = off.obstacle(0)
    assert obstacle is not None
    assert (obstacle.why, str(obstacle)) == ("disabled", "snapshots are off (snapshot.enabled)")
