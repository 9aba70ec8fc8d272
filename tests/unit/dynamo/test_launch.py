"""Command lines and environments of Dynamo's processes, and the planner's control API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.dynamo.environment import dynamo_environment
from dynamo_elastic.dynamo.launch import (
    PlannerControl,
    PlannerRefused,
    frontend_argv,
    planner_argv,
)
from dynamo_elastic.testing.deployments import asyncio_test, deployment
from dynamo_elastic.testing.etcd_process import free_port


def _settings(config: DeploymentConfig) -> dict[str, Any]:
    option = planner_argv(config)[-1]
    settings: dict[str, Any] = json.loads(option.removeprefix("--config="))
    return settings


def test_the_frontend_serves_where_it_is_told(tmp_path: Path) -> None:
    config = deployment(tmp_path, frontend={"port": 8123, "migration_limit": 7})
    argv = frontend_argv(config)
    assert {"--http-host=127.0.0.1", "--http-port=8123", "--migration-limit=7"} <= set(argv)


def test_the_planner_is_bounded_by_the_legal_widths(tmp_path: Path) -> None:
    scale = {"initial_ranks": 2, "min_ranks": 2, "max_ranks": 4}
    settings = _settings(deployment(tmp_path, scale=scale))
    assert (settings["min_endpoint"], settings["max_gpu_budget"]) == (2, 4)


def test_planner_settings_are_overruled_one_by_one(tmp_path: Path) -> None:
    planner = {"settings": {"decode_scale_up_kv_rate": 50}}
    settings = _settings(deployment(tmp_path, planner=planner))
    assert settings["decode_scale_up_kv_rate"] == 50
    assert settings["decode_scale_down_kv_rate"] == 0


def test_the_environment_uses_our_etcd_and_loopback_alone(tmp_path: Path) -> None:
    environment = dynamo_environment(deployment(tmp_path, etcd={"port": 4444}))
    assert environment["ETCD_ENDPOINTS"] == "http://127.0.0.1:4444"
    hosts = {v for k, v in environment.items() if k.endswith("_HOST")}
    assert hosts == {"127.0.0.1"}


@asyncio_test
async def test_limits_are_changed_through_the_control_api() -> None:
    async def patch(request: web.Request) -> web.Response:
        body = await request.json()
        if body.get("min_endpoint", 0) > 4:
            return web.json_response({"error": "exceeding max_gpu_budget=4"}, status=422)
        return web.json_response({"mode": "agg", "max_gpu_budget": 4} | body)

    app = web.Application()
    app.router.add_patch("/v1/min-endpoints", patch)
    runner = web.AppRunner(app)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    control = PlannerControl(port)
    try:
        limits = await control.set_limits(min_endpoint=4)
        assert limits == {"mode": "agg", "max_gpu_budget": 4, "min_endpoint": 4}
        with pytest.raises(PlannerRefused, match="exceeding max_gpu_budget"):
            await control.set_limits(min_endpoint=5)
    finally:
        await runner.cleanup()
    with pytest.raises(PlannerRefused):
        await control.set_limits(min_endpoint=4)
