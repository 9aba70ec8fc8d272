"""Which processes a deployment is made of, as pure data: what `serve` starts, in order."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.config_launch import CONFIG_FLAG, SLOT_FLAG
from dynamo_elastic.config_sections import Section, VllmEngineConfig
from dynamo_elastic.dynamo.environment import dynamo_environment, dynamo_secrets
from dynamo_elastic.dynamo.launch import frontend_argv, planner_argv, planner_environment
from dynamo_elastic.engine.launch import engine_python
from dynamo_elastic.serve.processes import ProcessSpec

_ETCD_FILES = ("ca_file", "cert_file", "key_file", "password_file")


def absolute(config: DeploymentConfig) -> DeploymentConfig:
    """Children run elsewhere: make every path of the settings absolute."""
    model = config.model.model_copy(update={"path": config.model.path.resolve()})
    engine = config.engine
    if isinstance(engine, VllmEngineConfig):
        engine = engine.model_copy(update={"python": engine_python(engine)})
    keys = tuple(path.resolve() for path in config.snapshot.trusted_keys)
    snapshot = _absolute(config.snapshot, "catalog", "signing_key") | {"trusted_keys": keys}
    kept = config.observe.operations_dir
    observe = config.observe.model_copy(update={"operations_dir": kept.resolve() if kept else None})
    api = config.coordinator.api
    api = api.model_copy(update=_absolute(api, "token_file", "cert_file", "key_file"))
    return config.model_copy(
        update={
            "model": model,
            "engine": engine,
            "etcd": config.etcd.model_copy(update=_absolute(config.etcd, *_ETCD_FILES)),
            "snapshot": config.snapshot.model_copy(update=snapshot),
            "coordinator": config.coordinator.model_copy(update={"api": api}),
            "observe": observe,
            "run_dir": config.run_dir.resolve(),
        }
    )


def _absolute(section: Section, *names: str) -> dict[str, Path]:
    """Those settings that are given, as absolute paths."""
    found = {name: getattr(section, name) for name in names}
    return {name: path.resolve() for name, path in found.items() if path is not None}


def config_file(config: DeploymentConfig) -> Path:
    """Where `serve` puts the settings in force for its children."""
    return config.state_dir / "config.json"


def processes(config: DeploymentConfig, num_experts: str) -> list[ProcessSpec]:
    """Every process of the deployment, in the order in which `serve` starts them."""
    file = config_file(config)
    specs = [etcd_spec(config)] if config.etcd.start else []
    specs.append(agent_spec(config, file))
    if config.frontend.enabled:
        specs.append(frontend_spec(config))
    specs += [shell_spec(config, file, slot) for slot in range(config.scale.max_ranks)]
    specs.append(coordinator_spec(config, file, num_experts))
    if config.planner.enabled and config.planner.start:
        specs.append(planner_spec(config))
    return specs


def etcd_spec(config: DeploymentConfig) -> ProcessSpec:
    """Our own one-member etcd on loopback, its data in the state directory."""
    client, peer = (f"http://127.0.0.1:{p}" for p in (config.etcd.port, config.etcd.peer_port))
    argv = ["etcd", "--name", "local", "--data-dir", str(config.state_dir / "etcd")]
    argv += ["--listen-client-urls", client, "--advertise-client-urls", client]
    argv += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
    argv += ["--initial-cluster", f"local={peer}", "--log-level", "warn"]
    # It keeps its past in memory until told otherwise; nobody here asks for it.
    argv += ["--auto-compaction-mode", "revision", "--auto-compaction-retention", "1000"]
    argv += ["--snapshot-count", "2000"]
    return ProcessSpec("etcd", argv, _log(config, "etcd"), critical=True)


def agent_spec(config: DeploymentConfig, file: Path) -> ProcessSpec:
    return _ours(config, "agent", "agent", CONFIG_FLAG, str(file))


def coordinator_spec(config: DeploymentConfig, file: Path, num_experts: str) -> ProcessSpec:
    return _ours(
        config,
        "coordinator",
        "coordinator",
        CONFIG_FLAG,
        str(file),
        "--num-experts",
        num_experts,
    )


def shell_spec(config: DeploymentConfig, file: Path, slot: int) -> ProcessSpec:
    return _ours(config, f"slot{slot}", "worker", CONFIG_FLAG, str(file), SLOT_FLAG, str(slot))


def frontend_spec(config: DeploymentConfig) -> ProcessSpec:
    return ProcessSpec(
        "frontend",
        frontend_argv(config),
        _log(config, "frontend"),
        environment=dynamo_environment(config),
        secrets=partial(dynamo_secrets, config),
        always=True,
    )


def planner_spec(config: DeploymentConfig) -> ProcessSpec:
    return ProcessSpec(
        "planner",
        planner_argv(config),
        _log(config, "planner"),
        environment=planner_environment(config),
        secrets=partial(dynamo_secrets, config),
        always=True,
    )


def _ours(config: DeploymentConfig, name: str, module: str, *arguments: str) -> ProcessSpec:
    return ProcessSpec(
        name,
        [sys.executable, "-m", f"dynamo_elastic.{module}", *arguments],
        _log(config, name),
        environment=dynamo_environment(config),
    )


def _log(config: DeploymentConfig, name: str) -> Path:
    return config.state_dir / "logs" / f"{name}.log"
