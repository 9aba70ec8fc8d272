"""One deployment's settings: a YAML file, DYN_ELASTIC_* variables and --elastic-* flags.

Flag before variable before file before default, for every process and command alike; all faults
are listed at once. A string under a setting is its documentation: docs/reference/config.md, the
JSON schema and `--help` are made of it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import model_validator

from dynamo_elastic.config_resolve import CrossFaults, Resolved, resolve
from dynamo_elastic.config_sections import (
    MAX_SYSTEM_PORT,
    AgentConfig,
    AnyEngineConfig,
    CoordinatorConfig,
    EngineConfig,
    EtcdConfig,
    FrontendConfig,
    ModelConfig,
    Name,
    ObserveConfig,
    PlannerConfig,
    ScaleConfig,
    Section,
    SnapshotConfig,
    VllmEngineConfig,
    VllmGroupConfig,
    WorkersConfig,
)
from dynamo_elastic.config_sources import (
    Layer,
    from_environment,
    from_mapping,
    from_yaml,
    settings_of,
)
from dynamo_elastic.errors import ConfigError
from dynamo_elastic.secret_files import make_secret, read_secret
from dynamo_elastic.topology import EngineShape, refusal

CONFIG_VARIABLE = "DYN_ELASTIC_CONFIG"
SLOT_VARIABLE = "DYN_ELASTIC_SLOT"
OTHER_VARIABLES = (CONFIG_VARIABLE, SLOT_VARIABLE)
"""Twins of flags that are no settings of a deployment."""

FLAGS: ContextVar[Layer] = ContextVar("flags", default=MappingProxyType({}))
"""The --elastic-* flags of this command; set by its main(), once."""


class DeploymentConfig(Section):
    """Everything `dynamo-elastic serve` runs on one machine."""

    deployment: Name
    """Names the etcd prefix and the state directory."""
    namespace: Name = "dynamo"
    """Dynamo namespace of the workers."""
    model: ModelConfig
    engine: AnyEngineConfig = EngineConfig()
    scale: ScaleConfig
    coordinator: CoordinatorConfig = CoordinatorConfig()
    snapshot: SnapshotConfig = SnapshotConfig()
    agent: AgentConfig = AgentConfig()
    etcd: EtcdConfig = EtcdConfig()
    frontend: FrontendConfig = FrontendConfig()
    workers: WorkersConfig = WorkersConfig()
    planner: PlannerConfig = PlannerConfig()
    observe: ObserveConfig = ObserveConfig()
    run_dir: Path = Path("/run/dynamo-elastic")
    """Parent of the state directory: sockets, control directories, logs."""

    @property
    def state_dir(self) -> Path:
        return self.run_dir.absolute() / self.deployment

    @property
    def agent_socket(self) -> Path:
        return self.state_dir / "agent.sock"

    @property
    def operations_dir(self) -> Path:
        """Where records and reports of operations are kept."""
        return self.observe.operations_dir or self.state_dir / "operations"

    def metrics_port(self, slot: int) -> int:
        """Of the shell of `slot`; 0: none."""
        return self.workers.metrics_port and self.workers.metrics_port + slot

    @property
    def api_token_file(self) -> Path:
        """Of the HTTP API and of the workers' control routes; see api_token()."""
        return self.coordinator.api.token_file or self.state_dir / "api.token"

    def system_port(self, slot: int) -> int:
        """Of the shell of `slot`; 0: none."""
        return self.workers.system_port and self.workers.system_port + slot

    def engine_system_port(self, slot: int) -> int:
        """Of the engine of `slot` if that is Dynamo's worker itself; 0: none."""
        replica = isinstance(self.engine, VllmEngineConfig)
        return self.system_port(self.scale.max_ranks + slot) if replica else 0

    def control_dir(self, slot: int) -> Path:
        """Where the engine of `slot` meets its shell; part of its image."""
        return self.state_dir / "slots" / str(slot)

    @model_validator(mode="after")
    def _cross_checks(self) -> DeploymentConfig:
        faults = [*_port_faults(self), *_gpu_faults(self), *_group_faults(self)]
        if faults:
            raise CrossFaults(faults)
        return self


SETTINGS = settings_of(DeploymentConfig)
"""Every setting by key."""


def _port_faults(config: DeploymentConfig) -> list[str]:
    used = {"frontend.port": config.frontend.port} if config.frontend.enabled else {}
    if config.planner.enabled and config.planner.start:
        used["planner.control_port"] = config.planner.control_port
    if config.coordinator.api.port:
        used["coordinator.api.port"] = config.coordinator.api.port
    if config.agent.metrics_port:
        used["agent.metrics_port"] = config.agent.metrics_port
    if config.coordinator.metrics_port:
        used["coordinator.metrics_port"] = config.coordinator.metrics_port
    if config.etcd.start:
        used |= {"etcd.port": config.etcd.port, "etcd.peer_port": config.etcd.peer_port}
    if isinstance(config.engine, VllmGroupConfig):
        used["engine.rpc_port"] = config.engine.rpc_port
    for slot in range(config.scale.max_ranks):
        if config.metrics_port(slot):
            used[f"workers.metrics_port (slot {slot})"] = config.metrics_port(slot)
        if config.system_port(slot):
            used[f"workers.system_port (slot {slot})"] = config.system_port(slot)
        if config.engine_system_port(slot):
            used[f"workers.system_port (engine {slot})"] = config.engine_system_port(slot)
    seen: dict[int, str] = {}
    faults = []
    for name, port in used.items():
        if port in seen:
            faults.append(f"{name}: port {port} is also {seen[port]}; choose another")
        seen.setdefault(port, name)
    final = config.scale.max_ranks - 1
    last = max(config.system_port(final), config.engine_system_port(final))
    if last > MAX_SYSTEM_PORT:
        faults.append(
            f"workers.system_port: {last} of the last slot is above {MAX_SYSTEM_PORT}, the most "
            "that Dynamo takes; choose a lower one"
        )
    return faults


