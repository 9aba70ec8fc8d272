"""Values for tests of snapshots."""

from __future__ import annotations

from dataclasses import replace

from dynamo_elastic.snapshot.catalog import Catalog
from dynamo_elastic.snapshot.fingerprint import NONE, SCHEMA, Fingerprint
from dynamo_elastic.snapshot.manifest import Manifest

FINGERPRINT = Fingerprint(
    schema=SCHEMA,
    python="3.11.7",
    torch="2.13.0",
    nixl="1.5.1",
    criu="4.2.1",
    kernel="6.1.0",
    cpu="0123456789abcdef",
    libc="glibc 2.36",
    package="0.1.0 0123456789abcdef",
    argv=("python", "engine.py"),
    environment="fedcba9876543210",
    model="aaaaaaaaaaaaaaaa",
    slot=0,
    control_dir="/run/test/slots/0",
    gpu_driver=NONE,
    gpu_model=NONE,
    gpu=NONE,
    host_gpus=NONE,
    cuda_runtime=NONE,
    cuda_visible_devices=NONE,
    ucx_cuda_ipc_cache=NONE,
)


def publish_image(
    catalog: Catalog,
    image_id: str = "slot0-a",
    *,
    slot: int = 0,
    at: str = "1",
    size_bytes: int = 256 * 64,
) -> Manifest:
    """An image of made-up files, and one that is empty."""
    with catalog.draft(image_id) as draft:
        (draft.directory / "pages-1.img").write_bytes(bytes(range(256)) * (size_bytes // 256))
        (draft.directory / "core-1.img").write_bytes(b"")
        manifest = Manifest(
            image_id=image_id,
            slot=slot,
            created_at=at,
            root_pid=1000,
            fingerprint=replace(FINGERPRINT, slot=slot, control_dir=f"/run/test/slots/{slot}"),
            files=catalog.seal(draft),
        )
        return catalog.publish(draft, manifest)
