"""Proves that an image runs: a copy of it comes to life beside everything else, and is ended."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from dynamo_elastic.agent.images import Images
from dynamo_elastic.agent.ready import wait_ready
from dynamo_elastic.agent.records import ENGINE_LOG, write_attach
from dynamo_elastic.engine.base import SOCKET_FILE, Attach
from dynamo_elastic.snapshot.locks import work_directory
from dynamo_elastic.snapshot.manifest import Manifest
from dynamo_elastic.snapshot.namespace import temporary_namespace
from dynamo_elastic.types import Incarnation, WorkerId


@dataclass(frozen=True, slots=True)
class Copy:
    """An engine from an image that answers on `socket_path`. `timings_s`: seconds by part; 'ready'
    is the whole, from the request to the answer."""

    socket_path: Path
    timings_s: dict[str, float]


async def rehearse(images: Images, manifest: Manifest, *, timeout_s: float) -> dict[str, float]:
    """See running_copy(); returns its timings, and the copy has ended."""
    async with running_copy(images, manifest, timeout_s=timeout_s) as copy:
        return copy.timings_s


@asynccontextmanager
async def running_copy(
    images: Images,
    manifest: Manifest,
    *,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[Copy]:
    """Restore the image in a namespace of its own, attach it with `environment`, wait until it
    answers; end it on leaving.

    Engines that live are not touched, not even one in the same slot. Raises what
    Images.restore_image() raises, and EngineError if the engine does not answer; nothing is left
    either way.
    """
    loop = asyncio.get_running_loop()
    control_dir = Path(manifest.fingerprint.control_dir)
    control_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    incarnation = Incarnation(f"rehearsal-{secrets.token_hex(4)}")
    with ExitStack() as stack:
        own = stack.enter_context(work_directory())
        # An engine of the same image may live, and listen under names that the copy has, too.
        namespace = stack.enter_context(temporary_namespace({control_dir: own}, own_network=True))
        attach = Attach(
            incarnation=incarnation,
            worker_id=WorkerId("rehearsal"),
            seed=secrets.randbits(63),
            log_path=str(control_dir / ENGINE_LOG),
            environment=dict(environment or {}),
        )
        began = loop.time()
        restored = await asyncio.to_thread(
            images.restore_image, manifest, namespace, timeout_s=timeout_s
        )
        write_attach(own, attach)
        await wait_ready(own, restored.process, incarnation, began + timeout_s)
        yield Copy(own / SOCKET_FILE, restored.timings_s | {"ready": loop.time() - began})
