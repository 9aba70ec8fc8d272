"""`dynamo-elastic snapshot create | list | inspect | verify | restore | rm | prune | export |
import | sign | keygen`. Exit codes: cli/exit_codes.py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dynamo_elastic.agent.images import bounds
from dynamo_elastic.agent.open_images import create_images, open_catalog, open_images
from dynamo_elastic.agent.rehearse import rehearse
from dynamo_elastic.cli.images import print_images, print_json, print_manifest, progress, summary
from dynamo_elastic.config import DeploymentConfig, load_config, snapshot_settings
from dynamo_elastic.errors import (
    ConfigError,
    ResourceMissing,
    SnapshotDamaged,
    SnapshotMismatch,
    SnapshotUntrusted,
)
from dynamo_elastic.snapshot.archive import export_image, import_image
from dynamo_elastic.snapshot.catalog import Catalog
from dynamo_elastic.snapshot.criu import Criu
from dynamo_elastic.snapshot.fingerprint import machine_mismatches, mismatches
from dynamo_elastic.snapshot.locks import remove_abandoned
from dynamo_elastic.snapshot.manifest import Manifest
from dynamo_elastic.snapshot.prune import Judgement, prune
from dynamo_elastic.snapshot.signing import make_key

app = typer.Typer(help="Images of warm engines: make, list, check, try, move, delete.")

File = Annotated[
    Path, typer.Option("-f", "--file", envvar="DYN_ELASTIC_CONFIG", help="Deployment YAML.")
]
MaybeFile = Annotated[
    Path | None,
    typer.Option(
        "-f",
        "--file",
        envvar="DYN_ELASTIC_CONFIG",
        help="Deployment YAML; without it the default catalog is used.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Image = Annotated[str, typer.Argument(help="Id of an image, see `snapshot list`.")]


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
    with progress(slots) as show:
        made = create_images(config, slots, show)
    if as_json:
        print_json([summary(manifest) for manifest in made])
    else:
        print_images({manifest.image_id: manifest for manifest in made})


@app.command("list")
def list_images(file: MaybeFile = None, as_json: AsJson = False) -> None:
    """Every image of the catalog, newest first."""
    entries = _catalog(file).entries()
    if as_json:
        print_json(
            [
                summary(m) if isinstance(m, Manifest) else {"image_id": i, "damage": str(m)}
                for i, m in entries.items()
            ]
        )
    else:
        print_images(entries)


@app.command()
def inspect(image: Image, file: MaybeFile = None, as_json: AsJson = False) -> None:
    """Show what an image is, and whether it fits here (with -f: this deployment, too)."""
    catalog = _catalog(file)
    manifest = catalog.inspect(image)
    differences, distrust = _differences(file)(manifest), _distrust(catalog, image)
    if as_json:
        signed_by = catalog.signed_by(image)
        trust = {"signed_by": signed_by, "distrust": distrust}
        print_json({**asdict(manifest), **trust, "mismatches": differences})
    else:
        print_manifest(manifest)
        typer.echo(distrust or f"signed by key {catalog.signed_by(image) or 'none'}, trusted here")
        fits = "it fits here" if not differences else f"does not fit: {'; '.join(differences)}"
        typer.echo(fits)


@app.command()
def verify(
    images: Annotated[list[str] | None, typer.Argument(help="Ids; default: every image.")] = None,
    file: MaybeFile = None,
    restore: Annotated[
        bool, typer.Option("--restore", help="Run a copy of each as well; needs -f.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check every byte, owner, mode, link and signature of images, and whether they fit here. With
    --restore a copy of each comes to life beside everything else, computes its probe again, and is
    ended."""
    if restore and file is None:
        raise ConfigError(["--restore: needs the deployment; name it with -f"])
    catalog, differences = _catalog(file), _differences(file)
    found: dict[str, tuple[str, ...]] = {}
    unfit: dict[str, tuple[str, ...]] = {}
    for image in images or catalog.entries():
        found[image] = catalog.findings(image)
        unfit[image] = () if found[image] else differences(catalog.inspect(image))
    timings = _try_copies(file, [i for i in found if not found[i] and not unfit[i]], restore)
    if as_json:
        print_json(
            [
                {"image_id": i, "findings": found[i], "mismatches": unfit[i], **timings.get(i, {})}
                for i in found
            ]
        )
    damaged = [line for lines in found.values() for line in lines]
    if damaged:
        raise SnapshotDamaged("; ".join(damaged))
    for image in found:
        catalog.check_trust(image)
    for image, lines in unfit.items():
        if lines:
            raise SnapshotMismatch(image, lines)
    if not as_json:
        for image in found:
            ran = "; a copy of it ran, and its probe was right" if image in timings else ""
            typer.echo(f"{image}: every byte is right, and it fits here{ran}")


@app.command()
def restore(image: Image, file: File, as_json: AsJson = False) -> None:
    """Try an image: run a copy beside everything else until it answers, then end it."""
    config = load_config(file)
    images = open_images(config)
    manifest = images.catalog.inspect(image)
    timings = asyncio.run(rehearse(images, manifest, timeout_s=config.scale.restore_timeout_s))
    if as_json:
        print_json({"image_id": image, "timings_s": timings})
        return
    typer.echo(f"{image} runs")
    for name, seconds in timings.items():
        typer.echo(f"  {name:8} {seconds * 1000:8.1f} ms")


