"""`--worker-cls`: vLLM's GPU worker with our groups, operations and graphs."""

from __future__ import annotations

import os
from typing import Any

import torch
from vllm import envs
from vllm.distributed import parallel_state
from vllm.v1.worker.gpu_worker import Worker
from vllm.version import __version__

from dynamo_elastic.engine.vllm.elastic.graphs import CapturedGraphs
from dynamo_elastic.engine.vllm.elastic.settings import ElasticSettings
from dynamo_elastic.engine.vllm.v0_33 import buffer, detached, expert_moves, groups, moves
from dynamo_elastic.engine.vllm.v0_33.hooks import check_hooks
from dynamo_elastic.engine.vllm.v0_33.leaver import used_bytes
from dynamo_elastic.engine.vllm.v0_33.scaling import ElasticScaling
from dynamo_elastic.engine.vllm.worker import ElasticWorkerExtension

check_hooks(__version__)
groups.install()
moves.install()
expert_moves.install()
if ElasticSettings.from_environment().detached:
    detached.install()
else:
    groups.install_environment()


class ElasticWorker(ElasticWorkerExtension, Worker):  # type: ignore[misc]
    """vLLM's worker; its graphs can be looked into and rebound."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        buffer.install()
        self.elastic_ep_executor = ElasticScaling(self)
        self.captured = CapturedGraphs()
        self.captured.install()

    def elastic_attach(self, attach: dict[str, Any]) -> None:
        super().elastic_attach(attach)
        envs.disable_envs_cache()

    def elastic_facts(self) -> dict[str, Any]:
        """What of our hooks this worker has, and what it holds; through collective_rpc()."""
        ep, dp = parallel_state._EP, parallel_state._DP
        return {
            "groups": {"ep": type(ep).__name__, "dp": type(dp).__name__},
            "ep_size": ep.world_size if ep is not None else 0,
            "graphs": len(self.captured.alive),
            "used_bytes": used_bytes(),
            "reserved_bytes": torch.cuda.memory_reserved(),
            "descriptors": len(os.listdir("/proc/self/fd")),
        }

    def elastic_rebind_check(self) -> dict[str, Any]:
        """Whether the graphs of this rank could go on with another buffer. The group must be idle;
        through collective_rpc()."""
        found: dict[str, Any] = self.elastic_ep_executor.graphs().check()
        return found

    def rebinding(self) -> Any:
        """Of all graphs of this rank, from the buffer that it has now."""
        from dynamo_elastic.engine.vllm.v0_33.rebind import Rebinding

        config = self.model_config.hf_text_config
        return Rebinding(
            self.model_runner.get_model(),
            config.hidden_size,
            config.num_experts_per_tok,
            self.captured.alive,
        )
