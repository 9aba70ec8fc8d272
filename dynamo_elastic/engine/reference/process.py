"""The process of a reference engine, from its command line to its last step."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time

import msgspec

from dynamo_elastic.comm.nixl_agent import NixlAgent
from dynamo_elastic.engine.base import SOCKET_FILE, Attach
from dynamo_elastic.engine.launch import parse_argv
from dynamo_elastic.engine.reference.boot import (
    WarmEngine,
    adopt_standard_files,
    detach,
    prove,
    wait_attach,
    warm_up,
)
from dynamo_elastic.engine.reference.epochs import Epochs
from dynamo_elastic.engine.reference.feed import Feed
from dynamo_elastic.engine.reference.loop import StepLoop
from dynamo_elastic.engine.reference.scheduler import Scheduler
from dynamo_elastic.engine.reference.service import ReferenceEngine
from dynamo_elastic.engine.reference.transfers import Transfers
from dynamo_elastic.engine.renew import renew
from dynamo_elastic.engine.rpc import OUTPUTS, handlers, lines
from dynamo_elastic.errors import ElasticError
from dynamo_elastic.failpoints import arm_from_environment, failpoint
from dynamo_elastic.ipc import RpcServer

_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

# The step loop and the RPC thread share the interpreter; at the default of 5 ms a thread that
# wants it waits as long as half a step.
_SWITCH_INTERVAL_S = 0.0005

_log = logging.getLogger(__name__)


def run(began_s: float) -> None:
    """Boot detached, wait for an identity, serve for ever. The one place that catches all errors:
    whatever goes wrong is one line in the log, and the end of the process."""
    adopt_standard_files()
    settings = parse_argv()
    logging.basicConfig(format=_LOG_FORMAT, level=logging.INFO)
    try:
        arm_from_environment()
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        parts = {"imports": time.monotonic() - began_s}
        engine = warm_up(settings)
        parts["model"] = time.monotonic() - began_s - sum(parts.values())
        # Loads the transport's libraries; the agent leaves no thread and no descriptor behind.
        NixlAgent("warm-up").close()
        parts["transport"] = time.monotonic() - began_s - sum(parts.values())
        detach(engine, parts)
        attach = msgspec.convert(wait_attach(settings.control_dir), Attach)
        serve(engine, attach)
    except ElasticError as exc:
        _log.error("engine ends: %s", exc)
    except Exception:  # noqa: BLE001 - nobody else is there to say what happened
        _log.exception("engine ends: a fault of its own")
    # Threads of NIXL and of the RPC server would keep a normal exit waiting.
    logging.shutdown()
    os._exit(1)


def serve(engine: WarmEngine, attach: Attach) -> None:
    """Live as `attach` says. Returns only by raising."""
    began_s = time.monotonic()
    _take_identity(attach)
    prove(engine)
    proven_s = time.monotonic()
    own = Transfers(engine.weights, NixlAgent(attach.incarnation))
    _log.info(
        "attached as %s: self-test %.0f ms, transfer agent %.0f ms",
        attach.incarnation,
        (proven_s - began_s) * 1e3,
        (time.monotonic() - proven_s) * 1e3,
    )
    rpc_loop = asyncio.new_event_loop()
    threading.Thread(target=rpc_loop.run_forever, name="rpc", daemon=True).start()
    feed = Feed(rpc_loop)
    loop = StepLoop(
        engine.model,
        engine.cache,
        engine.local,
        Scheduler(engine.model.tile, engine.settings.kv_blocks, engine.shape.vocab_size),
        feed.put,
        peer_timeout_s=engine.settings.peer_timeout_s,
    )
    epochs = Epochs(loop, engine.model, engine.settings.model, attach.worker_id, own)
    service = ReferenceEngine(attach, loop, epochs, feed)
    server = RpcServer(
        engine.settings.control_dir / SOCKET_FILE,
        handlers(service),
        {OUTPUTS: lambda _: lines(feed.steps())},
    )
    asyncio.run_coroutine_threadsafe(server.start(), rpc_loop).result()
    loop.run()


def _take_identity(attach: Attach) -> None:
    """New log, environment and random state: nothing of the process that was warmed up is left."""
    renew(attach)
    arm_from_environment(attach.worker_id)
    failpoint("engine.attached")
