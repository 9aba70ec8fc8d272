"""How images are shown."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import typer
from rich.console import Console
from rich.table import Column, Table

from dynamo_elastic.errors import SnapshotDamaged
from dynamo_elastic.snapshot.manifest import Manifest

_MIB = 1 << 20


def summary(manifest: Manifest) -> dict[str, Any]:
    return {
        "image_id": manifest.image_id,
        "slot": manifest.slot,
        "created_at": manifest.created_at,
        "pages_bytes": manifest.pages_bytes,
        "other_bytes": manifest.size_bytes - manifest.pages_bytes,
        "timings_s": manifest.timings_s,
    }


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, default=str))


def print_manifest(manifest: Manifest) -> None:
    print_images({manifest.image_id: manifest})
    for name, value in asdict(manifest.fingerprint).items():
        shown = " ".join(value) if isinstance(value, tuple) else value
        typer.echo(f"  {name:12} {shown}")


def print_images(entries: Mapping[str, Manifest | SnapshotDamaged]) -> None:
    table = Table(
        Column("image", no_wrap=True),
        "slot",
        "pages",
        "other",
        "boot",
        "dump",
        box=None,
    )
    for image_id, entry in entries.items():
        if not isinstance(entry, Manifest):
            table.add_row(image_id, "", f"damaged: {entry}")
            continue
        table.add_row(
            image_id,
            str(entry.slot),
            f"{entry.pages_bytes / _MIB:.0f} MiB",
            f"{(entry.size_bytes - entry.pages_bytes) / 1024:.0f} KiB",
            f"{entry.timings_s.get('boot', 0):.2f} s",
            f"{entry.timings_s.get('dump', 0):.2f} s",
        )
    Console().print(table)
