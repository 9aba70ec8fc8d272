"""How large the GPU test engine is, and what is wrong with it: its command line, both ways."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from dynamo_elastic.config import DeploymentConfig

PROGRAM = "dynamo_elastic.testing.gpu_process"


class Fault(StrEnum):
    """What an image, or a parked process, must not hold."""

    NONE = "none"
    MANAGED = "managed"
    """Managed (unified) memory."""
    MULTICAST = "multicast"
    """A multicast object, as NVLink SHARP and symmetric memory use it; only said, not made."""
    IPC_IMPORT = "ipc_import"
    """Another process's memory, mapped here."""
    NCCL = "nccl"
    """A communicator that is not destroyed."""
    NIXL = "nixl"
    """A transfer agent that is not closed."""


@dataclass(frozen=True, slots=True)
class GpuEngineSettings:
    """Its size, by bytes. `host_bytes`: resident host memory at least; `state_bytes`: CUDA state
    that stays, beside what torch and the driver need."""

    control_dir: Path
    weights_bytes: int = 4_000_000_000
    state_bytes: int = 1_000_000_000
    host_bytes: int = 2_600_000_000
    graphs: int = 32
    seed: int = 1
    fault: Fault = Fault.NONE
    device: str = "cuda"
    """Or "cpu", which tries out everything around it."""

    def flags(self) -> list[str]:
        """The arguments that parse() turns into these settings."""
        values = asdict(self)
        control_dir = str(values.pop("control_dir"))
        return [control_dir, *(f"--{k.replace('_', '-')}={v}" for k, v in values.items())]


def parse(argv: Sequence[str] | None = None) -> GpuEngineSettings:
    """Exits with a message if an argument is wrong."""
    parser = argparse.ArgumentParser(prog="gpu_engine")
    parser.add_argument("control_dir", type=Path)
    for name in ("weights_bytes", "state_bytes", "host_bytes", "graphs", "seed"):
        default = GpuEngineSettings.__dataclass_fields__[name].default
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--fault", type=Fault, default=Fault.NONE)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    return GpuEngineSettings(**vars(parser.parse_args(argv)))


def gpu_argv(**sizes: Any) -> Callable[[DeploymentConfig, int], list[str]]:
    """An `engine_argv` that starts GPU test engines with these fields of GpuEngineSettings."""

    def argv(config: DeploymentConfig, slot: int) -> list[str]:
        settings = GpuEngineSettings(config.control_dir(slot).absolute(), **sizes)
        return [sys.executable, "-m", PROGRAM, *settings.flags()]

    return argv
