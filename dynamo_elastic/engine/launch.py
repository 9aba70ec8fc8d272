"""The command line of an engine: built here and nowhere else, a pure function of the settings."""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.config_sections import EngineConfig, VllmEngineConfig, VllmGroupConfig
from dynamo_elastic.engine.shape import read_experts, read_shape
from dynamo_elastic.engine.vllm import versions
from dynamo_elastic.engine.vllm.elastic.flags import FOUNDS_VARIABLE, Seat, group_flags

REFERENCE = "dynamo_elastic.engine.reference"
VLLM = "dynamo_elastic.dynamo.vllm_main"
VLLM_ELASTIC = "dynamo_elastic.dynamo.vllm_elastic"


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What a reference engine is told when it boots; all of it is part of its image."""

    model: Path
    control_dir: Path
    slots_per_rank: int
    batch_tokens: int
    max_context: int
    kv_blocks: int
    peer_timeout_s: float
    device: str = "cpu"
    slot: int = 0
    capacity: int = 1
    """Slots of the deployment: the most ranks that there can be."""


def engine_argv(config: DeploymentConfig, slot: int) -> list[str]:
    """The command that boots the engine of `slot`; alone, whatever group it comes to later."""
    if isinstance(config.engine, VllmGroupConfig):
        return _group_argv(config, config.engine, slot, config.scale.max_ranks)
    if isinstance(config.engine, VllmEngineConfig):
        return _vllm_argv(config, config.engine, slot)
    return _reference_argv(config, config.engine, slot)


def founder_boot(config: DeploymentConfig, slot: int) -> tuple[list[str], dict[str, str]] | None:
    """Command, and what its environment has besides, of an engine that boots as one of the first
    ranks, together with the others; None if engines boot alone, those too."""
    if not isinstance(config.engine, VllmGroupConfig):
        return None
    size = config.scale.initial_ranks
    return _group_argv(config, config.engine, slot, size), {FOUNDS_VARIABLE: str(size)}


def _reference_argv(config: DeploymentConfig, engine: EngineConfig, slot: int) -> list[str]:
    values = {
        "--model": config.model.path.absolute(),
        "--control-dir": config.control_dir(slot).absolute(),
        "--slots-per-rank": engine.slots_per_rank,
        "--batch-tokens": engine.batch_tokens,
        "--max-context": engine.max_context,
        "--kv-blocks": engine.kv_blocks,
        "--peer-timeout-s": engine.peer_timeout_s,
    }
    if engine.device != "cpu":
        # What its expert buffer and graphs are built for.
        values |= {"--device": engine.device, "--slot": slot, "--capacity": config.scale.max_ranks}
    flags = [text for flag, value in values.items() for text in (flag, str(value))]
    return [sys.executable, "-m", REFERENCE, *flags]


def _vllm_argv(config: DeploymentConfig, engine: VllmEngineConfig, slot: int) -> list[str]:
    """The control directory, and after it the command line of dynamo.vllm."""
    return [*_vllm_line(config, engine, slot, VLLM), *engine.argv]


def _group_argv(
    config: DeploymentConfig, engine: VllmGroupConfig, slot: int, size: int
) -> list[str]:
    """Of a rank that boots for a group of `size`. Raises ConfigError for a model of no experts."""
    seat = Seat(
        rank=slot,
        size=size,
        max_ranks=config.scale.max_ranks,
        slots_per_rank=engine.slots_per_rank,
        num_experts=read_experts(config.model.path),
        rpc_port=engine.rpc_port,
    )
    return [*_vllm_line(config, engine, slot, VLLM_ELASTIC), *group_flags(seat), *engine.argv]


def _vllm_line(
    config: DeploymentConfig, engine: VllmEngineConfig, slot: int, module: str
) -> list[str]:
    own = ["--model", str(config.model.path.absolute()), "--served-model-name", config.model.name]
    control_dir = str(config.control_dir(slot).absolute())
    return [str(engine_python(engine)), "-m", module, control_dir, *own]


def shared_experts(config: DeploymentConfig) -> int:
    """Experts that the ranks share; 0 if each has a whole model. Raises ConfigError."""
    if isinstance(config.engine, EngineConfig):
        return read_shape(config.model.path).num_experts
    shares = isinstance(config.engine, VllmGroupConfig)
    return read_experts(config.model.path) if shares else 0


def engine_python(engine: EngineConfig | VllmEngineConfig) -> Path:
    """The interpreter that engines run on."""
    python = engine.python if isinstance(engine, VllmEngineConfig) else None
    # Not resolved: it is by the link that Python knows its virtual environment.
    return Path(sys.executable) if python is None else python.absolute()


def is_tree(config: DeploymentConfig) -> bool:
    """True if an engine is a process with descendants, all of which go into its image."""
    return isinstance(config.engine, VllmEngineConfig)


def image_inputs(config: DeploymentConfig) -> str:
    """What an image depends on besides arguments and the model's configuration: for vLLM the
    releases in its environment, and the model's files, if its weights are in the image."""
    if not isinstance(config.engine, VllmEngineConfig):
        return ""
    releases = versions.installed(engine_python(config.engine))
    if isinstance(config.engine, VllmGroupConfig):
        return "".join(f", {name} {version}" for name, version in releases.items())
    files = [(p.name, p.stat()) for p in sorted(config.model.path.iterdir()) if p.is_file()]
    stamps = [(name, s.st_size, s.st_mtime_ns) for name, s in files]
    digest = hashlib.sha256(repr(stamps).encode()).hexdigest()[:16]
    return "".join(f", {name} {version}" for name, version in releases.items()) + f", {digest}"


def parse_argv(argv: Sequence[str] | None = None) -> EngineSettings:
    """The settings in the arguments that engine_argv() made. Exits with a message if they are not
    complete."""
    parser = argparse.ArgumentParser(prog=f"python -m {REFERENCE}")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--control-dir", type=Path, required=True)
    for flag in ("--slots-per-rank", "--batch-tokens", "--max-context", "--kv-blocks"):
        parser.add_argument(flag, type=int, required=True)
    parser.add_argument("--peer-timeout-s", type=float, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--slot", type=int, default=0)
    parser.add_argument("--capacity", type=int, default=1)
    return EngineSettings(**vars(parser.parse_args(argv)))
