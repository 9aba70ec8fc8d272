"""What must be equal between the world in which an image was made and the one it runs in."""

from __future__ import annotations

import functools
import hashlib
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from importlib import metadata
from pathlib import Path

import dynamo_elastic

SCHEMA = 1
_CPU_FIELDS = ("vendor_id", "cpu family", "model", "stepping", "model name", "flags")
_SHOWN_CHARS = 60


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Compared field by field; a process image runs with none of them changed."""

    schema: int
    python: str
    torch: str
    nixl: str
    criu: str
    kernel: str
    cpu: str
    """Digest of model, stepping and flags."""
    libc: str
    package: str
    """Version of dynamo_elastic, and digest of its sources."""
    argv: tuple[str, ...]
    environment: str
    """Digest of the variables that change what the engine loads or does."""
    model: str
    """Digest of what the engine's warm-up depended on."""
    slot: int
    control_dir: str


def mismatches(image: Fingerprint, here: Fingerprint) -> tuple[str, ...]:
    """One line for each field that differs: with any, the image does not fit."""
    return tuple(
        f"{field.name}: the image has {_short(a)}, here is {_short(b)}"
        for field in fields(Fingerprint)
        if (a := getattr(image, field.name)) != (b := getattr(here, field.name))
    )


def machine_mismatches(image: Fingerprint, *, criu: str) -> tuple[str, ...]:
    """Like mismatches(), of what this machine decides alone, whatever the deployment. `criu`: the
    version here."""
    here = replace(
        image,
        criu=criu,
        kernel=platform.release(),
        cpu=cpu_identity(Path("/proc/cpuinfo").read_text()),
        libc=" ".join(platform.libc_ver()),
    )
    return mismatches(image, here)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


@functools.cache
def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


@functools.cache
def _package() -> str:
    """Version and source digest of what this process, and so the engines it starts, imports."""
    root = Path(dynamo_elastic.__file__).parent
    digest = hashlib.sha256()
    # The links to comm/ and snapshot/ are followed one by one: rglob does not follow links.
    for top in (root, root / "comm", root / "snapshot"):
        for path in sorted(top.resolve().rglob("*.py")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"{dynamo_elastic.__version__} {digest.hexdigest()[:16]}"


def cpu_identity(cpuinfo: str) -> str:
    """Digest of what /proc/cpuinfo says of the first CPU's model and features; order of flags and
    clock do not matter."""
    first = cpuinfo.split("\n\n", 1)[0]
    found = dict(re.findall(r"^([^\t:]+?)\s*:\s*(.*)$", first, re.MULTILINE))
    parts = [" ".join(sorted(found.get(name, "").split())) for name in _CPU_FIELDS]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def digest_environment(environment: Mapping[str, str]) -> str:
    text = "\0".join(f"{name}={environment[name]}" for name in sorted(environment))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_fingerprint(
    *,
    criu: str,
    argv: tuple[str, ...],
    environment: Mapping[str, str],
    model: str,
    slot: int,
    control_dir: Path,
) -> Fingerprint:
    """The fingerprint of this host for one engine command."""
    return Fingerprint(
        schema=SCHEMA,
        python=sys.version.split()[0],
        torch=_installed("torch"),
        nixl=_installed("nixl-cu13"),
        criu=criu,
        kernel=platform.release(),
        cpu=cpu_identity(Path("/proc/cpuinfo").read_text()),
        libc=" ".join(platform.libc_ver()),
        package=_package(),
        argv=argv,
        environment=digest_environment(environment),
        model=model,
        slot=slot,
        control_dir=str(control_dir),
    )
