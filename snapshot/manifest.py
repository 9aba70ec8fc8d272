"""The manifest of one image: written last, so an image without it does not exist."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import xxhash
from blake3 import blake3
from pydantic import TypeAdapter, ValidationError

from dynamo_elastic.errors import SnapshotDamaged, SnapshotNewer
from dynamo_elastic.snapshot.fingerprint import Fingerprint
from dynamo_elastic.snapshot.sizes import ImageSizes

SCHEMA_VERSION = 5
OLDEST_VERSION = 4
"""4: digests were xxh3, which tells accidents, not attacks. Can be listed, not run."""
MANIFEST_FILE = "manifest.json"


@dataclass(frozen=True, slots=True)
class ImageFile:
    """One file of the image. `digest` is that of checks.digest_file()."""

    name: str
    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class GpuState:
    """What of the image was on GPUs. `processes`: so many of them held CUDA, 0 without a GPU."""

    processes: int = 0
    device_bytes: dict[str, int] = field(default_factory=dict)
    """Needed on each GPU (by uuid) to come back; those of which NVML did not tell are left out."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything known of one image without running it."""

    image_id: str
    slot: int
    created_at: str
    """UTC, ISO 8601."""
    root_pid: int
    """Of the process, inside its namespace."""
    fingerprint: Fingerprint
    files: tuple[ImageFile, ...]
    thread_ids: tuple[int, ...] = ()
    """Of all threads of the process, inside its namespace: they must be free to restore it."""
    timings_s: dict[str, float] = field(default_factory=dict)
    """Of the phases of take_snapshot()."""
    engine: dict[str, Any] = field(default_factory=dict)
    """What the engine wrote when it was detached and ready."""
    gpu: GpuState = field(default_factory=GpuState)
    sizes: ImageSizes = field(default_factory=ImageSizes)
    schema_version: int = SCHEMA_VERSION
    digest: str = ""
    """Of the manifest itself without this field; encode() fills it in."""

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def pages_bytes(self) -> int:
        """Memory content; the rest describes the process."""
        return sum(f.size_bytes for f in self.files if f.name.startswith("pages-"))


_ADAPTER = TypeAdapter(Manifest)
_DIGESTS: dict[int, Callable[[bytes], str]] = {
    4: lambda data: xxhash.xxh3_128(data).hexdigest(),
    5: lambda data: blake3(data).hexdigest(),
}


def sealed(manifest: Manifest) -> Manifest:
    """The manifest with its own digest."""
    bare = replace(manifest, digest="")
    return replace(bare, digest=_DIGESTS[manifest.schema_version](_ADAPTER.dump_json(bare)))


def encode(manifest: Manifest) -> bytes:
    return _ADAPTER.dump_json(sealed(manifest), indent=2)


def decode(data: bytes, where: str) -> Manifest:
    """Raises SnapshotDamaged naming `where`, also if one byte is not what encode() made; then
    SnapshotNewer if a newer version of ours made it."""
    schema = _schema_of(data)
    known = f"this version reads {OLDEST_VERSION} to {SCHEMA_VERSION}"
    if isinstance(schema, int) and schema > SCHEMA_VERSION:
        raise SnapshotNewer(
            f"{where}: written in schema {schema}, {known}: upgrade dynamo_elastic, or create the "
            "image anew"
        )
    if schema is not None and (type(schema) is not int or schema not in _DIGESTS):
        raise SnapshotDamaged(
            f"{where}: written in schema {schema}, {known}: remove it and create the image anew"
        )
    try:
        manifest = _ADAPTER.validate_json(data)
    except ValidationError as exc:
        raise SnapshotDamaged(f"{where}: not a manifest ({exc.error_count()} faults)") from exc
    if encode(manifest) != data:
        raise SnapshotDamaged(f"{where}: its content was altered")
    return manifest


def _schema_of(data: bytes) -> Any:
    """Looked at first: a manifest of another schema need not have our fields."""
    try:
        raw = json.loads(data)
    except ValueError:
        return None
    return raw.get("schema_version") if isinstance(raw, dict) else None
