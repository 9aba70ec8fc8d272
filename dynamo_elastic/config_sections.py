"""The sections of a deployment's settings. A string under a setting is its documentation."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from dynamo_elastic.config_resolve import CrossFaults
from dynamo_elastic.topology import ScaleLimits
from dynamo_elastic.vllm_flags import OWN, OWN_OF_GROUP, flag_faults, flag_of

LOOPBACK = ("127.0.0.1", "localhost", "::1")

MAX_SYSTEM_PORT = 32767
Port = Annotated[int, Field(ge=1024, le=65535)]
Seconds = Annotated[float, Field(gt=0, le=3600)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?$")]


class Section(BaseModel):
    """Settings under one name; unknown names are faults."""

    model_config = ConfigDict(
        extra="forbid", validate_default=True, frozen=True, use_attribute_docstrings=True
    )


class ModelConfig(Section):
    """What is served."""

    path: Path
    """Directory with config.json, tokenizer and model.safetensors."""
    name: str = Field(min_length=1)
    """Name that clients ask for."""


class EngineConfig(Section):
    """The reference engine, on every rank."""

    kind: Literal["reference"] = "reference"
    """Which engine: our small reference model, or vLLM under Dynamo's own worker."""

    device: Literal["cpu", "cuda"] = "cpu"
    """What it computes with: the CPU in float32, or a GPU in bfloat16 with NIXL EP and CUDA graphs.
    On a GPU the model's hidden size must be one that NIXL EP has kernels for."""
    slots_per_rank: int = Field(default=8, ge=1)
    """Expert slots of a rank. Ranks x slots must hold every expert."""
    batch_tokens: int = Field(default=8, ge=1, le=256)
    """Tokens of a step: decodes first, then prefill."""
    max_context: int = Field(default=256, ge=16)
    """Tokens of a request at most, prompt and answer together."""
    kv_blocks: int = Field(default=256, ge=1)
    """Blocks of a rank's KV cache, 16 tokens each."""
    peer_timeout_s: Seconds = 5.0
    """A peer that is silent for so long in a step is masked."""


KV_CACHE_FLAG = "--kv-cache-memory-bytes"


class VllmEngineConfig(Section):
    """vLLM under Dynamo's own worker, `dynamo.vllm`: a whole model on every rank."""

    kind: Literal["vllm"] = "vllm"
    """Which engine: our small reference model, or vLLM under Dynamo's own worker, with a whole
    model on every rank or with experts that the ranks share (`vllm-elastic`)."""
    python: Path | None = None
    """Interpreter of the environment that has vLLM and ai-dynamo; null for this one."""
    args: str = ""
    """Flags of `dynamo.vllm`, as a shell would take them."""

    @property
    def argv(self) -> tuple[str, ...]:
        return tuple(shlex.split(self.args))

    @model_validator(mode="after")
    def _check_args(self) -> VllmEngineConfig:
        try:
            faults = [f"engine.args: {fault}" for fault in self._flag_faults()]
        except ValueError as exc:
            faults = [f"engine.args: {exc}; correct the quotes"]
        if faults:
            raise CrossFaults(faults)
        return self

    def _flag_faults(self) -> list[str]:
        return flag_faults(self.argv, OWN)


class VllmGroupConfig(VllmEngineConfig):
    """vLLM 0.33 under Dynamo's own worker, its ranks sharing experts over NIXL EP."""

    kind: Literal["vllm-elastic"] = "vllm-elastic"  # type: ignore[assignment]
    """Which engine: our small reference model, or vLLM under Dynamo's own worker, with a whole
    model on every rank or with experts that the ranks share (`vllm-elastic`)."""
    slots_per_rank: int = Field(default=64, ge=1)
    """Expert slots of a rank. The fewest ranks x slots must hold every expert."""
    rpc_port: Port = 29600
    """Where rank 0 answers ranks that join it, on loopback."""

    def _flag_faults(self) -> list[str]:
        missing = KV_CACHE_FLAG not in map(flag_of, self.argv)
        remedy = f"{KV_CACHE_FLAG}: a rank that boots without a group can't measure it; give it"
        return [*flag_faults(self.argv, OWN_OF_GROUP), *([remedy] if missing else [])]