@app.command()
def rm(image: Image, file: MaybeFile = None, as_json: AsJson = False) -> None:
    """Delete an image that is not in use."""
    _catalog(file).remove(image)
    if as_json:
        print_json({"removed": image})


@app.command("prune")
def prune_images(
    file: MaybeFile = None,
    dry_run: Annotated[bool, typer.Option(help="Only say what would go.")] = False,
    as_json: AsJson = False,
) -> None:
    """Bring the catalog within its bounds; delete stale and damaged images, and leftovers."""
    if file is None:
        alone, differences = snapshot_settings(None), _differences(None)

        def judge(manifest: Manifest) -> Judgement:
            return Judgement(ours=False, stale="; ".join(differences(manifest)))

        report = prune(_catalog(None), bounds(alone), judge, dry_run=dry_run)
    else:
        report = open_images(load_config(file)).prune(dry_run=dry_run)
    if not dry_run:
        remove_abandoned()
    if as_json:
        print_json(asdict(report))
        return
    act = "would remove" if dry_run else "removed"
    for eviction in report.removed:
        typer.echo(f"{act} {eviction.image_id}: {eviction.reason}")
    for name in report.partials:
        typer.echo(f"{act} {name}: left by a dead process")
    for eviction in report.kept:
        typer.echo(f"kept {eviction.image_id}: {eviction.reason}")


@app.command("export")
def export(
    image: Image,
    target: Annotated[Path, typer.Argument(help="Archive to make; must not exist.")],
    file: MaybeFile = None,
    as_json: AsJson = False,
) -> None:
    """Write an image, every byte checked, into one tar file."""
    manifest = export_image(_catalog(file), image, target)
    size = target.stat().st_size
    if as_json:
        print_json({**summary(manifest), "archive": str(target), "archive_bytes": size})
    else:
        typer.echo(f"{image} is in {target} ({size} bytes)")


@app.command("import")
def import_archive(
    source: Annotated[Path, typer.Argument(help="Archive made by `snapshot export`.")],
    file: MaybeFile = None,
    as_json: AsJson = False,
) -> None:
    """Take an image from an archive, if it fits here and every byte is right."""
    differences = _differences(file)

    def check(manifest: Manifest) -> None:
        found = differences(manifest)
        if found:
            raise SnapshotMismatch(manifest.image_id, found)

    manifest = import_image(_catalog(file), source, check)
    if as_json:
        print_json(summary(manifest))
    else:
        print_images({manifest.image_id: manifest})


@app.command()
def sign(image: Image, file: MaybeFile = None, as_json: AsJson = False) -> None:
    """Sign an image, every byte checked, with this host's key: who signs it vouches for it."""
    catalog = _catalog(file)
    catalog.sign(image)
    if as_json:
        print_json({"image_id": image, "signed_by": catalog.signed_by(image)})
    else:
        typer.echo(f"{image} is signed by key {catalog.signed_by(image)}")


@app.command()
def keygen(
    target: Annotated[Path, typer.Argument(help="Private key to make; must not exist.")],
) -> None:
    """Make a key for snapshot.signing_key, and beside it (.pub) the one for others'
    snapshot.trusted_keys."""
    if target.exists():
        raise ConfigError([f"{target}: exists already; choose another name"])
    make_key(target)
    typer.echo(f"private: {target} (0600)\npublic:  {target}.pub")


def _distrust(catalog: Catalog, image: str) -> str:
    """Why the image must not run; '' if it may."""
    try:
        catalog.check_trust(image)
    except SnapshotUntrusted as exc:
        return str(exc)
    return ""


def _try_copies(
    file: Path | None, sound: Sequence[str], wanted: bool
) -> dict[str, dict[str, dict[str, float]]]:
    """Image -> what its copy's restore took. Raises what rehearse() raises."""
    if file is None or not wanted:
        return {}
    config = load_config(file)
    images, timeout_s = open_images(config), config.scale.restore_timeout_s
    tried: dict[str, dict[str, dict[str, float]]] = {}
    for image in sound:
        manifest = images.catalog.inspect(image)
        timings_s = asyncio.run(rehearse(images, manifest, timeout_s=timeout_s))
        tried[image] = {"timings_s": timings_s}
    return tried


def _catalog(file: Path | None) -> Catalog:
    return open_catalog(snapshot_settings(file))


def _differences(file: Path | None) -> Callable[[Manifest], tuple[str, ...]]:
    """How an image differs from what runs here: by the deployment, or else by the machine."""
    if file is not None:
        images = open_images(load_config(file))
        return lambda manifest: mismatches(manifest.fingerprint, images.fingerprint(manifest.slot))
    try:
        version = Criu.find().version()
    except ResourceMissing as exc:
        version = f"none ({exc})"
    return lambda manifest: machine_mismatches(manifest.fingerprint, criu=version)


def _slots(config: DeploymentConfig, wanted: list[int] | None) -> list[int]:
    highest = config.scale.max_ranks - 1
    slots = list(range(highest + 1)) if wanted is None else wanted
    faults = [f"--slot {s}: this deployment has slots 0-{highest}" for s in slots if s > highest]
    if faults:
        raise ConfigError(faults)
    return slots
