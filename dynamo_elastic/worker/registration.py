"""Which registrar a shell has, and whether requests come to it, by kind of engine."""

from __future__ import annotations

from collections.abc import Mapping

from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.config_sections import VllmEngineConfig
from dynamo_elastic.dynamo.base import ControlRoute, InstanceSpec
from dynamo_elastic.dynamo.runtime import DynamoInstance
from dynamo_elastic.dynamo.vllm_registrar import VllmRegistrar
from dynamo_elastic.engine.base import SOCKET_FILE
from dynamo_elastic.worker.participant import KV_BLOCK_TOKENS
from dynamo_elastic.worker.requests import RequestDesk
from dynamo_elastic.worker.traffic import TokenMeter


def registration(
    config: DeploymentConfig, slot: int, routes: Mapping[str, ControlRoute], meter: TokenMeter
) -> tuple[RequestDesk, DynamoInstance | VllmRegistrar]:
    """The shell's desk for requests, which feeds `meter`, and its registrar, which its caller shuts
    down."""
    if isinstance(config.engine, VllmEngineConfig):
        return _beside_vllm(config, slot, routes)
    engine, port = config.engine, config.system_port(slot)
    desk = RequestDesk(engine.max_context, meter)
    spec = InstanceSpec(
        namespace=config.namespace,
        model_path=str(config.model.path),
        model_name=config.model.name,
        context_length=engine.max_context,
        kv_blocks=engine.kv_blocks,
        block_tokens=KV_BLOCK_TOKENS,
        batch_tokens=engine.batch_tokens,
    )
    return desk, DynamoInstance(spec, desk.handle, routes, system_port=port)


def _beside_vllm(
    config: DeploymentConfig, slot: int, routes: Mapping[str, ControlRoute]
) -> tuple[RequestDesk, VllmRegistrar]:
    """The engine is the instance: the frontend sends it requests without us. We have a runtime, if
    at all, for the sake of our routes, and never register it."""
    desk, port = RequestDesk(max_context=0), config.system_port(slot)
    bare = InstanceSpec(
        namespace=config.namespace,
        model_path=str(config.model.path),
        model_name=config.model.name,
        context_length=0,
        kv_blocks=0,
        block_tokens=0,
        batch_tokens=0,
    )
    host = DynamoInstance(bare, desk.handle, routes, system_port=port) if port else None
    return desk, VllmRegistrar(config.control_dir(slot) / SOCKET_FILE, host)