def _engine_kind(raw: Any) -> str:
    kind = raw.get("kind", "reference") if isinstance(raw, Mapping) else raw.kind
    return kind if isinstance(kind, str) else ""


AnyEngineConfig = Annotated[
    Annotated[EngineConfig, Tag("reference")]
    | Annotated[VllmEngineConfig, Tag("vllm")]
    | Annotated[VllmGroupConfig, Tag("vllm-elastic")],
    Discriminator(
        _engine_kind,
        custom_error_type="engine_kind",
        custom_error_message="kind must be 'reference', 'vllm' or 'vllm-elastic'",
    ),
]


class ScaleConfig(Section):
    """Legal widths and time limits of scale operations."""

    initial_ranks: int = Field(ge=1)
    """Ranks to boot with."""
    min_ranks: int = Field(default=1, ge=1)
    """No target below this is legal."""
    max_ranks: int = Field(ge=1)
    """No target above this is legal. One GPU slot and one worker shell for each."""
    multiple_of: int = Field(default=1, ge=1)
    """A legal width is a multiple of this."""
    step_timeout_s: Seconds = 30.0
    """Deadline of one step of one participant, restore excepted."""
    restore_timeout_s: Seconds = 120.0
    """Deadline of a joiner's engine, from image or cold, until it reports in."""
    drain_timeout_s: Seconds = 10.0
    """Time that a leaver has to let short requests finish."""
    short_tokens: int = Field(default=8, ge=0)
    """A leaver lets requests with at most so many tokens to go finish; the others move."""
    lease_ttl_s: int = Field(default=5, ge=2, le=60)
    """A process of ours that is silent for so long counts as dead: coordinator, shell."""
    operation_timeout_s: Seconds = 300.0
    """Deadline of a whole operation: it aborts before COMMIT, and stops moving experts after it."""
    slots_timeout_s: Seconds = 120.0
    """A target that can't be acted on for so long, say for want of free slots, is given up."""
    quarantine_s: Seconds = 300.0
    """A slot, or a slot's image, that failed twice in a row is left out for so long."""

    @property
    def limits(self) -> ScaleLimits:
        return ScaleLimits(self.min_ranks, self.max_ranks, self.multiple_of)

    @model_validator(mode="after")
    def _cross_checks(self) -> ScaleConfig:
        faults = _scale_faults(self)
        if faults:
            raise CrossFaults(faults)
        return self


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


class ParkedConfig(Section):
    """Engines that left their group and wait in their slot, the GPU free."""

    enabled: bool = True
    """An engine that leaves is parked; without this it is ended."""
    max_count: int = Field(default=64, ge=1, le=1024)
    """Parked engines of this host at most; beyond it the one parked longest ends."""
    max_bytes: int = Field(default=256 << 30, ge=1 << 20)
    """Host memory of all of them at most."""
    ttl_s: float = Field(default=6 * 3600.0, gt=0)
    """An engine that nobody asked for in so long ends."""


class SnapshotConfig(Section):
    """Images of warm engines, and parked engines."""

    enabled: bool = True
    """Without images every joiner boots cold."""
    catalog: Path = Path("/var/lib/dynamo-elastic/images")
    """Directory of the images; of root, 0700."""
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
    signing_key: Path | None = None
    """Ed25519 key (PEM, yours alone, 0600) that signs images made here; those that it signed run
    here. Default: of the host, beside the catalog (its name with .key), made at the first use."""
    trusted_keys: tuple[Path, ...] = ()
    """Public keys (PEM) of others whose images run here, too."""
    allow_unsigned: bool = False
    """Images that nobody signed run here. An image is code: whoever can bring one here is root."""
    parked: ParkedConfig = ParkedConfig()


