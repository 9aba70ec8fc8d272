"""One life of a reference engine: from its identity to the moment it gives that up."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dynamo_elastic.engine.base import SOCKET_FILE, Attach
from dynamo_elastic.engine.reference.boot import WarmEngine, prove
from dynamo_elastic.engine.reference.device import Executor
from dynamo_elastic.engine.reference.epochs import Epochs
from dynamo_elastic.engine.reference.feed import Feed
from dynamo_elastic.engine.reference.loop import StepLoop
from dynamo_elastic.engine.reference.scheduler import Scheduler
from dynamo_elastic.engine.reference.service import ReferenceEngine
from dynamo_elastic.engine.reference.transfers import Transfers
from dynamo_elastic.engine.renew import renew
from dynamo_elastic.engine.rpc import OUTPUTS, handlers, lines
from dynamo_elastic.failpoints import arm_from_environment, failpoint, set_hook
from dynamo_elastic.ipc import Handler, RpcServer

LOGITS = "logits"
"""A call of this engine alone: {"prompt": tokens} -> logits. For tests and benchmarks."""

_log = logging.getLogger(__name__)


def live(engine: WarmEngine, attach: Attach) -> None:
    """Live as `attach` says, until detached: then no thread, socket, group or agent of this life is
    left, and the environment is as before. Raises EngineError if the self-test fails."""
    with _identity(attach):
        times_s = [time.monotonic()]
        engine.populate()
        failpoint("engine.populated")
        times_s.append(time.monotonic())
        prove(engine)
        failpoint("engine.proven")
        times_s.append(time.monotonic())
        executor = engine.device.executor(engine.model, engine.cache, engine.local)
        times_s.append(time.monotonic())
        own = Transfers(engine.weights, engine.device.agent(attach.incarnation, engine.weights))
        times_s.append(time.monotonic())
        _log.info(
            "attached as %s: memory %.0f ms, self-test %.0f ms, steps %.0f ms, "
            "transfer agent %.0f ms",
            attach.incarnation,
            *((after - before) * 1e3 for before, after in itertools.pairwise(times_s)),
        )
        _serve(engine, attach, own, executor)
        failpoint("engine.detached")
        _log.info("%s is detached", attach.incarnation)


def _serve(engine: WarmEngine, attach: Attach, own: Transfers, executor: Executor) -> None:
    rpc_loop = asyncio.new_event_loop()
    rpc = threading.Thread(target=rpc_loop.run_forever, name="rpc", daemon=True)
    rpc.start()
    feed = Feed(rpc_loop)
    loop = StepLoop(
        executor,
        Scheduler(engine.model.tile, engine.settings.kv_blocks, engine.shape.vocab_size),
        feed.put,
        peer_timeout_s=engine.settings.peer_timeout_s,
    )
    epochs = Epochs(
        loop,
        executor,
        engine.model,
        engine.scratch,
        engine.settings.model,
        attach.worker_id,
        own,
    )
    service = ReferenceEngine(attach, loop, epochs, feed)
    server = RpcServer(
        engine.settings.control_dir / SOCKET_FILE,
        {**handlers(service), LOGITS: _logits_handler(service)},
        {OUTPUTS: lambda _: lines(feed.steps())},
    )
    asyncio.run_coroutine_threadsafe(server.start(), rpc_loop).result()
    loop.run()
    feed.end()
    asyncio.run_coroutine_threadsafe(server.close(), rpc_loop).result()
    asyncio.run_coroutine_threadsafe(service.close(), rpc_loop).result()
    rpc_loop.call_soon_threadsafe(rpc_loop.stop)
    rpc.join()
    rpc_loop.close()
    epochs.close()


def _logits_handler(service: ReferenceEngine) -> Handler:
    async def handle(params: dict[str, Any]) -> list[float]:
        return await service.logits([int(token) for token in params["prompt"]])

    return handle


@contextmanager
def _identity(attach: Attach) -> Iterator[None]:
    """New log, environment and random state: nothing of the process that was warmed up is left, and
    afterwards nothing of what `attach` set."""
    before = dict(os.environ)
    renew(attach)
    arm_from_environment(attach.worker_id)
    failpoint("engine.attached")
    yield
    set_hook(None)
    os.environ.clear()
    os.environ.update(before)
