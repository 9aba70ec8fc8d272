"""How the engines of a deployment are booted on this host, and what that makes of them."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.engine.launch import engine_argv, founder_boot, image_inputs
from dynamo_elastic.engine.shape import CONFIG_FILE
from dynamo_elastic.errors import ConfigError
from dynamo_elastic.failpoints import KILL_ONCE_DIR
from dynamo_elastic.snapshot.base import BOOT_LOG, Command, GpuInfo
from dynamo_elastic.snapshot.cuda_findings import IPC_CACHE
from dynamo_elastic.snapshot.fingerprint import (
    VISIBLE_DEVICES,
    Fingerprint,
    digest_environment,
    read_fingerprint,
)

EngineArgv = Callable[[DeploymentConfig, int], Sequence[str]]

_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH")
_CONVENIENCE = frozenset({"HOME", "LANG", "LC_ALL", "PATH", "TMPDIR", "TZ", "USER", "VIRTUAL_ENV"})
_SHAPING = frozenset({"LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONSAFEPATH", "PYTHONDONTWRITEBYTECODE"})
_SHAPING_PREFIXES = (
    *("CUDA_", "MKL_", "NCCL_", "NIXL_", "NVIDIA_", "OMP_", "UCX_", "VLLM_"),
    "DYNAMO_ELASTIC_VLLM_",
)
_FIXED = {IPC_CACHE: "n"}
"""With UCX's cache of CUDA IPC imports a parked engine can't come back, and the peers of a restored
one go on writing to its predecessor (docs/findings.md, section 1)."""


def shapes_engine(name: str) -> bool:
    """True of variables that change what an engine loads or does: images must agree on them."""
    return name in _SHAPING or (name.startswith(_SHAPING_PREFIXES) and not _SECRET.search(name))


def engine_environment() -> dict[str, str]:
    """What every engine is given: of ours by allow-list, as it may end up in an image, and what
    engines need to be parked and restored."""
    # A test's failpoints are those of an engine that boots, too.
    harmless = _CONVENIENCE | {KILL_ONCE_DIR}
    inherited = {
        name: value for name, value in os.environ.items() if name in harmless or shapes_engine(name)
    }
    return inherited | _FIXED


class Boots:
    """Boots of one deployment's engines; `gpus` are those of the host. Raises ConfigError if
    agent.gpus does not fit them."""

    def __init__(
        self,
        config: DeploymentConfig,
        argv_of: EngineArgv = engine_argv,
        gpus: Sequence[GpuInfo] = (),
    ) -> None:
        self._config = config
        self._argv_of = argv_of
        self._host_gpus = tuple(gpus)
        self._gpus = slot_gpus(config, gpus)

    def gpu(self, slot: int) -> str:
        """Uuid of the GPU of `slot`; '' if it has none."""
        return self._gpus.get(slot, "")

    def command(self, slot: int, more: Mapping[str, str] | None = None) -> Command:
        """How an engine of `slot` is booted, for an image or not; `more` goes to its environment.
        An engine sees the GPU of its slot only."""
        gpu = {VISIBLE_DEVICES: self.gpu(slot)} if self._host_gpus else {}
        return Command(
            argv=tuple(self._argv_of(self._config, slot)),
            environment={**engine_environment(), **gpu, **(more or {})},
            log_path=self._config.control_dir(slot) / BOOT_LOG,
        )

    def founder(self, slot: int, more: Mapping[str, str] | None = None) -> Command | None:
        """The same of an engine that is one of the first ranks; None if it is booted alike."""
        boot = founder_boot(self._config, slot)
        if boot is None:
            return None
        argv, environment = boot
        alone = self.command(slot, {**environment, **(more or {})})
        return replace(alone, argv=tuple(argv))

    def fingerprint(self, slot: int, *, criu: str = "") -> Fingerprint:
        """What an engine of `slot` is if it is booted here and now. `criu`: of images, its version.
        Raises ConfigError if the model can't be read."""
        command = self.command(slot)
        return read_fingerprint(
            criu=criu,
            argv=command.argv,
            environment={k: v for k, v in command.environment.items() if shapes_engine(k)},
            model=model_digest(self._config.model.path) + image_inputs(self._config),
            slot=slot,
            control_dir=self._config.control_dir(slot),
            gpus=self._host_gpus,
        )

    def cache_key(self, slot: int) -> str:
        """Equal for engines that compile the same code: slot, its GPU and its directory don't
        matter."""
        command, here = self.command(slot), self.fingerprint(slot)
        shaping = {k: v for k, v in command.environment.items() if shapes_engine(k)}
        shaping.pop(VISIBLE_DEVICES, None)
        bare = replace(
            here,
            slot=-1,
            control_dir="",
            gpu="",
            host_gpus="",
            cuda_visible_devices="",
            argv=tuple(word.replace(here.control_dir, "") for word in here.argv),
            environment=digest_environment(shaping),
        )
        return hashlib.sha256(repr(bare).encode()).hexdigest()[:16]


def slot_gpus(config: DeploymentConfig, gpus: Sequence[GpuInfo]) -> dict[int, str]:
    """Slot -> uuid of its GPU. Without agent.gpus slot N has GPU N; slots above the last one have
    none, which is enough for engines that need none. Raises ConfigError naming what is not there.
    """
    known = {name: gpu.uuid for gpu in gpus for name in (gpu.uuid, gpu.index, str(gpu.index))}
    if not config.agent.gpus:
        return {gpu.index: gpu.uuid for gpu in gpus if gpu.index < config.scale.max_ranks}
    here = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in gpus) or "none"
    faults = [
        f"agent.gpus: slot {slot} has GPU {name}, which is not on this host; there are: {here}"
        for slot, name in enumerate(config.agent.gpus)
        if name not in known
    ]
    if faults:
        raise ConfigError(faults)
    return {slot: known[name] for slot, name in enumerate(config.agent.gpus)}


def model_digest(model: Path) -> str:
    """Digest of the model's configuration, on which an engine's shapes and warm-up depend. Raises
    ConfigError."""
    path = model / CONFIG_FILE
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as exc:
        raise ConfigError(
            [f"model.path: {path} can't be read ({exc.strerror}); name a model directory"]
        ) from exc
