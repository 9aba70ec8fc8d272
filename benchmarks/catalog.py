"""Every benchmark by name: its script, what it shows, and what it needs."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

HERE = Path(__file__).parent


class Needs(StrEnum):
    """The machine that a benchmark runs on."""

    CPU = "any machine that runs `make test`"
    VLLM_CPU = "`make vllm-cpu`, 24 GB of memory"
    GPU = "root, 1 GPU"
    GPUS = "root, 2 GPUs with NVLink (4: the same command)"
    NOTHING = "results in benchmarks/results"


_PROGRAMS = {"chaos": "dynamo_elastic.testing.chaos"}
"""Benchmarks that are a program of the package, by its module."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    name: str
    needs: Needs

    @property
    def argv(self) -> tuple[str, ...]:
        """What Python is started with, in the repository's root."""
        if self.name in _PROGRAMS:
            return "-m", _PROGRAMS[self.name]
        return (f"{HERE.name}/{self.name}.py",)

    @property
    def source(self) -> Path:
        """Of its program."""
        if self.name in _PROGRAMS:
            return HERE.parent.joinpath(*_PROGRAMS[self.name].split("."), "__main__.py")
        return HERE / f"{self.name}.py"

    @property
    def summary(self) -> str:
        """The first paragraph of its docstring."""
        text = ast.get_docstring(ast.parse(self.source.read_text())) or ""
        return " ".join(text.split("\n\n")[0].split())


BENCHMARKS = tuple(
    Benchmark(name, needs)
    for needs, names in {
        Needs.CPU: (
            "cpu_scale",
            "control_plane",
            "planner_cycle",
            "protocol_sim",
            "protocol_soak",
            "chaos",
            "recovery_times",
            "snapshot_fill",
        ),
        Needs.VLLM_CPU: ("vllm_cpu_replicas",),
        Needs.GPU: (
            "snapshot_tiers",
            "snapshot_cycles",
            "vllm_elastic_alone",
            "vllm_elastic_moves",
            "vllm_elastic_shared",
            "vllm_elastic_shared_rounds",
        ),
        Needs.GPUS: (
            "snapshot_parallel",
            "gpu_stream",
            "gpu_rebind",
            "gpu_scale",
            "gpu_rounds",
            "gpu_faults",
            "gpu_capacity",
            "vllm_elastic",
        ),
        Needs.NOTHING: ("simulate",),
    }.items()
    for name in names
)


def by_name(name: str) -> Benchmark:
    """Raises KeyError if there is none of this name."""
    return {b.name: b for b in BENCHMARKS}[name]
