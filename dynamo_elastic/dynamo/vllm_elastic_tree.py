"""The process at the root of one elastic rank: Dynamo's worker around it, with its engine made by
us, and a socket for the rank's shell."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dynamo_elastic.dynamo.vllm_group import GroupEngine
from dynamo_elastic.dynamo.vllm_scheduler import SCHEDULER
from dynamo_elastic.dynamo.vllm_seat import ReplicaSeat
from dynamo_elastic.dynamo.vllm_service import all_handlers
from dynamo_elastic.dynamo.vllm_worker import (
    Prepared,
    movable,
    own_metrics_directory,
    own_ports,
    relay_from,
    silence,
)
from dynamo_elastic.engine.base import SOCKET_FILE, Attach
from dynamo_elastic.engine.rpc import OUTPUTS
from dynamo_elastic.engine.vllm.elastic.flags import elastic_flags
from dynamo_elastic.engine.vllm.group import RankGroup
from dynamo_elastic.engine.vllm.life import say_detached, wait_attach
from dynamo_elastic.engine.vllm.replica import Replica
from dynamo_elastic.engine.vllm.requests import Requests
from dynamo_elastic.failpoints import arm_from_environment, failpoint
from dynamo_elastic.ipc import RpcServer

from dynamo.common.snapshot.restore_context import write_snapshot_restore_context  # isort: skip
from dynamo.llm import unregister_model  # isort: skip
from dynamo.vllm import main as dynamo_main  # isort: skip
from dynamo.vllm import worker_factory  # isort: skip
from dynamo.vllm.handlers import VllmEnginePauseController  # isort: skip
from dynamo.vllm.publisher import StatLoggerFactory  # isort: skip


class ElasticTree:
    """One rank, in all its lives under one runtime of Dynamo."""

    def __init__(self, control_dir: Path, began_s: float, *, founds: bool) -> None:
        self._control_dir = control_dir
        self._began_s = began_s
        self._founds = founds
        self._requests = Requests()
        self._seat = ReplicaSeat(dynamo_main.register_model, unregister_model)
        self._engine: Any = None
        self._group: RankGroup | None = None
        self._server: RpcServer | None = None
        self._resting: asyncio.Task[None] | None = None

    async def live(self, argv: list[str]) -> None:
        """Dynamo's worker, from its command line on."""
        dynamo_main.prepare_snapshot_engine = self._prepare
        dynamo_main.register_model = self._seat.register_model
        worker_factory.DecodeWorkerHandler = movable(self._requests)
        await dynamo_main.worker([*elastic_flags(), "--scheduler-cls", SCHEDULER, *argv])

    async def _prepare(self, config: Any, setup_vllm_engine: Callable[..., Any]) -> Prepared:
        """An engine with the identity that attach.json gave it."""
        own_ports(config)
        own_metrics_directory(self._control_dir)
        loggers = StatLoggerFactory(endpoint=None, embedding_worker=config.embedding_worker)
        setup = setup_vllm_engine(config, loggers)
        self._engine = setup[0]
        attach, opened = await self._identity()
        relay_from(opened, config)
        write_snapshot_restore_context(str(self._control_dir))
        await self._serve(attach)
        return Prepared((setup, loggers), VllmEnginePauseController(self._engine))

    async def _identity(self) -> tuple[Attach, dict[str, Any]]:
        from dynamo_elastic.engine.vllm.v0_33.front import live_detached

        if not self._founds:
            return await live_detached(self._engine, self._control_dir, self._began_s)
        say_detached(self._control_dir, self._began_s, founds=True)
        attach = await wait_attach(self._control_dir)
        return attach, await Replica(self._engine, self._control_dir).attach(attach)

    async def _serve(self, attach: Attach) -> None:
        """The attached rank answers its shell."""
        from dynamo_elastic.engine.vllm.v0_33.rank_group import VllmRankGroup

        if self._group is None:
            self._group = VllmRankGroup(self._engine, member=self._founds)
        arm_from_environment(attach.worker_id)
        failpoint("engine.attached")
        engine = GroupEngine(
            attach,
            self._group,
            Replica(self._engine, self._control_dir),
            self._requests,
            self._engine.vllm_config.cache_config.num_gpu_blocks or 0,
            self.rest,
        )
        self._requests.reopen()
        self._server = RpcServer(
            self._control_dir / SOCKET_FILE,
            all_handlers(engine, self._seat),
            {OUTPUTS: lambda _: silence()},
        )
        await self._server.start()

    async def rest(self) -> None:
        """This rank has left its group, let go, and left its seat in Dynamo, whose runtime lives
        on: its socket goes, `detached.json` says that it can be parked, and the next `attach.json`
        brings it back here. Returns at once, so that whoever asks is answered first."""
        self._resting = asyncio.get_running_loop().create_task(self._rest())

    async def _rest(self) -> None:
        from dynamo_elastic.engine.vllm.v0_33.front import rest

        server, self._server = self._server, None
        if server is not None:
            await server.close()
        await self._serve(await rest(self._engine, self._control_dir, self._began_s))
