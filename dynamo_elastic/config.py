"""One deployment's settings: the YAML of `serve -f`, validated with all faults listed at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dynamo_elastic.errors import ConfigError
from dynamo_elastic.topology import EngineShape, ScaleLimits, refusal

Port = Annotated[int, Field(ge=1024, le=65535)]
Seconds = Annotated[float, Field(gt=0, le=3600)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?$")]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_default=True, frozen=True)


class ModelConfig(_Section):
    """What is served."""

    path: Path
    """Directory with config.json, tokenizer and model.safetensors."""
    name: str = Field(min_length=1)
    """Name that clients ask for."""


class EngineConfig(_Section):
    """The engine of every rank."""

    slots_per_rank: int = Field(default=8, ge=1)
    """Expert slots of a rank. Ranks x slots must hold every expert."""
    batch_tokens: int = Field(default=8, ge=1, le=256)
    """Tokens of a step: decodes first, then prefill."""
    max_context: int = Field(default=256, ge=16)
    kv_blocks: int = Field(default=256, ge=1)
    peer_timeout_s: Seconds = 5.0
    """A peer that is silent for so long in a step is masked."""


class ScaleConfig(_Section):
    """Legal widths and time limits of scale operations."""

    initial_ranks: int = Field(ge=1)
    min_ranks: int = Field(default=1, ge=1)
    max_ranks: int = Field(ge=1)
    multiple_of: int = Field(default=1, ge=1)
    step_timeout_s: Seconds = 30.0
    """Deadline of one step of one participant, restore excepted."""
    restore_timeout_s: Seconds = 120.0
    drain_timeout_s: Seconds = 10.0
    short_tokens: int = Field(default=8, ge=0)
    """A leaver lets requests with at most so many tokens to go finish; the others move."""
    lease_ttl_s: int = Field(default=5, ge=2, le=60)
    operation_timeout_s: Seconds = 300.0
    """Deadline of a whole operation: it aborts before COMMIT, and stops moving experts after it."""
    slots_timeout_s: Seconds = 120.0
    """A target that can't be acted on for so long, say for want of free slots, is given up."""
    quarantine_s: Seconds = 300.0
    """A slot, or a slot's image, that failed twice in a row is left out for so long."""

    @property
    def limits(self) -> ScaleLimits:
        return ScaleLimits(self.min_ranks, self.max_ranks, self.multiple_of)


class SnapshotConfig(_Section):
    """Images of warm engines."""

    enabled: bool = True
    """Without images every joiner boots cold."""
    catalog: Path = Path("/var/lib/dynamo-elastic/images")
    create_missing: bool = True
    """Make images for slots that have none before serving."""
    max_images_per_slot: int = Field(default=1, ge=1, le=100)
    """Of one deployment; a new image takes the place of the oldest."""
    max_bytes: int = Field(default=64 << 30, ge=1 << 20)
    """Of the whole catalog; beyond it the least recently used images go."""
    max_age_s: float = Field(default=30 * 86400, gt=0)
    """Images of any deployment that were not used for so long go."""
    quarantine_s: Seconds = 600.0
    """An image that failed to restore twice is not tried for so long."""


class EtcdConfig(_Section):
    """The store. With `start`, serve runs its own etcd on loopback."""

    start: bool = True
    port: Port = 2379
    peer_port: Port = 2380
    endpoints: tuple[str, ...] = ()
    """Of an etcd that exists already; then `start` must be false."""

    @property
    def urls(self) -> tuple[str, ...]:
        return self.endpoints or (f"http://127.0.0.1:{self.port}",)


class FrontendConfig(_Section):
    """Dynamo's OpenAI frontend."""

    enabled: bool = True
    host: str = "127.0.0.1"
    port: Port = 8000
    migration_limit: int = Field(default=10, ge=0)
    """How often a stream may move to another rank over its life, scale-downs and deaths alike."""


class PlannerConfig(_Section):
    """Dynamo's planner, deciding in its `virtual` environment."""

    enabled: bool = True
    control_port: Port = 9086
    interval_s: int = Field(default=2, ge=1)
    settings: dict[str, Any] = Field(default_factory=dict)
    """More planner settings, passed on as they are."""


