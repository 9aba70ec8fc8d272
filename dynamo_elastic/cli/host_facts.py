"""What `doctor` looks at: this host as it is. Nothing is changed; what is started ends at once."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from dynamo_elastic.config import DeploymentConfig, snapshot_settings
from dynamo_elastic.errors import ConfigError, ElasticError, ResourceMissing
from dynamo_elastic.serve.preflight import check_host
from dynamo_elastic.snapshot.base import CudaCapabilities, GpuInfo
from dynamo_elastic.snapshot.criu import Criu
from dynamo_elastic.snapshot.gpu import NO_GPU, NoGpu, open_gpu
from dynamo_elastic.snapshot.namespace import temporary_namespace
from dynamo_elastic.snapshot.nvml import GpuModes, Nvml

_MPS = "nvidia-cuda-mps-control"
_CONNECT_TIMEOUT_S = 2.0
_IO_URING = Path("/proc/sys/kernel/io_uring_disabled")
_PID_MAX = Path("/proc/sys/kernel/pid_max")


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Texts that begin with `no_` say what stands in the way; '' if nothing does."""

    uid: int
    no_namespace: str
    criu: str
    """Its version; '' without a usable one."""
    no_criu: str
    page_server: bool
    """Whether the kernel lets us fill the memory of restored processes."""
    gpus: tuple[GpuInfo, ...]
    no_gpu: str
    """Why GPUs that the kernel has can't be used."""
    cuda: CudaCapabilities
    modes: Mapping[str, GpuModes]
    mps: bool
    catalog: Path
    catalog_free_bytes: int
    catalog_in_memory: bool
    memory_free_bytes: int
    io_uring_disabled: int
    """kernel.io_uring_disabled; 2: nobody has it, -1: the kernel has no such setting."""
    pid_max: int
    no_nixl: str
    no_etcd: str
    faults: tuple[str, ...] = field(default=())
    """Of the deployment on this host, as `serve` would name them."""


def read_facts(config: DeploymentConfig | None) -> HostFacts:
    """This host, for `config` if there is one."""
    catalog = (snapshot_settings(None) if config is None else config.snapshot).catalog
    existing = next(path for path in (catalog, *catalog.absolute().parents) if path.exists())
    criu, no_criu, page_server = _criu()
    gpus, cuda, modes, no_gpu = _gpus()
    return HostFacts(
        uid=os.geteuid(),
        no_namespace=_no_namespace(),
        criu=criu,
        no_criu=no_criu,
        page_server=page_server,
        gpus=gpus,
        no_gpu=no_gpu,
        cuda=cuda,
        modes=modes,
        mps=any(_MPS in (p.info["name"] or "") for p in psutil.process_iter(["name"])),
        catalog=catalog,
        catalog_free_bytes=shutil.disk_usage(existing).free,
        catalog_in_memory=_file_system(existing) in ("tmpfs", "ramfs"),
        memory_free_bytes=psutil.virtual_memory().available,
        io_uring_disabled=int(_IO_URING.read_text()) if _IO_URING.exists() else -1,
        pid_max=int(_PID_MAX.read_text()),
        no_nixl=_no_nixl(),
        no_etcd=_no_etcd(config),
        faults=_faults(config),
    )


def _criu() -> tuple[str, str, bool]:
    try:
        criu = Criu.find()
    except ElasticError as exc:
        return "", str(exc), False
    return criu.version(), "", criu.page_server


def _gpus() -> tuple[tuple[GpuInfo, ...], CudaCapabilities, Mapping[str, GpuModes], str]:
    try:
        gpu = open_gpu()
        if gpu is NO_GPU:
            return (), gpu.driver.capabilities(), {}, ""
        return gpu.inventory.gpus(), gpu.driver.capabilities(), Nvml.open().modes(), ""
    except ResourceMissing as exc:
        return (), NoGpu().capabilities(), {}, str(exc)


def _no_namespace() -> str:
    try:
        with temporary_namespace({}):
            return ""
    except ElasticError as exc:
        return str(exc)


def _no_nixl() -> str:
    try:
        from dynamo_elastic.comm.nixl_agent import NixlAgent
    except ImportError as exc:
        return f"{exc}: install nixl-cu13"
    try:
        NixlAgent("doctor").close()
    except ElasticError as exc:
        return str(exc)
    return ""


def _no_etcd(config: DeploymentConfig | None) -> str:
    if config is None or config.etcd.start:
        return "" if shutil.which("etcd") else "no etcd program: install etcd-server"
    return "; ".join(filter(None, map(_unreachable, config.etcd.endpoints)))


def _unreachable(url: str) -> str:
    parts = urlsplit(url)
    try:
        with socket.create_connection(
            (parts.hostname or "", parts.port or 2379), timeout=_CONNECT_TIMEOUT_S
        ):
            return ""
    except OSError as exc:
        return f"{url} can't be reached ({exc}): correct etcd.endpoints or start it"


def _faults(config: DeploymentConfig | None) -> tuple[str, ...]:
    if config is None:
        return ()
    try:
        check_host(config)
    except ConfigError as exc:
        return exc.faults
    return ()


def _file_system(path: Path) -> str:
    """The type of the file system that holds `path`."""
    mounts: Sequence[str] = Path("/proc/mounts").read_text().splitlines()
    found = ("", "")
    for line in mounts:
        _, target, kind = line.split()[:3]
        if path.is_relative_to(target) and len(target) >= len(found[0]):
            found = (target, kind)
    return found[1]
