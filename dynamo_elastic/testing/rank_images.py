"""Images of vLLM ranks that booted without a group, for tests and benchmarks: taken and restored by
the product's own code, with nothing of an agent or a coordinator around it."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dynamo_elastic.agent.records import clear, write_attach
from dynamo_elastic.engine.base import DETACHED_FILE, Attach
from dynamo_elastic.snapshot.base import (
    BOOT_LOG,
    PIDS_PER_SLOT,
    Command,
    Notify,
    TakePhase,
    first_pid,
)
from dynamo_elastic.snapshot.catalog import Catalog
from dynamo_elastic.snapshot.criu import Criu
from dynamo_elastic.snapshot.fingerprint import Fingerprint, read_fingerprint
from dynamo_elastic.snapshot.gpu import NO_GPU, Gpu
from dynamo_elastic.snapshot.inspect_process import Allowed
from dynamo_elastic.snapshot.manifest import Manifest
from dynamo_elastic.snapshot.namespace import PidNamespace, temporary_namespace
from dynamo_elastic.snapshot.restore import Restored, restore_snapshot
from dynamo_elastic.snapshot.take import TakeRequest, take_snapshot
from dynamo_elastic.types import Incarnation, WorkerId

LOG = "rank.log"
"""In its control directory: what a rank writes once it is attached."""


@dataclass(frozen=True)
class RankImages:
    """Images of one deployment's ranks. `directories`: those beside a rank's control directory of
    which it may have files open. `slots`: how many slots' pids a rank may use: compilers that start
    programs use them up."""

    catalog: Catalog
    imager: Criu
    gpu: Gpu = NO_GPU
    directories: tuple[Path, ...] = ()
    slots: int = 1
    timeout_s: float = 60.0
    """Of a dump, and of a restore."""
    _fingerprints: dict[str, Fingerprint] = field(default_factory=dict)

    def take(
        self,
        rank: int,
        control_dir: Path,
        argv: Sequence[str],
        environment: Mapping[str, str],
        *,
        boot_timeout_s: float,
        max_bytes: int = 64 << 30,
        notify: Notify[TakePhase] | None = None,
    ) -> Manifest:
        """Boot the rank that `argv` starts, and make an image of it; it has ended then. Raises what
        take_snapshot() raises."""
        slot = self.slots * (rank + 1) - 1
        command = Command(tuple(argv), dict(environment), control_dir / BOOT_LOG)
        fingerprint = read_fingerprint(
            criu=self.imager.version(),
            argv=command.argv,
            environment=command.environment,
            model=hashlib.sha256(repr(argv).encode()).hexdigest()[:16],
            slot=slot,
            control_dir=control_dir,
            gpus=self.gpu.inventory.gpus(),
        )
        pids = range(first_pid(slot), first_pid(slot) + self.slots * PIDS_PER_SLOT)
        manifest = take_snapshot(
            TakeRequest(
                slot=slot,
                command=command,
                control_dir=control_dir,
                ready_file=DETACHED_FILE,
                allowed=Allowed(
                    (control_dir, *self.directories),
                    command.environment.__contains__,
                    pids,
                    tree=True,
                ),
                fingerprint=fingerprint,
                boot_timeout_s=boot_timeout_s,
                dump_timeout_s=self.timeout_s,
                max_bytes=max_bytes,
            ),
            catalog=self.catalog,
            imager=self.imager,
            make_namespace=temporary_namespace,
            gpu=self.gpu,
            notify=notify,
        )
        self._fingerprints[manifest.image_id] = fingerprint
        return manifest

    def restore(self, manifest: Manifest, namespace: PidNamespace) -> Restored:
        """The image's rank runs in `namespace`, and waits for its identity. Raises what
        restore_snapshot() raises."""
        clear(namespace.view(Path(manifest.fingerprint.control_dir)))
        return restore_snapshot(
            manifest,
            here=self._fingerprints[manifest.image_id],
            catalog=self.catalog,
            imager=self.imager,
            namespace=namespace,
            timeout_s=self.timeout_s,
            gpu=self.gpu,
        )


def attach(directory: Path, control_dir: Path, environment: Mapping[str, str]) -> None:
    """Give the rank whose control directory is `control_dir`, and `directory` to us, an identity.
    `environment`: of its new life."""
    incarnation = Incarnation(f"rank-{secrets.token_hex(4)}")
    identity = Attach(
        incarnation=incarnation,
        worker_id=WorkerId(incarnation),
        seed=secrets.randbits(32),
        log_path=str(control_dir / LOG),
        environment=dict(environment),
    )
    write_attach(directory, identity)
