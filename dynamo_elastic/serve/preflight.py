"""What must hold before anything is started: one line a fault, with field and remedy."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dynamo_elastic.agent.open_images import open_images
from dynamo_elastic.config import DeploymentConfig, api_token, engine_shape
from dynamo_elastic.config_sections import VllmEngineConfig, VllmGroupConfig
from dynamo_elastic.engine.launch import engine_python, shared_experts
from dynamo_elastic.engine.shape import CONFIG_FILE
from dynamo_elastic.engine.vllm.versions import check_elastic, check_versions, installed
from dynamo_elastic.errors import ConfigError, ElasticError


def check_host(config: DeploymentConfig) -> int:
    """Check model, widths, ports, etcd and CRIU; return the model's number of experts.

    Raises ConfigError with every fault found. Nothing is started or changed.
    """
    faults: list[str] = []
    num_experts = 0
    try:
        num_experts = _check_engine(config)
        engine_shape(config, num_experts)
    except ConfigError as exc:
        faults += exc.faults
    faults += _port_faults(config)
    if config.coordinator.api.token_file is not None:
        try:
            api_token(config)
        except ConfigError as exc:
            faults += exc.faults
    if config.etcd.start and shutil.which("etcd") is None:
        faults.append("etcd.start: no etcd program; install etcd-server or set etcd.endpoints")
    faults += _snapshot_faults(config)
    if faults:
        raise ConfigError(faults)
    return num_experts


def _check_engine(config: DeploymentConfig) -> int:
    """The number of experts that its ranks share; 0 for replicas. Raises ConfigError."""
    if not isinstance(config.engine, VllmEngineConfig):
        return shared_experts(config)
    python = engine_python(config.engine)
    found = installed(python)
    check_versions(found, python)
    if isinstance(config.engine, VllmGroupConfig):
        check_elastic(found)
    if not (config.model.path / CONFIG_FILE).is_file():
        raise ConfigError(
            [f"model.path: {config.model.path} has no {CONFIG_FILE}; name a model directory"]
        )
    return shared_experts(config)


def _snapshot_faults(config: DeploymentConfig) -> list[str]:
    if not config.snapshot.enabled:
        return []
    try:
        open_images(config)
    except ElasticError as exc:
        return [f"snapshot.enabled: {exc}; or set snapshot.enabled to false (joiners boot cold)"]
    return []


def _port_faults(config: DeploymentConfig) -> list[str]:
    wanted = {}
    if config.frontend.enabled:
        wanted["frontend.port"] = (config.frontend.host, config.frontend.port)
    if config.planner.enabled and config.planner.start:
        wanted["planner.control_port"] = ("127.0.0.1", config.planner.control_port)
    api = config.coordinator.api
    if api.port:
        wanted["coordinator.api.port"] = (api.host, api.port)
    if config.workers.system_port:
        for slot in range(config.scale.max_ranks):
            name = f"workers.system_port (slot {slot})"
            wanted[name] = ("127.0.0.1", config.system_port(slot))
    if config.etcd.start:
        wanted["etcd.port"] = ("127.0.0.1", config.etcd.port)
        wanted["etcd.peer_port"] = ("127.0.0.1", config.etcd.peer_port)
    return [
        f"{field}: port {port} on {host} is in use; choose another or stop what uses it"
        for field, (host, port) in wanted.items()
        if not _is_free(host, port)
    ]


def _is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


@contextmanager
def state_directory(config: DeploymentConfig) -> Iterator[Path]:
    """Own the deployment's state directory (mode 0700) while in the context.

    Raises ConfigError if it can't be made, or another `serve` of this deployment owns it.
    """
    path = config.state_dir
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise ConfigError(
            [f"run_dir: {path} can't be made ({exc.strerror}); choose a directory you may write"]
        ) from exc
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            raise ConfigError(
                [
                    f"deployment: {config.deployment!r} is already served from {path}; "
                    "stop that one or choose another name"
                ]
            ) from exc
        yield path
    finally:
        os.close(handle)
