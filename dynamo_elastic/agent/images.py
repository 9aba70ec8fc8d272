"""The images of one deployment: which slots have one, making them, restoring them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from dynamo_elastic.agent.host import engine_environment, shapes_engine
from dynamo_elastic.agent.quarantine import Quarantine
from dynamo_elastic.agent.start import EngineArgv, RunningImage, boot_command
from dynamo_elastic.config import DeploymentConfig, SnapshotConfig
from dynamo_elastic.engine.base import DETACHED_FILE
from dynamo_elastic.engine.launch import engine_argv
from dynamo_elastic.engine.shape import CONFIG_FILE
from dynamo_elastic.errors import (
    ConfigError,
    ElasticError,
    PidClash,
    ResourceMissing,
    SnapshotError,
    SnapshotNotFound,
)
from dynamo_elastic.snapshot.base import PIDS_PER_SLOT, Imager, Namespace, TakePhase, first_pid
from dynamo_elastic.snapshot.catalog import Catalog
from dynamo_elastic.snapshot.criu import Criu
from dynamo_elastic.snapshot.fingerprint import (
    Fingerprint,
    machine_mismatches,
    mismatches,
    read_fingerprint,
)
from dynamo_elastic.snapshot.inspect_process import Allowed
from dynamo_elastic.snapshot.locks import Hold
from dynamo_elastic.snapshot.manifest import Manifest
from dynamo_elastic.snapshot.namespace import temporary_namespace
from dynamo_elastic.snapshot.prune import Bounds, Judgement, PruneReport, prune
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

    def restore(self, slot: int, namespace: Namespace, *, timeout_s: float) -> RunningImage:
        raise SnapshotNotFound(self._reason)

    def report(self, image_id: str, failure: str) -> None:
        """Nothing was tried."""

    def quarantined(self) -> dict[str, str]:
        return {}

    def hold(self, slot: int, image_id: str) -> None:
        """Nothing to hold."""

    def release(self, slot: int) -> None:
        """Nothing was held."""

    def tidy(self) -> tuple[str, ...]:
        return ()


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
        self._quarantine = Quarantine(config.snapshot.quarantine_s)
        self._holds: dict[int, Hold] = {}

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
        """The newest image of `slot` that fits and is not in quarantine."""
        here = self.fingerprint(slot)

        def usable(manifest: Manifest) -> bool:
            fits = not mismatches(manifest.fingerprint, here)
            return fits and not self._quarantine.reason(manifest.image_id)

        return self._catalog.newest(slot, usable)

    def newest(self, slot: int) -> str:
        manifest = self.find(slot)
        return manifest.image_id if manifest is not None else ""

    def obstacle(self, slot: int) -> str:
        """Why no image of `slot` can be restored: there is none, it failed, or how it differs."""
        if self.find(slot) is not None:
            return ""
        here = self.fingerprint(slot)
        last = self._catalog.newest(slot, lambda m: m.fingerprint.control_dir == here.control_dir)
        last = last or self._catalog.newest(slot, lambda _: True)
        if last is None:
            return f"no image of slot {slot} in {self._catalog.root}"
        differences = mismatches(last.fingerprint, here)
        if differences:
            return f"{last.image_id} does not fit: {'; '.join(differences)}"
        return f"{last.image_id} is {self._quarantine.reason(last.image_id)}"

    def restore(self, slot: int, namespace: Namespace, *, timeout_s: float) -> RunningImage:
        """Run the newest image of `slot` that may be tried, and hold it until release(slot). A
        failure that is the image's own counts towards its quarantine."""
        manifest = self.find(slot)
        if manifest is None:
            raise SnapshotNotFound(self.obstacle(slot))
        self.hold(slot, manifest.image_id)
        try:
            restored = self.restore_image(manifest, namespace, timeout_s=timeout_s)
        except (PidClash, ResourceMissing):
            self.release(slot)
            raise
        except SnapshotError as exc:
            self.release(slot)
            self.report(manifest.image_id, str(exc))
            raise
        return RunningImage(restored.process, manifest.image_id)

    def report(self, image_id: str, failure: str) -> None:
        """An engine from that image answered ('' as `failure`), or did not, and why."""
        if failure:
            self._quarantine.failed(image_id, failure)
        else:
            self._quarantine.worked(image_id)

    def quarantined(self) -> dict[str, str]:
        """Image id -> why it is not tried now."""
        return self._quarantine.reasons()

    def hold(self, slot: int, image_id: str) -> None:
        """The image stays for as long as the engine in `slot` lives. Raises SnapshotError."""
        self.release(slot)
        self._holds[slot] = self._catalog.hold(image_id)

    def release(self, slot: int) -> None:
        """The engine of `slot` is gone. Idempotent."""
        hold = self._holds.pop(slot, None)
        if hold is not None:
            hold.close()

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
        """Boot a detached engine of `slot`, and make an image of it; then the catalog is brought
        within its bounds. Raises what take_snapshot() raises; then older images stay."""

        def notify(phase: TakePhase) -> None:
            if progress is not None:
                progress(slot, phase)

        control_dir = self._config.control_dir(slot)
        pids = range(first_pid(slot), first_pid(slot) + PIDS_PER_SLOT)
        request = TakeRequest(
            slot=slot,
            command=boot_command(self._config, slot, self._argv_of),
            control_dir=control_dir,
            ready_file=DETACHED_FILE,
            allowed=Allowed((control_dir,), set(engine_environment()).__contains__, pids),
            fingerprint=self.fingerprint(slot),
            boot_timeout_s=self._config.scale.restore_timeout_s,
            dump_timeout_s=self._config.scale.restore_timeout_s,
            max_bytes=self._config.snapshot.max_bytes,
        )
        manifest = take_snapshot(
            request,
            catalog=self._catalog,
            imager=self._imager,
            make_namespace=temporary_namespace,
            notify=notify,
        )
        self.prune()
        return manifest

    def prune(self, *, dry_run: bool = False) -> PruneReport:
        """See snapshot.prune: within the deployment's bounds, no stale image of its own."""
        settings = self._config.snapshot
        return prune(self._catalog, bounds(settings), self._judge, dry_run=dry_run)

    def tidy(self) -> tuple[str, ...]:
        """Prune; one line for each thing that went."""
        report = self.prune()
        removed = tuple(f"{e.image_id}: {e.reason}" for e in report.removed)
        return (*removed, *(f"{name}: left by a dead process" for name in report.partials))

    def _judge(self, manifest: Manifest) -> Judgement:
        image = manifest.fingerprint
        slots = range(self._config.scale.max_ranks)
        ours = {str(self._config.control_dir(slot)): slot for slot in slots}
        slot = ours.get(image.control_dir)
        if slot is None:
            differences = machine_mismatches(image, criu=image.criu)
        else:
            differences = mismatches(image, self.fingerprint(slot))
        return Judgement(slot is not None, "; ".join(differences))


def bounds(settings: SnapshotConfig) -> Bounds:
    return Bounds(settings.max_images_per_slot, settings.max_bytes, settings.max_age_s)


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
    take_snapshot() raise; images made before stay. Raises SnapshotError, too, if they don't fit
    into the catalog together."""
    images = open_images(config)
    images.catalog.remove_partials()
    made = tuple(images.create(slot, progress) for slot in slots)
    left = images.catalog.entries()
    if not all(manifest.image_id in left for manifest in made):
        raise SnapshotError(
            f"snapshot.max_bytes: {config.snapshot.max_bytes} bytes don't hold an image of each "
            "slot; raise it"
        )
    return made
