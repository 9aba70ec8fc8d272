"""The images of one deployment: which slots have one, making them, restoring them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from dynamo_elastic.agent.host import engine_environment, shapes_engine
from dynamo_elastic.agent.start import EngineArgv, boot_command
from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.engine.base import DETACHED_FILE
from dynamo_elastic.engine.launch import engine_argv
from dynamo_elastic.engine.shape import CONFIG_FILE
from dynamo_elastic.errors import ConfigError, ElasticError, SnapshotNotFound
from dynamo_elastic.snapshot.base import Imager, Namespace, TakePhase
from dynamo_elastic.snapshot.catalog import Catalog
from dynamo_elastic.snapshot.criu import Criu
from dynamo_elastic.snapshot.fingerprint import Fingerprint, mismatches, read_fingerprint
from dynamo_elastic.snapshot.inspect_process import Allowed
from dynamo_elastic.snapshot.manifest import Manifest
from dynamo_elastic.snapshot.namespace import create_namespace
from dynamo_elastic.snapshot.process import ProcessRef
from dynamo_elastic.snapshot.restore import Restored, restore_snapshot
from dynamo_elastic.snapshot.take import TakeRequest, take_snapshot

Progress = Callable[[int, TakePhase], None]

_DISABLED = "snapshots are off (snapshot.enabled)"


class NoImages:
    """In place of Images where this host or deployment has none."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def obstacle(self, slot: int) -> str:
        return self._reason

    def newest(self, slot: int) -> str:
        return ""

    def restore(self, slot: int, namespace: Namespace, *, timeout_s: float) -> ProcessRef:
        raise SnapshotNotFound(self._reason)


class Images:
    """Images of one deployment on this host."""

    def __init__(
        self,
        config: DeploymentConfig,
        imager: Imager,
        catalog: Catalog,
        argv_of: EngineArgv = engine_argv,
    ) -> None:
        self._config = config
        self._imager = imager
        self._catalog = catalog
        self._argv_of = argv_of

    @property
    def catalog(self) -> Catalog:
        return self._catalog

    def fingerprint(self, slot: int) -> Fingerprint:
        """What an image of `slot` must have to be run here and now."""
        command = boot_command(self._config, slot, self._argv_of)
        return read_fingerprint(
            criu=self._imager.version(),
            argv=command.argv,
            environment={k: v for k, v in command.environment.items() if shapes_engine(k)},
            model=model_digest(self._config.model.path),
            slot=slot,
            control_dir=self._config.control_dir(slot),
        )

    def find(self, slot: int) -> Manifest | None:
        """The newest image of `slot` that fits."""
        here = self.fingerprint(slot)
        return self._catalog.newest(slot, lambda m: not mismatches(m.fingerprint, here))

    def newest(self, slot: int) -> str:
        manifest = self.find(slot)
        return manifest.image_id if manifest is not None else ""

    def obstacle(self, slot: int) -> str:
        """Why no image of `slot` can be restored: there is none, or how the newest differs."""
        if self.find(slot) is not None:
            return ""
        last = self._catalog.newest(slot, lambda _: True)
        if last is None:
            return f"no image of slot {slot} in {self._catalog.root}"
        differences = mismatches(last.fingerprint, self.fingerprint(slot))
        return f"{last.image_id} does not fit: {'; '.join(differences)}"

    def restore(self, slot: int, namespace: Namespace, *, timeout_s: float) -> ProcessRef:
        manifest = self.find(slot)
        if manifest is None:
            raise SnapshotNotFound(self.obstacle(slot))
        return self.restore_image(manifest, namespace, timeout_s=timeout_s).process

    def restore_image(
        self, manifest: Manifest, namespace: Namespace, *, timeout_s: float
    ) -> Restored:
        """Run that very image. Raises what restore_snapshot() raises."""
        return restore_snapshot(
            manifest,
            here=self.fingerprint(manifest.slot),
            catalog=self._catalog,
            imager=self._imager,
            namespace=namespace,
            timeout_s=timeout_s,
        )

    def create(self, slot: int, progress: Progress | None = None) -> Manifest:
        """Boot a detached engine of `slot`, and make an image of it, in place of those that this
        deployment had of that slot. Raises what take_snapshot() raises; then the old ones stay."""

        def notify(phase: TakePhase) -> None:
            if progress is not None:
                progress(slot, phase)

        control_dir = self._config.control_dir(slot)
        request = TakeRequest(
            slot=slot,
            command=boot_command(self._config, slot, self._argv_of),
            control_dir=control_dir,
            ready_file=DETACHED_FILE,
            allowed=Allowed((control_dir,), set(engine_environment()).__contains__),
            fingerprint=self.fingerprint(slot),
            boot_timeout_s=self._config.scale.restore_timeout_s,
            dump_timeout_s=self._config.scale.restore_timeout_s,
        )
        manifest = take_snapshot(
            request,
            catalog=self._catalog,
            imager=self._imager,
            make_namespace=create_namespace,
            notify=notify,
        )
        self._remove_superseded(manifest)
        return manifest

    def _remove_superseded(self, newest: Manifest) -> None:
        for old in self._catalog.manifests():
            same_slot = old.fingerprint.control_dir == newest.fingerprint.control_dir
            if same_slot and old.image_id != newest.image_id:
                self._catalog.remove(old.image_id)


def model_digest(model: Path) -> str:
    """Digest of the model's configuration, on which an engine's shapes and warm-up depend. Raises
    ConfigError."""
    path = model / CONFIG_FILE
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as exc:
        raise ConfigError(
            [f"model.path: {path} can't be read ({exc.strerror}); name a model directory"]
        ) from exc


def open_images(config: DeploymentConfig, argv_of: EngineArgv = engine_argv) -> Images:
    """Raises ResourceMissing (no root, no CRIU, too old) or SnapshotError (the catalog)."""
    return Images(config, Criu.find(), Catalog(config.snapshot.catalog), argv_of)


def images_or_reason(
    config: DeploymentConfig, argv_of: EngineArgv = engine_argv
) -> Images | NoImages:
    """The deployment's images, or the reason why there are none: engines start cold then."""
    if not config.snapshot.enabled:
        return NoImages(_DISABLED)
    try:
        return open_images(config, argv_of)
    except ElasticError as exc:
        return NoImages(str(exc))


def missing_slots(config: DeploymentConfig) -> tuple[int, ...]:
    """Slots that have no usable image. Raises what open_images() raises."""
    images = open_images(config)
    return tuple(s for s in range(config.scale.max_ranks) if images.find(s) is None)


def create_images(
    config: DeploymentConfig, slots: Sequence[int], progress: Progress | None = None
) -> tuple[Manifest, ...]:
    """An image of each of `slots`, one after the other. Raises what open_images() and
    take_snapshot() raise; images made before stay."""
    images = open_images(config)
    images.catalog.remove_partials()
    return tuple(images.create(slot, progress) for slot in slots)
