"""The command line of an engine: built here and nowhere else, a pure function of the settings."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dynamo_elastic.config import DeploymentConfig

REFERENCE = "dynamo_elastic.engine.reference"


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


def engine_argv(config: DeploymentConfig, slot: int) -> list[str]:
    """The command that boots the engine of `slot`."""
    engine = config.engine
    values = {
        "--model": config.model.path.absolute(),
        "--control-dir": config.control_dir(slot).absolute(),
        "--slots-per-rank": engine.slots_per_rank,
        "--batch-tokens": engine.batch_tokens,
        "--max-context": engine.max_context,
        "--kv-blocks": engine.kv_blocks,
        "--peer-timeout-s": engine.peer_timeout_s,
    }
    flags = [text for flag, value in values.items() for text in (flag, str(value))]
    return [sys.executable, "-m", REFERENCE, *flags]


def parse_argv(argv: Sequence[str] | None = None) -> EngineSettings:
    """The settings in the arguments that engine_argv() made. Exits with a message if they are not
    complete."""
    parser = argparse.ArgumentParser(prog=f"python -m {REFERENCE}")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--control-dir", type=Path, required=True)
    for flag in ("--slots-per-rank", "--batch-tokens", "--max-context", "--kv-blocks"):
        parser.add_argument(flag, type=int, required=True)
    parser.add_argument("--peer-timeout-s", type=float, required=True)
    return EngineSettings(**vars(parser.parse_args(argv)))