def _group_faults(config: DeploymentConfig) -> list[str]:
    if isinstance(config.engine, VllmGroupConfig) and config.scale.initial_ranks < 2:
        return ["scale.initial_ranks: vLLM starts no group that shares experts below 2; set 2"]
    return []


def _gpu_faults(config: DeploymentConfig) -> list[str]:
    named, slots = len(config.agent.gpus), config.scale.max_ranks
    if named in (0, slots):
        return []
    return [f"agent.gpus: names {named} GPUs for {slots} slots (scale.max_ranks); name one of each"]


def load_config(path: Path, flags: Layer | None = None) -> DeploymentConfig:
    """The settings of `path`, DYN_ELASTIC_* and --elastic-* flags. Raises ConfigError with every
    fault, its source and its remedy.

    Relative paths in them are relative to the current directory.
    """
    return resolve_config(path, os.environ, FLAGS.get() if flags is None else flags).config


def resolve_config(
    path: Path, environ: Mapping[str, str], flags: Layer
) -> Resolved[DeploymentConfig]:
    """The settings in force and where each comes from. Raises ConfigError like load_config()."""
    try:
        text = path.read_text()
    except OSError as exc:
        raise ConfigError([f"{path}: can't be read ({exc.strerror}); check the path"]) from exc
    except UnicodeDecodeError as exc:
        raise ConfigError([f"{path}: not YAML: not UTF-8 ({exc.reason})"]) from exc
    file = from_yaml(text, path.name, SETTINGS)
    layers = (file, from_environment(environ, SETTINGS, OTHER_VARIABLES), flags)
    return resolve(DeploymentConfig, layers, SETTINGS)


def snapshot_settings(path: Path | None) -> SnapshotConfig:
    """The section `snapshot` in force: of a deployment, or, without one, of variables and flags
    alone. Raises ConfigError, also for flags of other sections, which would do nothing."""
    if path is not None:
        return load_config(path).snapshot
    flags, mine = FLAGS.get(), {k: s for k, s in SETTINGS.items() if k.startswith("snapshot.")}
    idle = [g.origin for key, g in flags.items() if key in SETTINGS and key not in mine]
    if idle:
        raise ConfigError([f"{flag}: does nothing without a deployment (-f)" for flag in idle])
    environment = from_environment(os.environ, SETTINGS, OTHER_VARIABLES)
    ours = {key: g for key, g in environment.items() if key in mine or key not in SETTINGS}
    return resolve(_SnapshotAlone, (ours, flags), mine).config.snapshot


class _SnapshotAlone(Section):
    snapshot: SnapshotConfig = SnapshotConfig()


def api_token(config: DeploymentConfig) -> str:
    """What HTTP API and control routes want to hear: of the file that is set, or of one that is
    made in the state directory. Raises ConfigError if others could read it."""
    if config.coordinator.api.token_file is None:
        config.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        make_secret(config.api_token_file)
    return read_secret(config.api_token_file, "coordinator.api.token_file")


def parse_config(raw: dict[str, Any]) -> DeploymentConfig:
    """Check settings that are already a mapping, and nothing else. Raises ConfigError like
    load_config()."""
    return resolve(DeploymentConfig, [from_mapping(raw, SETTINGS)], SETTINGS).config


def engine_shape(config: DeploymentConfig, num_experts: int) -> EngineShape:
    """Shape of the deployment's engines. Raises ConfigError if its widths can't hold the model."""
    if isinstance(config.engine, VllmEngineConfig):
        # vLLM places experts itself; our plans name none.
        shape = EngineShape(num_experts=0, slots_per_rank=0)
    else:
        shape = EngineShape(num_experts, config.engine.slots_per_rank)
    reason = refusal(config.scale.initial_ranks, shape, config.scale.limits, config.scale.max_ranks)
    if reason is not None:
        raise ConfigError([f"scale.initial_ranks: {reason}"])
    if isinstance(config.engine, VllmGroupConfig):
        held = config.scale.min_ranks * config.engine.slots_per_rank
        if held < num_experts:
            raise ConfigError(
                [
                    f"scale.min_ranks: {config.scale.min_ranks} ranks hold {held} experts "
                    f"(engine.slots_per_rank), the model has {num_experts}; raise one of them"
                ]
            )
    return shape
