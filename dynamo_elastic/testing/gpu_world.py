"""What the scenarios of the GPU suite share: one deployment, its image, and what may be left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from dynamo_elastic.agent.host import NAMESPACE_FILE
from dynamo_elastic.agent.images import Images
from dynamo_elastic.agent.open_images import open_images
from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.errors import EngineError
from dynamo_elastic.snapshot.manifest import Manifest
from dynamo_elastic.snapshot.process import PROC, ProcessRef, alive, identify, kill_and_wait
from dynamo_elastic.testing.deployments import deployment
from dynamo_elastic.testing.gpu_settings import Fault, gpu_argv

WORLD = "DYNAMO_ELASTIC_GPU_WORLD"
"""Environment: the directory in which everything of one run of the suite is."""

SIZES: dict[str, Any] = {
    "weights_bytes": 0,
    "state_bytes": 256 << 20,
    "host_bytes": 0,
    "graphs": 32,
}
"""Of the suite's engines: small, as most of a scenario is waiting for one. (There is a layer of
weights for each graph at least.)"""

_KILL_TIMEOUT_S = 10.0
_POLL_S = 0.001
_PROCESS = TypeAdapter(ProcessRef)


def world(slots: int = 1) -> DeploymentConfig:
    """The suite's deployment with so many slots."""
    directory = Path(os.environ[WORLD]) / f"slots{slots}"
    directory.mkdir(exist_ok=True)
    return deployment(directory, slots=slots)


def images_of(config: DeploymentConfig, fault: Fault = Fault.NONE) -> Images:
    """Its images, made of engines with that fault."""
    return open_images(config, gpu_argv(**SIZES, fault=fault))


def image_of(config: DeploymentConfig, slot: int = 0) -> Manifest:
    """The image of `slot`, made by the first scenario that asks."""
    images = images_of(config)
    return images.find(slot) or images.create(slot)


def settings_of(config: DeploymentConfig, **more: Any) -> str:
    """The argument of gpu_agent_process."""
    return json.dumps({"config": config.model_dump(mode="json"), "sizes": SIZES, **more})


def wait_for_process(*words: str, timeout_s: float) -> ProcessRef:
    """A process whose command line has all of `words`. Raises EngineError if none comes."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for pid, line in _command_lines():
            process = identify(pid) if all(word in line for word in words) else None
            if process is not None:
                return process
        time.sleep(_POLL_S)
    raise EngineError(f"no process with {words} in {timeout_s:g} s")


def kill(process: ProcessRef) -> None:
    """kill -9, without waiting."""
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)


def leftovers(directory: Path) -> list[str]:
    """Processes and mounts of this directory, and zombies, that should not be there."""
    found = [f"process {pid} is left: {line[:200]}" for pid, line in _of(directory)]
    mounts = (line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines())
    return found + [f"{path} is left mounted" for path in mounts if str(directory) in path]


def end_leftovers(directory: Path) -> None:
    """None of that is there any more."""
    for path in directory.rglob(NAMESPACE_FILE):
        with suppress(OSError, ValidationError):
            init = _PROCESS.validate_json(path.read_bytes())
            if alive(init):
                kill_and_wait(init, timeout_s=_KILL_TIMEOUT_S)
        path.unlink(missing_ok=True)
    for pid, _ in list(_of(directory)):
        process = identify(pid)
        if process is not None:
            kill_and_wait(process, timeout_s=_KILL_TIMEOUT_S)
    for line in leftovers(directory):
        path_text = line.removesuffix(" is left mounted")
        if path_text != line:
            subprocess.run(["umount", "-l", path_text], check=False, timeout=_KILL_TIMEOUT_S)


def _of(directory: Path) -> Iterator[tuple[int, str]]:
    return ((pid, line) for pid, line in _command_lines() if str(directory) in line)


def _command_lines() -> Iterator[tuple[int, str]]:
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                yield int(entry.name), line.decode(errors="replace")
