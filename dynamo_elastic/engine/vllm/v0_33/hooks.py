"""What of vLLM we hold on to, and a check at the start that it is still there."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from dynamo_elastic.errors import ConfigError

RELEASE = "0.33"
_NOTHING = object()


@dataclass(frozen=True, slots=True)
class Hook:
    """A name that we replace, override or call, and the parameters that we count on."""

    module: str
    name: str
    parameters: tuple[str, ...] = ()


def _methods(module: str, owner: str, **methods: str) -> tuple[Hook, ...]:
    return tuple(Hook(module, f"{owner}.{m}", tuple(p.split())) for m, p in methods.items())


_CORE = "vllm.v1.engine.core"
_CLIENT = "vllm.v1.engine.core_client"
_EEP = "vllm.distributed.elastic_ep"
_EXTERNAL = f"{_EEP}.external_elastic_ep"
_MIDDLEWARE = "vllm.entrypoints.serve.elastic_ep.middleware"
_EXPERTS = "vllm.model_executor.layers.fused_moe"
_EPLB = "vllm.distributed.eplb.eplb_state"

HOOKS: tuple[Hook, ...] = (
    Hook(_CORE, "DPEngineCoreProc"),
    *_methods(
        _CORE, "DPEngineCoreProc",
        _init_data_parallel="self vllm_config",
        _has_global_unfinished_reqs="self local_unfinished",
        reinitialize_distributed="self reconfig_request",
        commit_prepared_elastic_ep="self",
        resume_scheduler="self",
        _pause_complete="self",
        run_busy_loop="self",
        has_work="self",
        _process_input_queue="self",
        _perform_handshakes="self handshake_address identity local_client vllm_config "
                            "client_handshake_address",
        _eep_scale_up_before_kv_init="self",
        shutdown="self",
    ),
    *_methods("vllm.v1.core.sched.scheduler", "Scheduler", set_pause_state="self pause_state",
              reset_prefix_cache="self reset_running_requests"),
    Hook("vllm.distributed.utils", "cpu_all_reduce_", ("tensor", "group", "timeout")),
    Hook("vllm.distributed.utils", "get_cached_tcp_store_client", ("host", "port")),
    Hook("vllm.distributed.utils", "create_tcp_store", ("host", "port")),
    Hook(_CLIENT, "ExternalElasticEPScaleCoordinator"),
    *_methods(_CLIENT, "DPAsyncMPClient", call_utility_async="self method",
              resume_scheduler_async="self", _ensure_stats_update_task="self"),
    *_methods(
        _EXTERNAL, "ExternalElasticEPScaleCoordinator",
        prepare="self cur_data_parallel_size new_data_parallel_size",
        commit="self",
        abort="self error",
        process_engine_core_notification="self notification_data",
        key="parts",
        _sleep_with_backoff="backoff_step",
        _get_error="self store epoch",
        _setup_reconfig_bootstrap="self",
        _prepare_reconfig_bootstrap="self store cur_data_parallel_size new_data_parallel_size",
        _wait_for_bootstrap="self store requested_new_dp_size timeout_s",
        _wait_for_ready_ranks="self control_store reconfig_store epoch new_data_parallel_size "
                              "handshake_server timeout_s",
        _wait_for_all_old_ranks="self prepared timeout_s",
        _wait_for_commit_ready="self prepared timeout_s",
        _wait_for_local_reconfig_finished="self control_store reconfig_store epoch bootstrap "
                                          "dp_rank scale_up timeout_s",
        _stop_handshake_server="server suppress_errors",
    ),
    Hook(_EXTERNAL, "ExternalElasticEPScaleUpHandshakeMetadata",
         ("engine_metadata", "num_redundant_experts", "elastic_ep_max_dp_size")),
    *_methods(
        _EXTERNAL, "ExternalElasticEPScaleUpHandshakeServer",
        __init__="self handshake_address expected_new_ranks addresses bootstrap "
                 "num_redundant_experts elastic_ep_max_dp_size",
        _run="self",
    ),
    Hook("vllm.v1.engine.utils", "EngineHandshakeMetadata", ("addresses", "parallel_config")),
    Hook(f"{_EEP}.elastic_state", "ElasticEPScalingState"),
    *_methods(
        f"{_EEP}.elastic_state", "ElasticEPScalingState",
        progress="self",
        is_complete="self",
        is_ready_for_switch="self",
        _execute_async="self execute_method",
        _collective_rpc="self",
        _init_new_dp_group="self",
        _commit_new_dp_group="self",
        _commit_scale_down="self removing",
    ),
    *_methods(
        f"{_EEP}.elastic_execute", "ElasticEPScalingExecutor",
        prepare_reconfiguration="self reconfig_request use_all2all",
        transfer_weights="self old_dp_size new_dp_size",
        prepare_new_worker="self",
        broadcast_expert_mapping="self",
        receive_expert_mapping="self",
        switch_and_prepare="self",
        perform_scale_down_eplb_reshuffle="self new_dp_size",
        commit_scale_up="self is_existing_worker",
        commit_scale_down="self new_dp_size removing",
        _warm_target_groups="self dp_group ep_group",
        _make_eep_moe_config="self module dp_group ep_group",
        _start_group_cleanup="self groups",
        _release_cuda_graphs="self",
    ),
    *_methods(f"{_EEP}.elastic_execute", "ElasticEPScalingExecutor", execute="self execute_method"),
    Hook(f"{_EEP}.standby_state", "pop_standby_groups"),
    Hook("vllm.distributed.stateless_coordinator", "StatelessGroupCoordinator"),
    Hook("vllm.distributed.parallel_state", "_get_unique_name"),
    Hook("vllm.distributed.parallel_state", "_register_group"),
    Hook("vllm.distributed.parallel_state", "_replace_active_groups",
         ("world", "dp", "ep", "eplb", "node_count")),
    Hook("vllm.distributed.utils", "StatelessProcessGroup"),
    Hook("vllm.distributed.utils", "get_cpu_distributed_timeout_or_none"),
    Hook("vllm.distributed.device_communicators.all2all", "NixlEPAll2AllManager._buffer"),
    Hook("vllm.distributed.device_communicators.all2all", "NixlEPAll2AllManager._lock"),
    Hook(_EPLB, "compute_logical_maps", ("physical_to_logical_map", "num_logical_experts")),
    Hook(_EPLB, "_commit_eplb_maps", ("model_state", "new_physical_to_logical_map")),
    Hook(_EPLB, "CpuGpuEvent"),
    Hook(_EPLB, "EPLB_POLICIES"),
    Hook("vllm.distributed.eplb.policy", "DefaultEplbPolicy"),
    *_methods("vllm.distributed.eplb.policy", "DefaultEplbPolicy",
              rebalance_experts="weight num_replicas num_groups num_nodes num_ranks "
                                "old_global_expert_indices"),
    *_methods(_EPLB, "EplbState", drain_async="self", start_async_loop="self"),
    Hook("vllm.v1.worker.dp_utils", "_skip_dp_coordination"),
    Hook("vllm.v1.worker.gpu_worker", "init_worker_distributed_environment",
         ("vllm_config", "rank", "distributed_init_method", "local_rank", "backend")),
    Hook(_EPLB, "create_eplb_communicator",
         ("group_coordinator", "backend", "expert_weights", "expert_buffer")),
    *_methods("vllm.distributed.eplb.eplb_communicator", "EplbCommunicator",
              set_stream="self stream", add_send="self tensors dst_rank expert_id",
              add_recv="self tensors src_rank expert_id", execute="self",
              _log_initialized="self"),
    Hook("vllm.distributed.eplb.eplb_utils", "device_stream", ("stream",)),
    Hook(_MIDDLEWARE, "set_scaling_elastic_ep"),
    Hook(_MIDDLEWARE, "set_elastic_ep_rank_retired"),
    Hook(_EXPERTS + ".routed_experts", "RoutedExperts.update_expert_map_info", ("self",)),
    Hook(_EXPERTS + ".expert_map_manager", "ExpertMapManager.expert_map"),
)  # fmt: skip
"""Those of every process; the subclasses of this package use no other private name."""

ROUTE_HOOKS: tuple[Hook, ...] = (
    Hook(_MIDDLEWARE, "_SCALING_OBSERVABILITY_PATHS"),
    Hook("vllm.entrypoints.serve.elastic_ep.api_router", "router"),
)
"""Those of the API process: others would import its server for nothing."""


def missing_hooks(
    load: Callable[[str], Any] = importlib.import_module,
    hooks: tuple[Hook, ...] = HOOKS + ROUTE_HOOKS,
) -> list[str]:
    """What is not as we know it, one line each; `load` imports a module."""
    return [fault for hook in hooks if (fault := _fault(hook, load))]


def check_hooks(
    release: str,
    load: Callable[[str], Any] = importlib.import_module,
    hooks: tuple[Hook, ...] = HOOKS,
) -> None:
    """Return if this vLLM has all of `hooks`. Raises ConfigError naming what it lacks."""
    if not release.startswith(f"{RELEASE}."):
        raise ConfigError(
            [f"vllm: {release} is not {RELEASE}, for which this adapter was made; install that one"]
        )
    missing = missing_hooks(load, hooks)
    if missing:
        raise ConfigError(
            [f"vllm {release}: {fault}; this adapter can't be used" for fault in missing]
        )


def _fault(hook: Hook, load: Callable[[str], ModuleType]) -> str:
    try:
        found: Any = load(hook.module)
    except ImportError as exc:
        return f"{hook.module} can't be imported ({exc})"
    for part in hook.name.split("."):
        found = getattr(found, part, _NOTHING)
        if found is _NOTHING:
            return f"{hook.module} has no {hook.name}"
    gone = [name for name in hook.parameters if name not in set(_parameters(found))]
    return f"{hook.module}.{hook.name} takes no {', '.join(gone)}" if gone else ""


def _parameters(call: Any) -> Iterator[str]:
    yield from inspect.signature(inspect.unwrap(call)).parameters
