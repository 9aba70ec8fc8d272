"""One life of a reference engine: from its identity to the moment it gives that up."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

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
from dynamo_elastic.ipc import RpcServer

_log = logging.getLogger(__name__)


def live(engine: WarmEngine, attach: Attach) -> None:
    """Live as `attach` says, until detached: then no thread, socket, group or agent of this life is
    left, and the environment is as before. Raises EngineError if the self-test fails."""
    with _identity(attach):
        began_s = time.monotonic()
        engine.populate()
        failpoint("engine.populated")
        prove(engine)
        executor = engine.device.executor(engine.model, engine.cache, engine.local)
        proven_s = time.monotonic()
        own = Transfers(engine.weights, engine.device.agent(attach.incarnation, engine.weights))
        _log.info(
            "attached as %s: self-test %.0f ms, transfer agent %.0f ms",
            attach.incarnation,
            (proven_s - began_s) * 1e3,
            (time.monotonic() - proven_s) * 1e3,
        )
        failpoint("engine.proven")
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
        handlers(service),
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
