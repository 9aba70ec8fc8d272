"""`dynamo-elastic snapshot create | list | inspect | restore | rm`."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from dynamo_elastic.agent.images import Images, create_images, open_images
from dynamo_elastic.agent.rehearse import rehearse
from dynamo_elastic.config import DeploymentConfig, SnapshotConfig, load_config
from dynamo_elastic.errors import ConfigError, SnapshotMismatch
from dynamo_elastic.snapshot.base import TakePhase
from dynamo_elastic.snapshot.catalog import Catalog
from dynamo_elastic.snapshot.fingerprint import mismatches
from dynamo_elastic.snapshot.manifest import Manifest

app = typer.Typer(help="Images of warm engines: make, list, check, try, delete.")

File = Annotated[Path, typer.Option("-f", "--file", help="Deployment YAML.")]
MaybeFile = Annotated[
    Path | None,
    typer.Option("-f", "--file", help="Deployment YAML; without it the default catalog is used."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Image = Annotated[str, typer.Argument(help="Id of an image, see `snapshot list`.")]

_MIB = 1 << 20


@app.command()
def create(
    file: File,
    slot: Annotated[
        list[int] | None, typer.Option(min=0, help="Slot; default: every slot.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Boot an engine of each slot, and make an image of it."""
    config = load_config(file)
    slots = _slots(config, slot)
    with Progress(
        SpinnerColumn(),
        TextColumn("slot {task.fields[slot]}: {task.description}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    ) as progress:
        tasks = {s: progress.add_task("waiting", slot=s, start=False, total=1) for s in slots}

        def show(s: int, phase: TakePhase) -> None:
            if phase is TakePhase.BOOT:
                progress.start_task(tasks[s])
            ended = int(phase is TakePhase.DONE)
            progress.update(tasks[s], description=phase.value, completed=ended)

        manifests = create_images(config, slots, show)
    if as_json:
        _print_json([_summary(m) for m in manifests])
    else:
        _print_table({m.image_id: m for m in manifests})


@app.command("list")
def list_images(file: MaybeFile = None, as_json: AsJson = False) -> None:
    """Every image of the catalog, newest first."""
    entries = _catalog(file).entries()
    if as_json:
        _print_json(
            [
                _summary(m) if isinstance(m, Manifest) else {"image_id": i, "damage": str(m)}
                for i, m in entries.items()
            ]
        )
    else:
        _print_table(entries)


@app.command()
def inspect(image: Image, file: MaybeFile = None, as_json: AsJson = False) -> None:
    """Check every byte of an image; with -f, also whether it fits this host and deployment."""
    catalog = _catalog(file)
    manifest = catalog.inspect(image)
    catalog.verify(manifest)
    if file is not None:
        here = open_images(load_config(file)).fingerprint(manifest.slot)
        differences = mismatches(manifest.fingerprint, here)
        if differences:
            raise SnapshotMismatch(image, differences)
    if as_json:
        _print_json(asdict(manifest))
        return
    _print_table({image: manifest})
    for name, value in asdict(manifest.fingerprint).items():
        shown = " ".join(value) if isinstance(value, tuple) else value
        typer.echo(f"  {name:12} {shown}")
    typer.echo("every byte is right" + ("; it fits here" if file is not None else ""))


@app.command()
def restore(image: Image, file: File, as_json: AsJson = False) -> None:
    """Try an image: run a copy beside everything else until it answers, then end it."""
    config = load_config(file)
    images = open_images(config)
    timings = _rehearse(images, image, config.scale.restore_timeout_s)
    if as_json:
        _print_json({"image_id": image, "timings_s": timings})
        return
    typer.echo(f"{image} runs")
    for name, seconds in timings.items():
        typer.echo(f"  {name:8} {seconds * 1000:8.1f} ms")


@app.command()
def rm(image: Image, file: MaybeFile = None) -> None:
    """Delete an image."""
    _catalog(file).remove(image)


def _rehearse(images: Images, image: str, timeout_s: float) -> dict[str, float]:
    manifest = images.catalog.inspect(image)
    return asyncio.run(rehearse(images, manifest, timeout_s=timeout_s))


def _catalog(file: Path | None) -> Catalog:
    settings = load_config(file).snapshot if file is not None else SnapshotConfig()
    return Catalog(settings.catalog)


def _slots(config: DeploymentConfig, wanted: list[int] | None) -> list[int]:
    highest = config.scale.max_ranks - 1
    slots = list(range(highest + 1)) if wanted is None else wanted
    faults = [f"--slot {s}: this deployment has slots 0-{highest}" for s in slots if s > highest]
    if faults:
        raise ConfigError(faults)
    return slots


def _summary(manifest: Manifest) -> dict[str, Any]:
    return {
        "image_id": manifest.image_id,
        "slot": manifest.slot,
        "created_at": manifest.created_at,
        "pages_bytes": manifest.pages_bytes,
        "other_bytes": manifest.size_bytes - manifest.pages_bytes,
        "timings_s": manifest.timings_s,
    }


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, default=str))


def _print_table(entries: dict[str, Any]) -> None:
    table = Table(
        Column("image", no_wrap=True),
        "slot",
        "made (UTC)",
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