class AgentConfig(Section):
    """The agent of this host."""

    gpus: tuple[int | str, ...] = ()
    """GPU of each slot, by index (NVML's, as in nvidia-smi) or UUID. Default: slot N has GPU N."""
    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Prometheus metrics on observe.metrics_host; 0: none."""
    uids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Users that may call the agent for engines, besides root and the agent's own. Only those two
    may drain it, evict engines, or end all."""
    gid: int | None = Field(default=None, ge=0)
    """Members of this group may call the agent like `uids`."""


class EtcdConfig(Section):
    """The store. With `start`, serve runs its own etcd on loopback."""

    start: bool = True
    """`serve` starts an etcd of its own on loopback, for one machine."""
    port: Port = 2379
    """Client port of that etcd."""
    peer_port: Port = 2380
    """Its peer port."""
    endpoints: tuple[str, ...] = ()
    """Of an etcd that exists already; then `start` must be false. https:// needs a `ca_file`."""
    ca_file: Path | None = None
    """PEM of the authority that signed etcd's certificates."""
    cert_file: Path | None = None
    """PEM of our client certificate. etcd takes its common name for our user if no `user` is set,
    and for that of Dynamo's runtime always."""
    key_file: Path | None = None
    """PEM of that certificate's private key; yours alone (0600)."""
    user: str = ""
    """User that etcd knows us by."""
    password_file: Path | None = None
    """File with that user's password; yours alone (0600)."""

    @property
    def urls(self) -> tuple[str, ...]:
        return self.endpoints or (f"http://127.0.0.1:{self.port}",)

    @property
    def encrypted(self) -> bool:
        return self.urls[0].startswith("https://")

    @model_validator(mode="after")
    def _cross_checks(self) -> EtcdConfig:
        faults = list(_etcd_faults(self))
        if faults:
            raise CrossFaults(faults)
        return self


def _etcd_faults(etcd: EtcdConfig) -> Iterator[str]:
    if etcd.endpoints and etcd.start:
        yield "etcd.endpoints: an etcd exists already; set etcd.start to false"
    schemes = {url.partition("://")[0] for url in etcd.urls}
    if schemes == {"http", "https"}:
        yield "etcd.endpoints: http:// and https:// are mixed; use https:// for all"
    if schemes == {"https"} and etcd.ca_file is None:
        yield "etcd.ca_file: is required for https:// endpoints; name the CA's certificate"
    if "https" not in schemes:
        for name in ("ca_file", "cert_file", "key_file"):
            if getattr(etcd, name) is not None:
                yield f"etcd.{name}: does nothing with http:// endpoints; use https://"
    if (etcd.cert_file is None) != (etcd.key_file is None):
        missing = "etcd.key_file" if etcd.key_file is None else "etcd.cert_file"
        yield f"{missing}: is required; a certificate and its key go together"
    if bool(etcd.user) != (etcd.password_file is not None):
        missing = "etcd.password_file" if etcd.user else "etcd.user"
        yield f"{missing}: is required; a user and its password go together"
    if etcd.user and "https" in schemes and etcd.cert_file is None:
        yield (
            "etcd.cert_file: is required: over TLS Dynamo's runtime gives etcd no password, but "
            "goes by a certificate's common name"
        )
    hosts = {urlsplit(url).hostname for url in etcd.urls if url.startswith("http://")}
    if etcd.user and hosts - set(LOOPBACK):
        yield "etcd.user: its password would cross the network in the clear; use https:// endpoints"


class FrontendConfig(Section):
    """Dynamo's OpenAI frontend."""

    enabled: bool = True
    """`serve` starts the frontend."""
    host: str = "127.0.0.1"
    """Address that it listens on."""
    port: Port = 8000
    """Port of the OpenAI API."""
    migration_limit: int = Field(default=10, ge=0)
    """How often a stream may move to another rank over its life, scale-downs and deaths alike."""
    router_mode: Literal["round-robin", "random", "kv"] = "round-robin"
    """How it chooses the rank of a request; `kv`: by what the ranks' KV caches hold."""


