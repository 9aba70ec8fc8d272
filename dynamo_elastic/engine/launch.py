"""The command line of an engine: built here and nowhere else, a pure function of the settings."""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.config_sections import EngineConfig, VllmEngineConfig
from dynamo_elastic.engine.vllm import versions

REFERENCE = "dynamo_elastic.engine.reference"
VLLM = "dynamo_elastic.dynamo.vllm_main"


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
    """The command that boots the engine of `slot`."""
    if isinstance(config.engine, VllmEngineConfig):
        return _vllm_argv(config, config.engine, slot)
    return _reference_argv(config, config.engine, slot)


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
    own = ["--model", str(config.model.path.absolute()), "--served-model-name", config.model.name]
    control_dir = str(config.control_dir(slot).absolute())
    return [str(engine_python(engine)), "-m", VLLM, control_dir, *own, *engine.argv]


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
    releases in its environment, and the model's files, as its weights are in the image."""
    if not isinstance(config.engine, VllmEngineConfig):
        return ""
    releases = versions.installed(engine_python(config.engine))
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
