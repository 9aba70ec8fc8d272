"""What must be equal between the world in which an image was made and the one it runs in."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import platform
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib import metadata
from pathlib import Path

import dynamo_elastic
from dynamo_elastic.snapshot.base import GpuInfo
from dynamo_elastic.snapshot.cuda_findings import IPC_CACHE

SCHEMA = 2
NONE = "none"
"""Of what this host, or this engine's environment, does not have."""
_CPU_FIELDS = ("vendor_id", "cpu family", "model", "stepping", "model name", "flags")
_SHOWN_CHARS = 60
_CUDA_RUNTIME = "nvidia-cuda-runtime"
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


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
    gpu_driver: str
    """Version of the NVIDIA driver."""
    gpu_model: str
    """Name and compute capability of the GPUs that the engine sees."""
    gpu: str
    """Their uuids. An image goes back to the GPU that it was made on."""
    host_gpus: str
    """Uuids of all GPUs of the host, in the driver's order: it counts them all."""
    cuda_runtime: str
    """Of the wheel, and of torch's build."""
    cuda_visible_devices: str
    ucx_cuda_ipc_cache: str


def mismatches(image: Fingerprint, here: Fingerprint, *, of: str = "the image") -> tuple[str, ...]:
    """One line for each field that differs: with any, the image does not fit. `of`: what it is
    called in them."""
    return tuple(
        "{}: {} has {}, here is {}".format(field.name, of, *_shown(str(a), str(b)))
        for field in fields(Fingerprint)
        if (a := getattr(image, field.name)) != (b := getattr(here, field.name))
    )


def machine_mismatches(
    image: Fingerprint, *, criu: str, gpus: Sequence[GpuInfo] | None = None
) -> tuple[str, ...]:
    """Like mismatches(), of what this machine decides alone, whatever the deployment. `criu`: the
    version here; `gpus`: all that are here, None if nobody looked."""
    here = replace(
        image,
        criu=criu,
        kernel=platform.release(),
        cpu=cpu_identity(Path("/proc/cpuinfo").read_text()),
        libc=" ".join(platform.libc_ver()),
        gpu_driver=_drivers(gpus) if gpus is not None else image.gpu_driver,
        host_gpus=_uuids(gpus) if gpus is not None else image.host_gpus,
    )
    return mismatches(image, here)


def _shown(a: str, b: str) -> tuple[str, str]:
    """Both, cut short around where they begin to differ."""
    pairs = zip(a, b, strict=False)
    same = next((at for at, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))
    start = max(0, same - _SHOWN_CHARS // 3) if max(len(a), len(b)) > _SHOWN_CHARS else 0
    return _cut(a, start), _cut(b, start)


def _cut(text: str, start: int) -> str:
    end = start + _SHOWN_CHARS
    return f"{'...' if start else ''}{text[start:end]}{'...' if text[end:] else ''}"


@functools.cache
def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


@functools.cache
def _torch_cuda() -> str:
    """The CUDA version that torch was built for, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return NONE
    text = Path(spec.origin).with_name("version.py").read_text()
    match = re.search(r"^cuda\b[^=]*= '([^']+)'", text, re.MULTILINE)
    return match[1] if match else NONE


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
    gpus: Sequence[GpuInfo] = (),
) -> Fingerprint:
    """The fingerprint of this host for one engine command. `environment`: the variables that change
    what the engine loads or does; `gpus`: all of the host."""
    seen = visible_gpus(gpus, environment)
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
        gpu_driver=_drivers(gpus),
        gpu_model=_joined(f"{gpu.name} {gpu.compute_capability}" for gpu in seen),
        gpu=_uuids(seen),
        host_gpus=_uuids(gpus),
        cuda_runtime=f"{_installed(_CUDA_RUNTIME)}, torch for {_torch_cuda()}",
        cuda_visible_devices=environment.get(VISIBLE_DEVICES, NONE),
        ucx_cuda_ipc_cache=environment.get(IPC_CACHE, NONE),
    )


def visible_gpus(gpus: Sequence[GpuInfo], environment: Mapping[str, str]) -> tuple[GpuInfo, ...]:
    """Those that an engine with this environment sees, in its order: all without
    CUDA_VISIBLE_DEVICES, else up to the first entry that names none, as CUDA reads it."""
    wanted = environment.get(VISIBLE_DEVICES)
    if wanted is None:
        return tuple(gpus)
    found: list[GpuInfo] = []
    for entry in filter(None, map(str.strip, wanted.split(","))):
        match = [g for g in gpus if str(g.index) == entry or g.uuid.startswith(entry)]
        if len(match) != 1:
            break
        found += match
    return tuple(found)


def _drivers(gpus: Iterable[GpuInfo]) -> str:
    return _joined(dict.fromkeys(gpu.driver_version for gpu in gpus))


def _uuids(gpus: Iterable[GpuInfo]) -> str:
    return _joined(gpu.uuid for gpu in gpus)


def _joined(parts: Iterable[str]) -> str:
    return ", ".join(parts) or NONE
