"""`python -m dynamo_elastic.dynamo.vllm_elastic CONTROL_DIR FLAGS...`: one rank of an elastic group
of vLLM 0.33 under Dynamo's own worker, with the flags of `dynamo.vllm`.

Beside Dynamo's order, engine first and runtime second, there is this: the model is registered when
the rank's shell says so, and CONTROL_DIR/engine.sock answers the calls of vllm_rank.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from dynamo_elastic.dynamo.vllm_rank import ElasticRank
from dynamo_elastic.dynamo.vllm_registrar import REGISTER, UNREGISTER
from dynamo_elastic.dynamo.vllm_seat import ReplicaSeat
from dynamo_elastic.dynamo.vllm_worker import movable
from dynamo_elastic.engine.base import SOCKET_FILE
from dynamo_elastic.engine.vllm.elastic.flags import elastic_environment, elastic_flags
from dynamo_elastic.engine.vllm.requests import Requests
from dynamo_elastic.ipc import RpcServer

from dynamo.llm import unregister_model  # isort: skip
from dynamo.vllm import main as dynamo_main  # isort: skip
from dynamo.vllm import worker_factory  # isort: skip


class ElasticTree:
    """The process at the root of one rank."""

    def __init__(self, control_dir: Path) -> None:
        self._control_dir = control_dir
        self._requests = Requests()
        self._seat = ReplicaSeat(dynamo_main.register_model, unregister_model)
        self._serving: asyncio.Task[None] | None = None

    async def live(self, argv: list[str]) -> None:
        """Dynamo's worker, from its command line on."""
        made = dynamo_main.setup_vllm_engine

        def setup_vllm_engine(*arguments: Any, **named: Any) -> Any:
            found = made(*arguments, **named)
            self._serving = asyncio.get_running_loop().create_task(self._serve(found[0]))
            return found

        dynamo_main.setup_vllm_engine = setup_vllm_engine
        dynamo_main.register_model = self._seat.register_model
        worker_factory.DecodeWorkerHandler = movable(self._requests)
        await dynamo_main.worker([*argv, *elastic_flags()])

    async def _serve(self, engine: Any) -> None:
        parallel = engine.vllm_config.parallel_config
        rank = ElasticRank(parallel.data_parallel_rank, engine, self._seat, self._requests)

        async def register(params: dict[str, Any]) -> int:
            return await rank.register(params["runtime_data"])

        async def unregister(_: dict[str, Any]) -> None:
            await self._seat.leave()

        calls = rank.calls() | {REGISTER: register, UNREGISTER: unregister}
        await RpcServer(self._control_dir / SOCKET_FILE, calls).start()


def main() -> None:
    """Run the rank until it is killed."""
    control_dir, *argv = sys.argv[1:]
    for name, value in elastic_environment(park=True).items():
        os.environ.setdefault(name, value)
    asyncio.run(ElasticTree(Path(control_dir)).live(argv))


if __name__ == "__main__":
    main()
