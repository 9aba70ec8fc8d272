"""One JSON schema for every result, with its provenance."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).absolute().parent.parent
RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("torch", "triton", "cuda-bindings", "nixl-cu13", "ai-dynamo", "cslab-etcd3", "numpy")


def write_result(benchmark: str, metrics: dict[str, float], detail: Any) -> Path:
    """Write `results/NAME-DATE.json`; an older one of the same day is replaced."""
    made = provenance()
    result = {"benchmark": benchmark, **made, "metrics": metrics, "detail": detail}
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{benchmark}-{made['date']}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def provenance() -> dict[str, Any]:
    """When, of which tree, by which command and on what machine this is."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": _commit(),
        "command": " ".join(["python", *_program(sys.argv[0]), *sys.argv[1:]]),
        "hardware": _hardware(),
        "versions": _versions(),
    }


def _program(path: str) -> list[str]:
    """As it is called from the repository's root, wherever that is."""
    absolute = Path(path).absolute()
    if not absolute.is_relative_to(_ROOT):
        return [path]
    relative = absolute.relative_to(_ROOT)
    if relative.name != "__main__.py":
        return [str(relative)]
    return ["-m", ".".join(relative.parent.parts)]


def _commit() -> str:
    """Of this tree; BENCH_COMMIT names it where the tree travels without git."""
    if named := os.environ.get("BENCH_COMMIT"):
        return named

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, cwd=RESULTS.parent, check=False
        )
        return done.stdout.strip()

    return git("rev-parse", "--short=12", "HEAD") + ("+changes" if git("diff", "HEAD") else "")


def _hardware() -> dict[str, Any]:
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    memory_kib = int(Path("/proc/meminfo").read_text().split()[1])
    cores = len([x for x in Path("/proc/cpuinfo").read_text().splitlines() if "processor" in x])
    return {"cpu": cpu, "cores": cores, "memory_bytes": memory_kib * 1024} | _gpus()


def _gpus() -> dict[str, list[str]]:
    """Name, memory and driver of each GPU; {} without."""
    if shutil.which("nvidia-smi") is None:
        return {}
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return {"gpus": done.stdout.splitlines()}


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "kernel": platform.release()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found
