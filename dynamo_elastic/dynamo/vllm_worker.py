"""Dynamo's vLLM worker as an engine of ours: the one module that wraps `dynamo.vllm`.

Dynamo's own order is engine first, runtime second, which is all that an image needs. So its worker
runs as it is, with three of its functions replaced by ours: the one that makes the engine (ours
goes on to let go of the host, and waits for an identity), the one that registers the model (ours
waits for the shell), and the class of its request handler (ours can send requests on).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dynamo_elastic.dynamo.vllm_scheduler import SCHEDULER
from dynamo_elastic.dynamo.vllm_seat import ReplicaSeat
from dynamo_elastic.dynamo.vllm_service import VllmEngine, all_handlers
from dynamo_elastic.engine.base import SOCKET_FILE, Attach
from dynamo_elastic.engine.rpc import OUTPUTS
from dynamo_elastic.engine.vllm import life
from dynamo_elastic.engine.vllm.life import say_detached, wait_attach
from dynamo_elastic.engine.vllm.replica import Replica
from dynamo_elastic.engine.vllm.requests import Requests
from dynamo_elastic.engine.vllm.shims import apply_shims
from dynamo_elastic.engine.vllm.worker import EXTENSION
from dynamo_elastic.errors import EngineError, RequestMoved
from dynamo_elastic.failpoints import arm_from_environment, failpoint
from dynamo_elastic.ipc import RpcServer

apply_shims()

from dynamo.common.snapshot.constants import SNAPSHOT_CONTROL_DIR_ENV  # noqa: E402
from dynamo.common.snapshot.restore_context import write_snapshot_restore_context  # noqa: E402
from dynamo.llm import unregister_model  # noqa: E402
from dynamo.llm.exceptions import StreamIncomplete  # noqa: E402
from dynamo.vllm import main as dynamo_main  # noqa: E402
from dynamo.vllm import worker_factory  # noqa: E402
from dynamo.vllm.handlers import DecodeWorkerHandler, VllmEnginePauseController  # noqa: E402
from dynamo.vllm.instrumented_scheduler import ENV_FPM_PORT  # noqa: E402
from dynamo.vllm.publisher import StatLoggerFactory  # noqa: E402

_ATTACH_POLL_S = 0.01


def run(control_dir: Path, argv: list[str], began_s: float) -> None:
    """Boot, wait for an identity, serve until killed. Whatever goes wrong is in the log, and the
    end of the process."""

    async def live() -> None:
        arm_from_environment()
        await _Tree(control_dir, began_s).live(argv)

    life.run(live)


class _HostMemory:
    """An AsyncLLM whose weights and keys stay where they are while it is paused: in host memory,
    and so in the image."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def sleep(self, *_: object) -> None:
        """Nothing to give back."""

    async def wake_up(self, *_: object) -> None:
        """Nothing to fetch."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What Dynamo's worker expects of an engine that went through a snapshot."""

    engine: tuple[Any, StatLoggerFactory]
    pause_controller: VllmEnginePauseController


class _Tree:
    """The process at the root of one engine."""

    def __init__(self, control_dir: Path, began_s: float) -> None:
        self._control_dir = control_dir
        self._began_s = began_s
        self._requests = Requests()
        self._seat = ReplicaSeat(dynamo_main.register_model, unregister_model)

    async def live(self, argv: list[str]) -> None:
        """Dynamo's worker, from its command line on."""
        dynamo_main.prepare_snapshot_engine = self._prepare
        dynamo_main.register_model = self._seat.register_model
        worker_factory.DecodeWorkerHandler = movable(self._requests)
        own = ["--scheduler-cls", SCHEDULER, "--worker-extension-cls", EXTENSION]
        await dynamo_main.worker([*argv, *own])

    async def _prepare(self, config: Any, setup_vllm_engine: Callable[..., Any]) -> Prepared:
        """An engine with the identity that attach.json gave it, proven and ready."""
        own_ports(config)
        own_metrics_directory(self._control_dir)
        loggers = StatLoggerFactory(endpoint=None, embedding_worker=config.embedding_worker)
        setup = setup_vllm_engine(config, loggers)
        client, vllm_config = setup[0], setup[1]
        replica = Replica(client, self._control_dir)
        pause = VllmEnginePauseController(_HostMemory(client), prepare_for_process_checkpoint=True)
        probe = await replica.probe()
        await pause.pause()
        await self._detach(replica, probe)
        attach = await wait_attach(self._control_dir)
        await self._attach(replica, attach, config)
        await pause.resume()
        pause.mark_resumed()
        if await replica.probe() != probe:
            raise EngineError("self-test: other tokens than at the warm-up; boot cold")
        write_snapshot_restore_context(str(self._control_dir))
        engine = VllmEngine(
            attach, replica, self._requests, vllm_config.cache_config.num_gpu_blocks or 0
        )
        await self._serve(engine)
        return Prepared((setup, loggers), pause)

    async def _detach(self, replica: Replica, probe: tuple[int, ...]) -> None:
        """The tree holds nothing that an image must not hold, and says so in detached.json."""
        await replica.release()
        say_detached(self._control_dir, self._began_s, probe=list(probe))

    async def _attach(self, replica: Replica, attach: Attach, config: Any) -> None:
        opened = await replica.attach(attach)
        arm_from_environment(attach.worker_id)
        failpoint("engine.attached")
        relay_from(opened, config)

    async def _serve(self, engine: VllmEngine) -> None:
        server = RpcServer(
            self._control_dir / SOCKET_FILE,
            all_handlers(engine, self._seat),
            {OUTPUTS: lambda _: silence()},
        )
        await server.start()


def own_metrics_directory(control_dir: Path) -> None:
    """Files of metrics are in `control_dir`, of which every copy has its own."""
    # Set before prometheus_client was imported, its files would be mapped, and in the image.
    path = control_dir / "prometheus"
    path.mkdir(exist_ok=True)
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(path)
    os.environ[SNAPSHOT_CONTROL_DIR_ENV] = str(control_dir)


def relay_from(opened: dict[str, Any], config: Any) -> None:
    """Dynamo's relays of this process listen to the publishers of our own engine core. They add
    the rank to both ports."""
    rank = config.engine_args.data_parallel_rank or 0
    os.environ[ENV_FPM_PORT] = str(opened["fpm_port"] - rank)
    if opened["events"]:
        host, _, port = opened["events"].rpartition(":")
        endpoint = f"{host}:{int(port) - rank}"
        events = replace(config.engine_args.kv_events_config, endpoint=endpoint)
        config.engine_args.kv_events_config = events


def own_ports(config: Any) -> None:
    """Events go out on a free loopback port; the port of the command line is every copy's."""
    events = config.engine_args.kv_events_config
    if events is not None:
        config.engine_args.kv_events_config = replace(events, endpoint="tcp://*:0")


async def silence() -> Any:
    """A stream that says nothing until the process ends."""
    await asyncio.Event().wait()
    yield


def movable(requests: Requests) -> type[DecodeWorkerHandler]:
    """Dynamo's handler, whose requests can be sent on to another replica."""

    class MovableHandler(DecodeWorkerHandler):  # type: ignore[misc]
        async def generate(self, request: Any, context: Any) -> Any:
            try:
                async with aclosing(requests.run(super().generate(request, context))) as items:
                    async for item in items:
                        yield item
            except RequestMoved as exc:
                raise StreamIncomplete(str(exc)) from None

    return MovableHandler
