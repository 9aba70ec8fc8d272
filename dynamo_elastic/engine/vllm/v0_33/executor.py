"""`--distributed-executor-backend`: vLLM's own executor of one process a rank. Imported in the API
process and in the engine core, where it puts our classes in place before vLLM looks its own up."""

from __future__ import annotations

from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.version import __version__

from dynamo_elastic.engine.vllm.elastic.settings import ElasticSettings
from dynamo_elastic.engine.vllm.v0_33 import (
    client,
    core,
    detached_core,
    handshake,
    operation,
    stores,
    survival,
)
from dynamo_elastic.engine.vllm.v0_33.hooks import check_hooks

check_hooks(__version__)
client.install(survival.SurvivingCoordinator)
handshake.install()
stores.install()
core.install(
    detached_core.DetachedEngineCore
    if ElasticSettings.from_environment().detached
    else core.ElasticEngineCore
)
operation.install()


class ElasticExecutor(MultiprocExecutor):  # type: ignore[misc]
    """Named on the command line so that this module is imported."""
