"""Which registrar a shell has, and whether requests come to it, by kind of engine."""

from __future__ import annotations

from collections.abc import Mapping

from dynamo_elastic.config import DeploymentConfig, EngineConfig, VllmEngineConfig
from dynamo_elastic.dynamo.base import ControlRoute, InstanceSpec
from dynamo_elastic.dynamo.runtime import DynamoInstance
from dynamo_elastic.dynamo.vllm_registrar import VllmRegistrar
from dynamo_elastic.engine.base import SOCKET_FILE
from dynamo_elastic.worker.participant import KV_BLOCK_TOKENS
from dynamo_elastic.worker.requests import RequestDesk


def registration(
    config: DeploymentConfig, slot: int, routes: Mapping[str, ControlRoute]
) -> tuple[RequestDesk, DynamoInstance | VllmRegistrar]:
    """The shell's desk for requests, and its registrar, which its caller shuts down."""
    if isinstance(config.engine, VllmEngineConfig):
        # The engine is the instance: the frontend sends it requests without us.
        return RequestDesk(max_context=0), VllmRegistrar(config.control_dir(slot) / SOCKET_FILE)
    desk = RequestDesk(config.engine.max_context)
    spec, port = _instance_spec(config, config.engine), config.system_port(slot)
    return desk, DynamoInstance(spec, desk.handle, routes, system_port=port)


def _instance_spec(config: DeploymentConfig, engine: EngineConfig) -> InstanceSpec:
    return InstanceSpec(
        namespace=config.namespace,
        model_path=str(config.model.path),
        model_name=config.model.name,
        context_length=engine.max_context,
        kv_blocks=engine.kv_blocks,
        block_tokens=KV_BLOCK_TOKENS,
        batch_tokens=engine.batch_tokens,
    )