class WorkersConfig(Section):
    """The worker shells, one a slot."""

    system_port: int = Field(default=0, ge=0, le=MAX_SYSTEM_PORT)
    """Slot N serves Dynamo's health, metrics and control routes on 127.0.0.1, at this port + N; a
    vLLM engine of slot N its own, at this port + scale.max_ranks + N. 0: none. Not above 32767 with
    the last slot: Dynamo reads it as a signed 16-bit number."""
    lease_ttl_s: int = Field(default=60, ge=2, le=600)
    """Of Dynamo's leases, those of frontend and planner too. After two thirds of it without etcd
    they end, so 60 outlives 30 s. The instance of a worker that was killed is taken away sooner, by
    its successor or once it is evicted."""
    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Prometheus metrics of slot N on observe.metrics_host, at this port + N; 0: none."""


class PlannerConfig(Section):
    """Dynamo's planner, deciding in its `virtual` environment."""

    enabled: bool = True
    """The planner's decisions are targets."""
    start: bool = True
    """`serve` starts the planner; false: one that runs already is followed."""
    control_port: Port = 9086
    """Port of its control API, on loopback."""
    interval_s: int = Field(default=2, ge=1)
    """It looks at the load this often."""
    constrain: bool = True
    """Our plugin in it makes its decisions widths that can be had: docs/planner.md."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """More planner settings, passed on as they are."""


class ApiConfig(Section):
    """HTTP API of every coordinator: docs/http-api.md."""

    host: str = "127.0.0.1"
    """Address that it listens on; one that others can reach needs a token_file and TLS."""
    port: int = Field(default=0, ge=0, le=65535)
    """0: no API."""
    token_file: Path | None = None
    """File with the bearer token that requests must carry; yours alone (0600). Default: `api.token`
    in the state directory, made at the first start."""
    cert_file: Path | None = None
    """PEM of the certificate, with its chain, to serve HTTPS."""
    key_file: Path | None = None
    """PEM of its private key; yours alone (0600)."""

    @model_validator(mode="after")
    def _cross_checks(self) -> ApiConfig:
        faults = list(_api_faults(self))
        if faults:
            raise CrossFaults(faults)
        return self


def _api_faults(api: ApiConfig) -> Iterator[str]:
    if 0 < api.port < 1024:
        yield "coordinator.api.port: must be 0, or 1024 to 65535"
    if (api.cert_file is None) != (api.key_file is None):
        missing = "key_file" if api.key_file is None else "cert_file"
        yield f"coordinator.api.{missing}: is required; a certificate and its key go together"
    if not api.port or api.host in LOOPBACK:
        return
    reached = f"is required: {api.host} can be reached by others"
    if api.token_file is None:
        yield f"coordinator.api.token_file: {reached}; name one, or listen on 127.0.0.1"
    if api.cert_file is None and api.key_file is None:
        yield f"coordinator.api.cert_file: {reached}; name one, or listen on 127.0.0.1"


class CoordinatorConfig(Section):
    """The coordinators; any number may run, one leads."""

    api: ApiConfig = ApiConfig()
    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Prometheus metrics on observe.metrics_host; 0: none."""


class ObserveConfig(Section):
    """What is kept and told of operations: docs/observe.md."""

    metrics_host: str = "127.0.0.1"
    """Address that every metrics_port listens on. Metrics need no token and name no request: let
    only those reach it who may read them."""
    log_format: Literal["text", "json"] = "text"
    """Log lines for people, or one JSON object each."""
    keep_operations: int = Field(default=100, ge=1, le=10000)
    """Records and reports of so many operations are kept; beyond it the oldest go."""
    operations_dir: Path | None = None
    """Where they are kept; null: `operations` in the state directory, which may not outlive a
    reboot."""
    traces: bool = False
    """Send a trace of each operation by OpenTelemetry, which its own OTEL_* variables direct;
    needs the extra `otel`."""
