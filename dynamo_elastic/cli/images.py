"""How images are shown, and how their making is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from dynamo_elastic.errors import SnapshotDamaged
from dynamo_elastic.snapshot.base import TakePhase
from dynamo_elastic.snapshot.manifest import Manifest

_MIB = 1 << 20


def summary(manifest: Manifest) -> dict[str, Any]:
    return {
        "image_id": manifest.image_id,
        "slot": manifest.slot,
        "created_at": manifest.created_at,
        "pages_bytes": manifest.pages_bytes,
        "other_bytes": manifest.size_bytes - manifest.pages_bytes,
        "sizes": asdict(manifest.sizes),
        "timings_s": manifest.timings_s,
    }


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, default=str))


def print_manifest(manifest: Manifest) -> None:
    print_images({manifest.image_id: manifest})
    for name, size_bytes in asdict(manifest.sizes).items():
        typer.echo(f"  {name.removesuffix('_bytes'):22} {size_bytes / _MIB:10.1f} MiB")
    for uuid, size_bytes in manifest.gpu.device_bytes.items():
        typer.echo(f"  {'needs on ' + uuid:22} {size_bytes / _MIB:10.1f} MiB")
    for name, value in asdict(manifest.fingerprint).items():
        shown = " ".join(value) if isinstance(value, tuple) else value
        typer.echo(f"  {name:22} {shown}")


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


@contextmanager
def progress(slots: list[int]) -> Iterator[Callable[[int, TakePhase], None]]:
    """Shows the phase of each slot: in place on a terminal, a line for each elsewhere."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda slot, phase: console.print(f"slot {slot}: {phase.value}")
        return
    columns = (
        SpinnerColumn(),
        TextColumn("slot {task.fields[slot]}: {task.description}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bar:
        tasks = {s: bar.add_task("waiting", slot=s, start=False, total=1) for s in slots}

        def show(slot: int, phase: TakePhase) -> None:
            if phase is TakePhase.BOOT:
                bar.start_task(tasks[slot])
            ended = int(phase is TakePhase.DONE)
            bar.update(tasks[slot], description=phase.value, completed=ended)

        yield show
