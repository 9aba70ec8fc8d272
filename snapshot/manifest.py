"""The manifest of one image: written last, so an image without it does not exist."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError

from dynamo_elastic.errors import SnapshotDamaged
from dynamo_elastic.snapshot.fingerprint import Fingerprint

SCHEMA_VERSION = 1
MANIFEST_FILE = "manifest.json"


@dataclass(frozen=True, slots=True)
class ImageFile:
    """One file of the image. `digest` is its xxh3_128 in hex."""

    name: str
    size_bytes: int
    digest: str


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
    timings_s: dict[str, float] = field(default_factory=dict)
    """Of the phases of take_snapshot()."""
    engine: dict[str, Any] = field(default_factory=dict)
    """What the engine wrote when it was detached and ready."""
    schema_version: int = SCHEMA_VERSION

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def pages_bytes(self) -> int:
        """Memory content; the rest describes the process."""
        return sum(f.size_bytes for f in self.files if f.name.startswith("pages-"))


_ADAPTER = TypeAdapter(Manifest)


def encode(manifest: Manifest) -> bytes:
    return _ADAPTER.dump_json(manifest, indent=2)


def decode(data: bytes, where: str) -> Manifest:
    """Raises SnapshotDamaged naming `where`."""
    try:
        manifest = _ADAPTER.validate_json(data)
    except ValidationError as exc:
        raise SnapshotDamaged(f"{where}: not a manifest ({exc.error_count()} faults)") from exc
    if manifest.schema_version != SCHEMA_VERSION:
        raise SnapshotDamaged(f"{where}: schema {manifest.schema_version} is not {SCHEMA_VERSION}")
    return manifest
