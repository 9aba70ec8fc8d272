"""The first half of an engine's life: everything that does not depend on where and when it runs.

At its end the process holds nothing that an image must not hold, and neither weights nor keys.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from dynamo_elastic import __version__
from dynamo_elastic.engine.base import ATTACH_FILE, DETACHED_FILE
from dynamo_elastic.engine.launch import EngineSettings
from dynamo_elastic.engine.reference.device import Device, make_device
from dynamo_elastic.engine.reference.experts import LocalExperts
from dynamo_elastic.engine.reference.kv import KvCache
from dynamo_elastic.engine.reference.model import Model, Routing, Row, TileSize, Weights
from dynamo_elastic.engine.reference.scheduler import least_blocks
from dynamo_elastic.engine.renew import redirect
from dynamo_elastic.engine.shape import ModelShape, read_shape
from dynamo_elastic.errors import ConfigError, EngineError
from dynamo_elastic.memory.base import ArenaLike

ATTACH_POLL_S = 0.01

_PATTERN_FLOATS = 1 << 16
_VERSIONED = ("torch", "numpy", "nixl-cu13", "safetensors", "aiohttp")


@dataclass(frozen=True, slots=True)
class WarmEngine:
    """All of an engine but its identity and its peers."""

    settings: EngineSettings
    device: Device
    shape: ModelShape
    weights: Weights
    cache: KvCache
    scratch: KvCache
    """For one sequence, beside those that are served."""
    model: Model
    local: LocalExperts
    probe: str
    """Digest of the logits of the self-test step."""

    def discard(self) -> None:
        """Give back all memory of weights and keys."""
        for arena in self._arenas:
            arena.discard()

    def populate(self) -> None:
        """Have that memory again, its contents lost."""
        for arena in self._arenas:
            arena.populate()

    @property
    def _arenas(self) -> tuple[ArenaLike, ...]:
        return (self.weights.arena, self.cache.arena, self.scratch.arena)


def warm_up(settings: EngineSettings) -> WarmEngine:
    """Build the engine and run every tile shape once. Raises ConfigError."""
    torch.set_num_threads(1)
    shape = read_shape(settings.model)
    tile = TileSize(settings.batch_tokens, settings.max_context)
    if least_blocks(tile) > settings.kv_blocks:
        raise ConfigError(
            [
                f"engine.kv_blocks: {settings.kv_blocks} is too few for one sequence of "
                f"engine.max_context {settings.max_context}; give at least {least_blocks(tile)}"
            ]
        )
    device = make_device(settings)
    weights = Weights(shape, settings.slots_per_rank, device.store)
    cache = KvCache(shape, settings.kv_blocks, device.store)
    scratch = KvCache(shape, tile.context_blocks, device.store)
    model = Model(weights, tile)
    local = LocalExperts(weights, tile.batch_tokens)
    probe = self_test(model, local, scratch)
    # Closed at once: what it compiled and captured stays.
    device.executor(model, cache, local).close()
    return WarmEngine(settings, device, shape, weights, cache, scratch, model, local, probe)


def self_test(model: Model, local: LocalExperts, cache: KvCache) -> str:
    """Digest of the logits of one step over made-up weights, which are left in the arena.

    The dense weights and slot 0 are filled from a fixed pattern; all rows go to slot 0.
    """
    generator = torch.Generator().manual_seed(0)
    pattern = torch.randn(_PATTERN_FLOATS, generator=generator) / 16
    pattern = pattern.to(model.weights.store.device, model.weights.store.dtype)
    for name, tensor in model.weights.tensors.items():
        if name.startswith(("dense/", "slot0/")):
            flat = tensor.view(-1)
            whole = len(flat) // len(pattern) * len(pattern)
            flat[:whole].view(-1, len(pattern)).copy_(pattern)
            flat[whole:].copy_(pattern[: len(flat) - whole])

    def slot_zero(routing: Routing) -> torch.Tensor:
        return local.compute(0, routing.layer, routing.hidden)

    blocks = list(range(1, 1 + model.tile.context_blocks))
    count = min(model.tile.batch_tokens, model.tile.max_context, model.shape.vocab_size)
    rows = [Row(position, position, blocks) for position in range(count)]
    logits = model.forward(rows, cache, slot_zero).cpu()
    return hashlib.blake2s(logits.numpy().tobytes()).hexdigest()


def prove(engine: WarmEngine) -> None:
    """Raise EngineError unless this process computes what it did when it was warmed up."""
    digest = self_test(engine.model, engine.local, engine.scratch)
    if digest != engine.probe:
        raise EngineError(
            f"self-test: logits digest {digest} is not the {engine.probe} of the warm-up; "
            "this image does not fit this machine: boot cold"
        )


def detach(engine: WarmEngine, parts_s: dict[str, float]) -> None:
    """Let go of everything, and say in `detached.json` that this is so, and what took how long."""
    engine.discard()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    report = {
        "pid": os.getpid(),
        "warm_s": sum(parts_s.values()),
        "parts_s": parts_s,
        "versions": versions(),
        "arena_bytes": engine.weights.arena.size_bytes + engine.cache.arena.size_bytes,
        "threads": len(os.listdir("/proc/self/task")),
        "probe": engine.probe,
        "cuda": engine.device.held(),
        "kernels": dict(engine.device.kernels),
    }
    path = engine.settings.control_dir / DETACHED_FILE
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(report))
    # Last: what fails before it is still told to the log of the boot.
    redirect(os.devnull, (0, 1, 2))
    partial.replace(path)


def versions() -> dict[str, str]:
    """Of what an engine computes and talks with."""
    return {"dynamo-elastic": __version__, **{name: _version(name) for name in _VERSIONED}}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # run from its sources
        return "none"


def wait_attach(control_dir: Path) -> dict[str, Any]:
    """The contents of `attach.json`, which is consumed, once it is there."""
    path = control_dir / ATTACH_FILE
    while True:
        with suppress(FileNotFoundError):
            attach: dict[str, Any] = json.loads(path.read_text())
            path.unlink()
            return attach
        time.sleep(ATTACH_POLL_S)