class DeploymentConfig(_Section):
    """Everything `dynamo-elastic serve` runs on one machine."""

    deployment: Name
    """Names the etcd prefix and the state directory."""
    namespace: Name = "dynamo"
    """Dynamo namespace of the workers."""
    model: ModelConfig
    engine: EngineConfig = EngineConfig()
    scale: ScaleConfig
    snapshot: SnapshotConfig = SnapshotConfig()
    etcd: EtcdConfig = EtcdConfig()
    frontend: FrontendConfig = FrontendConfig()
    planner: PlannerConfig = PlannerConfig()
    run_dir: Path = Path("/run/dynamo-elastic")
    """Parent of the state directory: sockets, control directories, logs."""

    @property
    def state_dir(self) -> Path:
        return self.run_dir.absolute() / self.deployment

    @property
    def agent_socket(self) -> Path:
        return self.state_dir / "agent.sock"

    def control_dir(self, slot: int) -> Path:
        """Where the engine of `slot` meets its shell; part of its image."""
        return self.state_dir / "slots" / str(slot)

    @model_validator(mode="after")
    def _cross_checks(self) -> DeploymentConfig:
        faults = [*_port_faults(self), *_scale_faults(self.scale)]
        if self.etcd.endpoints and self.etcd.start:
            faults.append("etcd.endpoints: an etcd exists already; set etcd.start to false")
        if faults:
            raise ConfigError(faults)
        return self


def _port_faults(config: DeploymentConfig) -> list[str]:
    used = {"frontend.port": config.frontend.port} if config.frontend.enabled else {}
    if config.planner.enabled:
        used["planner.control_port"] = config.planner.control_port
    if config.etcd.start:
        used |= {"etcd.port": config.etcd.port, "etcd.peer_port": config.etcd.peer_port}
    seen: dict[int, str] = {}
    faults = []
    for name, port in used.items():
        if port in seen:
            faults.append(f"{name}: port {port} is also {seen[port]}; choose another")
        seen.setdefault(port, name)
    return faults


def _scale_faults(scale: ScaleConfig) -> list[str]:
    faults = []
    if scale.min_ranks > scale.max_ranks:
        faults.append(
            f"scale.min_ranks: {scale.min_ranks} is above scale.max_ranks {scale.max_ranks}"
        )
    elif not scale.min_ranks <= scale.initial_ranks <= scale.max_ranks:
        faults.append(
            f"scale.initial_ranks: {scale.initial_ranks} is outside "
            f"{scale.min_ranks}-{scale.max_ranks} (scale.min_ranks, scale.max_ranks)"
        )
    longest_s = max(scale.restore_timeout_s, scale.drain_timeout_s + scale.step_timeout_s)
    if scale.operation_timeout_s <= longest_s:
        faults.append(
            f"scale.operation_timeout_s: must be above {longest_s:g}, the longest step "
            "(scale.restore_timeout_s, or scale.drain_timeout_s + scale.step_timeout_s)"
        )
    if scale.lease_ttl_s >= scale.step_timeout_s:
        faults.append("scale.lease_ttl_s: must be below scale.step_timeout_s")
    return faults


def load_config(path: Path) -> DeploymentConfig:
    """Read and check a deployment YAML. Raises ConfigError with every fault, field and remedy.

    Relative paths in it are relative to the current directory.
    """
    try:
        raw = yaml.safe_load(path.read_text())
    except OSError as exc:
        raise ConfigError([f"{path}: can't be read ({exc.strerror}); check the path"]) from exc
    except yaml.YAMLError as exc:
        raise ConfigError([f"{path}: not YAML: {' '.join(str(exc).split())}"]) from exc
    if not isinstance(raw, dict):
        raise ConfigError([f"{path}: must be a mapping of settings, see examples/local.yaml"])
    return parse_config(raw)


def parse_config(raw: dict[str, Any]) -> DeploymentConfig:
    """Check settings that are already a mapping. Raises ConfigError like load_config()."""
    try:
        return DeploymentConfig.model_validate(raw)
    except ValidationError as exc:
        raise ConfigError([_fault(dict(e)) for e in exc.errors()]) from exc


def _fault(error: dict[str, Any]) -> str:
    where = ".".join(str(p) for p in error["loc"]) or "(top level)"
    if error["type"] == "extra_forbidden":
        return f"{where}: unknown setting; remove it or correct the spelling"
    if error["type"] == "missing":
        return f"{where}: is required; add it"
    return f"{where}: {error['msg'].lower()}, got {error['input']!r}"


def engine_shape(config: DeploymentConfig, num_experts: int) -> EngineShape:
    """Shape of the deployment's engines. Raises ConfigError if its widths can't hold the model."""
    shape = EngineShape(num_experts, config.engine.slots_per_rank)
    reason = refusal(config.scale.initial_ranks, shape, config.scale.limits, config.scale.max_ranks)
    if reason is not None:
        raise ConfigError([f"scale.initial_ranks: {reason}"])
    return shape
