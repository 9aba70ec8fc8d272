"""Proves that an image runs: a copy of it comes to life beside everything else, and is ended."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

from dynamo_elastic.agent.images import Images
from dynamo_elastic.agent.records import ENGINE_LOG, write_attach
from dynamo_elastic.agent.start import wait_ready
from dynamo_elastic.engine.base import Attach
from dynamo_elastic.snapshot.manifest import Manifest
from dynamo_elastic.snapshot.namespace import create_namespace
from dynamo_elastic.types import Incarnation, WorkerId

_END_TIMEOUT_S = 10.0


async def rehearse(images: Images, manifest: Manifest, *, timeout_s: float) -> dict[str, float]:
    """Restore the image in a namespace of its own, attach it, wait until it answers, end it.

    Returns seconds by part; 'ready' is the whole, from the request to the answer. Engines that
    live are not touched, not even one in the same slot. Raises what Images.restore_image() raises,
    and EngineError if the engine does not answer; nothing is left either way.
    """
    loop = asyncio.get_running_loop()
    control_dir = Path(manifest.fingerprint.control_dir)
    control_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    incarnation = Incarnation(f"rehearsal-{secrets.token_hex(4)}")
    async with AsyncExitStack() as stack:
        own = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dynamo-elastic-")))
        namespace = await asyncio.to_thread(create_namespace, {control_dir: own})
        stack.callback(namespace.end, timeout_s=_END_TIMEOUT_S)
        attach = Attach(
            incarnation=incarnation,
            worker_id=WorkerId("rehearsal"),
            seed=secrets.randbits(63),
            log_path=str(control_dir / ENGINE_LOG),
        )
        began = loop.time()
        write_attach(own, attach)
        restored = await asyncio.to_thread(
            images.restore_image, manifest, namespace, timeout_s=timeout_s
        )
        await wait_ready(own, restored.process, incarnation, began + timeout_s)
        return restored.timings_s | {"ready": loop.time() - began}
