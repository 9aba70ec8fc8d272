"""An engine on one GPU that keeps the life contract of engine/base.py, and serves `status`, `probe`
and `detach` alone.

Its size is that of a small serving engine: host memory, CUDA state, CUDA graphs with Triton kernels
and cuBLAS products, and weights in an arena that no snapshot holds. After it is attached the
weights are made anew from their seed, and its graphs must give what they gave before.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from dynamo_elastic.engine.base import (
    DETACHED_FILE,
    SOCKET_FILE,
    Attach,
    EngineState,
    EngineStatus,
)
from dynamo_elastic.engine.reference.boot import wait_attach
from dynamo_elastic.engine.renew import redirect, renew
from dynamo_elastic.errors import EngineError
from dynamo_elastic.ipc import RpcServer
from dynamo_elastic.testing.gpu_faults import plant
from dynamo_elastic.testing.gpu_settings import GpuEngineSettings
from dynamo_elastic.testing.gpu_work import GpuWork
from dynamo_elastic.types import Epoch, Rank

_BLOCK_BYTES = 16 << 20
_log = logging.getLogger(__name__)


class HostState:
    """Host memory that neither compression nor a shared page makes small."""

    def __init__(self, size_bytes: int) -> None:
        self._block = os.urandom(_BLOCK_BYTES)
        self._blocks = [bytearray(self._block) for _ in range(max(0, size_bytes) // _BLOCK_BYTES)]

    def intact(self) -> bool:
        """Every byte is what it was; reads all pages."""
        return all(block == self._block for block in self._blocks)


def memory_bytes() -> dict[str, int]:
    """Resident memory of this process by kind: all, of its own, of files, shared."""
    names = {"VmRSS": "rss", "RssAnon": "anon", "RssFile": "file", "RssShmem": "shared"}
    lines = Path("/proc/self/status").read_text().splitlines()
    found = (line.split(":") for line in lines)
    return {names[name]: int(rest[0].split()[0]) << 10 for name, *rest in found if name in names}


class GpuEngine:
    """All of the engine but its identity."""

    def __init__(self, settings: GpuEngineSettings) -> None:
        began_s = time.monotonic()
        self.settings = settings
        self.work = GpuWork(
            weights_bytes=settings.weights_bytes,
            state_bytes=settings.state_bytes,
            graphs=settings.graphs,
            seed=settings.seed,
            device=settings.device,
        )
        self.expected = self.work.probe()
        self.planted = plant(settings.fault)
        self.host = HostState(settings.host_bytes - memory_bytes()["rss"])
        self._warm_s = time.monotonic() - began_s

    def detach(self) -> None:
        """Let go of everything, and say in `detached.json` that this is so."""
        self.work.discard()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        redirect(os.devnull, (0, 1, 2))
        report = {
            "pid": os.getpid(),
            "probe": self.expected,
            "warm_s": self._warm_s,
            "torch": version("torch"),
            "cuda": self.planted.report,
            "arena_bytes": self.work.weights_bytes,
            "graphs": self.work.graphs,
            "host_bytes": memory_bytes(),
            "state_bytes": self.work.state_bytes(),
            "threads": len(os.listdir("/proc/self/task")),
        }
        path = self.settings.control_dir / DETACHED_FILE
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(report))
        partial.replace(path)

    def prove(self) -> dict[str, float]:
        """Weights made anew, and every graph replayed; seconds by part. Raises EngineError if what
        they give is wrong."""
        parts = {
            "wake": self.work.synchronize,
            "populate": self.work.populate,
            "fill": lambda: self.work.fill(self.settings.seed),
            "filled": self.work.synchronize,
        }
        timings_s: dict[str, float] = {}
        for name, act in parts.items():
            began_s = time.monotonic()
            act()
            timings_s[name] = round(time.monotonic() - began_s, 5)
        began_s = time.monotonic()
        found = self.work.probe()
        timings_s["probe"] = round(time.monotonic() - began_s, 5)
        if found != self.expected:
            raise EngineError(f"probe: digest {found} is not the {self.expected} of the warm-up")
        return timings_s


class _Life:
    """One life of the engine, from its identity until it is detached."""

    def __init__(self, engine: GpuEngine, attach: Attach, timings_s: dict[str, float]) -> None:
        self._engine = engine
        self._attach = attach
        self._timings_s = timings_s
        self._over = asyncio.Event()

    async def run(self) -> None:
        path = self._engine.settings.control_dir / SOCKET_FILE
        calls = {"status": self._status, "probe": self._probe, "detach": self._detach}
        server = RpcServer(path, calls)
        await server.start()
        await self._over.wait()
        await server.close()

    async def _status(self, _: dict[str, Any]) -> Any:
        status = EngineStatus(
            state=EngineState.ATTACHED,
            incarnation=self._attach.incarnation,
            epoch=Epoch(0),
            rank=Rank(0),
            world_size=0,
            step=1,
            running=0,
            waiting=0,
            masked=(),
            frozen=False,
            pid=os.getpid(),
            kv_blocks_used=0,
            kv_blocks_total=0,
        )
        return asdict(status)

    async def _probe(self, params: dict[str, Any]) -> Any:
        """With a `seed`, what other weights than its own give; then its own are back."""
        engine = self._engine
        seed = params.get("seed")
        if seed is None:
            digest = engine.work.probe()
        else:
            engine.work.fill(int(seed))
            digest = engine.work.probe()
            engine.work.fill(engine.settings.seed)
        return {
            "digest": digest,
            "expected": engine.expected,
            "host_intact": engine.host.intact() if params.get("host") else None,
            "memory_bytes": memory_bytes(),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "timings_s": self._timings_s,
        }

    async def _detach(self, _: dict[str, Any]) -> None:
        self._over.set()


@contextmanager
def _identity(attach: Attach) -> Iterator[None]:
    before = dict(os.environ)
    renew(attach)
    yield
    os.environ.clear()
    os.environ.update(before)


def run(settings: GpuEngineSettings) -> None:
    """Boot detached; then one life after the other. Returns only by raising."""
    engine = GpuEngine(settings)
    while True:
        engine.detach()
        attach = msgspec.convert(wait_attach(settings.control_dir), Attach)
        with _identity(attach):
            timings_s = engine.prove()
            _log.info("attached as %s: %s", attach.incarnation, timings_s)
            asyncio.run(_Life(engine, attach, timings_s).run())
            _log.info("%s is detached", attach.incarnation)
