"""How Dynamo's frontend and planner are started: argument lists, and no process."""

from __future__ import annotations

import json
import sys
from math import ceil
from typing import Any

import aiohttp

from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.coordinator.etcd_access import EtcdAccess
from dynamo_elastic.dynamo.environment import dynamo_environment
from dynamo_elastic.errors import ElasticError

_CONTROL_TIMEOUT_S = 15.0


class PlannerRefused(ElasticError):
    """The planner did not take new limits (its reason is in the message), or is not there."""


def frontend_argv(config: DeploymentConfig) -> list[str]:
    """Dynamo's OpenAI frontend. Needs dynamo_environment()."""
    return [
        sys.executable,
        "-m",
        "dynamo.frontend",
        f"--http-host={config.frontend.host}",
        f"--http-port={config.frontend.port}",
        f"--migration-limit={config.frontend.migration_limit}",
        f"--namespace={config.namespace}",
        f"--router-mode={config.frontend.router_mode}",
        "--discovery-backend=etcd",
        "--request-plane=tcp",
        "--event-plane=zmq",
    ]


def planner_argv(config: DeploymentConfig) -> list[str]:
    """Dynamo's planner. Needs planner_environment()."""
    return [
        sys.executable,
        "-m",
        "dynamo.planner",
        f"--config={json.dumps(planner_settings(config))}",
    ]


def planner_settings(config: DeploymentConfig) -> dict[str, Any]:
    """The planner's settings: ours, overruled one by one by `planner.settings`.

    By default load moves little: replicas follow `min_endpoint` and `max_gpu_budget`, the KV cache
    must be full to ask for more, and ranks are given back one by one only while all of them are
    idle. One replica is one rank is one GPU.
    """
    ours: dict[str, Any] = {
        "environment": "virtual",
        "backend": "vllm",
        "mode": "agg",
        "model_name": config.model.name,
        "optimization_target": "load",
        "enable_load_scaling": True,
        "enable_throughput_scaling": False,
        "decode_scale_up_kv_rate": 100,
        "decode_scale_down_kv_rate": 0,
        "load_adjustment_interval_seconds": config.planner.interval_s,
        "load_min_observations": 1,
        "min_endpoint": config.scale.min_ranks,
        "max_gpu_budget": config.scale.max_ranks,
        "decode_engine_num_gpu": 1,
        "control_api_port": config.planner.control_port,
        "pre_deployment_sweeping_mode": "none",
        "live_dashboard_port": 0,
        "report_interval_hours": None,
    }
    settings = ours | config.planner.settings
    return _constrained(config, settings) if config.planner.constrain else settings


def _constrained(config: DeploymentConfig, settings: dict[str, Any]) -> dict[str, Any]:
    """`settings` with our plugin, before those that are there already."""
    plugin = {
        "module": "dynamo_elastic.dynamo.planner_plugin",
        "class": "LegalWidths",
        "plugin_id": "dynamo_elastic",
        "plugin_type": "reconcile",
        "priority": 0,
        "needs": ["observations.fpm"],
        "kwargs": {
            "endpoints": list(config.etcd.urls),
            "access": EtcdAccess.of(config.etcd).to_json(),
            "deployment": config.deployment,
            "namespace": config.namespace,
            "full_kv_share": _full_kv_share(settings),
        },
    }
    registration = settings.get("plugin_registration", {})
    plugins = [plugin, *registration.get("in_process_plugins", ())]
    return settings | {"plugin_registration": {**registration, "in_process_plugins": plugins}}


def _full_kv_share(settings: dict[str, Any]) -> float:
    """The share of the KV cache in use at which the planner goes up (target `sla`: down to which it
    would fill the ranks that stay)."""
    match settings["optimization_target"]:
        case "load":
            return float(settings["decode_scale_up_kv_rate"]) / 100
        case "latency":
            return 0.4
        case "sla":
            return float(settings.get("load_scaling_down_sensitivity", 80)) / 100
        case _:
            return 1.0


def planner_environment(config: DeploymentConfig) -> dict[str, str]:
    """dynamo_environment(), and how long the planner may be held up by a decision that nobody
    acknowledges: no longer than we may take, in place of half an hour."""
    scale = config.scale
    return dynamo_environment(config) | {
        "SCALING_CHECK_INTERVAL": "1",
        "SCALING_MAX_WAIT_TIME": str(ceil(scale.operation_timeout_s + scale.slots_timeout_s)),
    }


class PlannerControl:
    """The planner's control API on loopback: the one way to make it decide at will."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/v1/min-endpoints"

    async def limits(self) -> dict[str, Any]:
        """The limits in force. Raises PlannerRefused if the planner does not answer."""
        return await self._request("GET", None)

    async def set_limits(
        self, *, min_endpoint: int | None = None, max_gpu_budget: int | None = None
    ) -> dict[str, Any]:
        """Change the limits that are given, both at once; returns all limits then in force.

        Raises PlannerRefused, and nothing was changed, if they contradict each other.
        """
        wanted = {"min_endpoint": min_endpoint, "max_gpu_budget": max_gpu_budget}
        return await self._request("PATCH", {k: v for k, v in wanted.items() if v is not None})

    async def _request(self, method: str, body: dict[str, int] | None) -> dict[str, Any]:
        timeout = aiohttp.ClientTimeout(total=_CONTROL_TIMEOUT_S)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.request(method, self._url, json=body) as response,
            ):
                answer: dict[str, Any] = await response.json()
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as exc:
            raise PlannerRefused(f"planner control API: {str(exc) or type(exc).__name__}") from exc
        if response.status != 200:
            raise PlannerRefused(f"planner refused {body}: {answer.get('error', answer)}")
        return answer
