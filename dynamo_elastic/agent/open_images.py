"""Opening the images of a deployment on this host, and making those that are missing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from dynamo_elastic.agent.boot import EngineArgv
from dynamo_elastic.agent.image_source import NoImages
from dynamo_elastic.agent.images import Images, Progress
from dynamo_elastic.agent.ladder import Why
from dynamo_elastic.agent.rehearse import rehearse
from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.config_sections import SnapshotConfig
from dynamo_elastic.engine.launch import engine_argv
from dynamo_elastic.errors import ElasticError, SnapshotError
from dynamo_elastic.snapshot.capabilities import check_capabilities
from dynamo_elastic.snapshot.catalog import Catalog
from dynamo_elastic.snapshot.criu import Criu
from dynamo_elastic.snapshot.gpu import Gpu, open_gpu
from dynamo_elastic.snapshot.manifest import Manifest
from dynamo_elastic.snapshot.signing import Trust, host_key

_DISABLED = "snapshots are off (snapshot.enabled)"


def open_images(
    config: DeploymentConfig, argv_of: EngineArgv = engine_argv, gpu: Gpu | None = None
) -> Images:
    """Raises ResourceMissing (no root, no CRIU, too old), or what open_catalog() raises."""
    check_capabilities()
    here = open_gpu() if gpu is None else gpu
    return Images(config, Criu.find(), open_catalog(config.snapshot), argv_of, here)


def open_catalog(settings: SnapshotConfig) -> Catalog:
    """The catalog, and whose images run from it. Raises ConfigError for a key that can't be used,
    or SnapshotError."""
    catalog = settings.catalog.absolute()
    trust = Trust(
        settings.signing_key or host_key(catalog),
        make=settings.signing_key is None,
        trusted_keys=settings.trusted_keys,
        allow_unsigned=settings.allow_unsigned,
    )
    trust.check_keys()
    return Catalog(catalog, trust)


def images_or_reason(
    config: DeploymentConfig, argv_of: EngineArgv = engine_argv, gpu: Gpu | None = None
) -> Images | NoImages:
    """The deployment's images, or the reason why there are none: engines boot then."""
    if not config.snapshot.enabled:
        return NoImages(_DISABLED, Why.DISABLED)
    try:
        return open_images(config, argv_of, gpu)
    except ElasticError as exc:
        return NoImages(str(exc), Why.UNUSABLE)


def missing_slots(config: DeploymentConfig) -> tuple[int, ...]:
    """Slots that have no usable image. Raises what open_images() raises."""
    images = open_images(config)
    return tuple(s for s in range(config.scale.max_ranks) if images.find(s) is None)


def _proven(images: Images, manifest: Manifest, timeout_s: float) -> Manifest:
    """A checkpoint that succeeded is no proof that it can be restored."""
    if manifest.gpu.processes:
        try:
            asyncio.run(rehearse(images, manifest, timeout_s=timeout_s))
        except ElasticError:
            images.catalog.remove(manifest.image_id)
            raise
    return manifest


def create_images(
    config: DeploymentConfig, slots: Sequence[int], progress: Progress | None = None
) -> tuple[Manifest, ...]:
    """An image of each of `slots`, one after the other. One that was on a GPU has come back from
    its image once: before that nobody knows. Not to be called from an event loop.

    Raises what open_images(), take_snapshot() and rehearse() raise; images made before stay. Raises
    SnapshotError, too, if they don't fit into the catalog together.
    """
    images = open_images(config)
    images.catalog.remove_partials()
    made = tuple(
        _proven(images, images.create(slot, progress), config.scale.restore_timeout_s)
        for slot in slots
    )
    left = images.catalog.entries()
    if not all(manifest.image_id in left for manifest in made):
        raise SnapshotError(
            f"snapshot.max_bytes: {config.snapshot.max_bytes} bytes don't hold an image of each "
            "slot; raise it"
        )
    return made
