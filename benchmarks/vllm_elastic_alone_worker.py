"""The worker of vllm_elastic_alone.py: it comes back from its image without a group."""

from __future__ import annotations

import os
from typing import Any

from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state

from dynamo_elastic.engine.vllm.elastic.laps import Laps
from dynamo_elastic.engine.vllm.v0_33 import detached
from dynamo_elastic.engine.vllm.v0_33.leaver import used_bytes
from dynamo_elastic.engine.vllm.v0_33.scaling import ElasticScaling
from dynamo_elastic.engine.vllm.v0_33.worker import ElasticWorker


class Scaling(ElasticScaling):
    """It may keep its weights, as nobody will send them."""

    def let_go(self) -> dict[str, Any]:
        if not os.environ.get("BENCH_KEEP_WEIGHTS"):
            return super().let_go()
        self._prepared_eplb_communicator = None
        return self._leaver.let_go([])

    def rehearse(self) -> dict[str, Any]:
        """Memory at its old addresses, groups without peers, a new buffer, graphs that use it."""
        laps = Laps()
        self._leaver.map_memory()
        laps.mark("memory")
        worker = self.worker
        detached.init_environment(worker.vllm_config, worker.rank, local_rank=worker.local_rank)
        with set_current_vllm_config(worker.vllm_config):
            self._use_buffer_of(parallel_state._EP.device_communicator.all2all_manager)
        laps.mark("buffer")
        rebound = self._leaver.rebind()
        laps.mark("rebind")
        if not rebound:
            self.capture()
            laps.mark("capture")
        facts: dict[str, Any] = worker.elastic_facts()
        return {"rebound": rebound, "seconds": laps.s, "used_bytes": used_bytes(), **facts}


class Worker(ElasticWorker):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.elastic_ep_executor = Scaling(self)
