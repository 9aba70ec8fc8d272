"""The images of one deployment: which slots have one, making them, restoring them."""

from __future__ import annotations

from collections.abc import Callable

from dynamo_elastic.agent.boot import Boots, EngineArgv
from dynamo_elastic.agent.caches import JitCaches
from dynamo_elastic.agent.image_source import RunningImage
from dynamo_elastic.agent.ladder import Obstacle, Why
from dynamo_elastic.agent.quarantine import Quarantine
from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.config_sections import SnapshotConfig
from dynamo_elastic.engine.base import DETACHED_FILE
from dynamo_elastic.engine.launch import engine_argv, is_tree
from dynamo_elastic.errors import (
    GpuMemoryShort,
    PidClash,
    ResourceMissing,
    SnapshotError,
    SnapshotNotFound,
)
from dynamo_elastic.snapshot.base import PIDS_PER_SLOT, Imager, Namespace, TakePhase, first_pid
from dynamo_elastic.snapshot.catalog import Catalog
from dynamo_elastic.snapshot.fingerprint import Fingerprint, machine_mismatches, mismatches
from dynamo_elastic.snapshot.gpu import NO_GPU, Gpu
from dynamo_elastic.snapshot.inspect_process import Allowed
from dynamo_elastic.snapshot.locks import Hold
from dynamo_elastic.snapshot.manifest import Manifest
from dynamo_elastic.snapshot.namespace import temporary_namespace
from dynamo_elastic.snapshot.prune import Bounds, Judgement, PruneReport, prune
from dynamo_elastic.snapshot.restore import Restored, restore_snapshot
from dynamo_elastic.snapshot.take import TakeRequest, take_snapshot

Progress = Callable[[int, TakePhase], None]


class Images:
    """Images of one deployment on this host."""

    def __init__(
        self,
        config: DeploymentConfig,
        imager: Imager,
        catalog: Catalog,
        argv_of: EngineArgv = engine_argv,
        gpu: Gpu = NO_GPU,
    ) -> None:
        self._config = config
        self._imager = imager
        self._catalog = catalog
        self._gpu = gpu
        self._boots = Boots(config, argv_of, gpu.inventory.gpus())
        self._caches = JitCaches(catalog.root, config.snapshot.max_age_s)
        self._quarantine = Quarantine(config.snapshot.quarantine_s)
        self._holds: dict[int, Hold] = {}

    @property
    def catalog(self) -> Catalog:
        return self._catalog

    def fingerprint(self, slot: int) -> Fingerprint:
        """What an image of `slot` must have to be run here and now."""
        return self._boots.fingerprint(slot, criu=self._imager.version())

    def find(self, slot: int) -> Manifest | None:
        """The newest image of `slot` that fits, is trusted and is not in quarantine."""
        here = self.fingerprint(slot)

        def usable(manifest: Manifest) -> bool:
            fits = not mismatches(manifest.fingerprint, here)
            tried = fits and not self._quarantine.reason(manifest.image_id)
            return tried and not self._distrust(manifest)

        return self._catalog.newest(slot, usable)

    def newest(self, slot: int) -> str:
        manifest = self.find(slot)
        return manifest.image_id if manifest is not None else ""

    def obstacle(self, slot: int) -> Obstacle | None:
        """Why no image of `slot` can be restored: there is none, how it differs, nobody whom we
        trust signed it, or it failed."""
        if self.find(slot) is not None:
            return None
        here = self.fingerprint(slot)
        last = self._catalog.newest(slot, lambda m: m.fingerprint.control_dir == here.control_dir)
        last = last or self._catalog.newest(slot, lambda _: True)
        if last is None:
            return Obstacle(Why.ABSENT, f"no image of slot {slot} in {self._catalog.root}")
        differences = mismatches(last.fingerprint, here)
        if differences:
            return Obstacle(Why.MISFIT, f"{last.image_id} does not fit: {'; '.join(differences)}")
        distrust = self._distrust(last)
        if distrust:
            return Obstacle(Why.UNTRUSTED, distrust)
        reason = self._quarantine.reason(last.image_id)
        return Obstacle(Why.QUARANTINED, f"{last.image_id} is {reason}")

    def _distrust(self, manifest: Manifest) -> str:
        """Why that image is not to be run, whatever else it is; '' if it may."""
        try:
            self._catalog.check_trust(manifest.image_id)
        except SnapshotError as exc:
            return str(exc)
        return ""

    def restore(self, slot: int, namespace: Namespace, *, timeout_s: float) -> RunningImage:
        """Run the newest image of `slot` that may be tried, and hold it until release(slot). A
        failure that is the image's own counts towards its quarantine."""
        manifest = self.find(slot)
        if manifest is None:
            raise SnapshotNotFound(str(self.obstacle(slot)))
        self.hold(slot, manifest.image_id)
        try:
            restored = self.restore_image(manifest, namespace, timeout_s=timeout_s)
        except (GpuMemoryShort, PidClash, ResourceMissing):
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
        self._caches.used(self._boots.cache_key(manifest.slot))
        return restore_snapshot(
            manifest,
            here=self.fingerprint(manifest.slot),
            catalog=self._catalog,
            imager=self._imager,
            namespace=namespace,
            gpu=self._gpu,
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
        command = self._boots.command(slot, self._caches.environment(self._boots.cache_key(slot)))
        request = TakeRequest(
            slot=slot,
            command=command,
            control_dir=control_dir,
            ready_file=DETACHED_FILE,
            allowed=Allowed(
                (control_dir,),
                command.environment.__contains__,
                pids,
                tree=is_tree(self._config),
            ),
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
            gpu=self._gpu,
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
            differences = machine_mismatches(
                image, criu=image.criu, gpus=self._gpu.inventory.gpus()
            )
        else:
            differences = mismatches(image, self.fingerprint(slot))
        return Judgement(slot is not None, "; ".join(differences))


def bounds(settings: SnapshotConfig) -> Bounds:
    return Bounds(settings.max_images_per_slot, settings.max_bytes, settings.max_age_s)
