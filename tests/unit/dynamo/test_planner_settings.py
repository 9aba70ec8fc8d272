"""What `serve` tells the planner: our plugin beside others, and how long it may be held up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dynamo_elastic.config_sections import MAX_SYSTEM_PORT
from dynamo_elastic.dynamo.launch import planner_environment, planner_settings
from dynamo_elastic.errors import ConfigError
from dynamo_elastic.testing.deployments import deployment


def plugins(tmp_path: Path, **planner: Any) -> list[dict[str, Any]]:
    settings = planner_settings(deployment(tmp_path, planner=planner))
    found: list[dict[str, Any]] = settings.get("plugin_registration", {}).get(
        "in_process_plugins", []
    )
    return found


def test_our_plugin_is_told_where_the_capacity_is(tmp_path: Path) -> None:
    (ours,) = plugins(tmp_path)
    assert (ours["module"], ours["class"]) == (
        "dynamo_elastic.dynamo.planner_plugin",
        "LegalWidths",
    )
    assert ours["plugin_type"] == "reconcile"
    assert ours["kwargs"]["endpoints"] == ["http://127.0.0.1:2379"]
    assert ours["kwargs"]["deployment"] == "test"


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({"decode_scale_up_kv_rate": 60}, 0.6),
        ({"optimization_target": "latency"}, 0.4),
        ({"optimization_target": "throughput"}, 1.0),
        ({"optimization_target": "sla", "load_scaling_down_sensitivity": 70}, 0.7),
    ],
)
def test_it_has_the_planners_own_threshold(
    tmp_path: Path, settings: dict[str, Any], share: float
) -> None:
    (ours,) = plugins(tmp_path, settings=settings)
    assert ours["kwargs"]["full_kv_share"] == share


def test_plugins_of_the_user_stay(tmp_path: Path) -> None:
    mine = {"module": "mine", "class": "Mine", "plugin_id": "m", "plugin_type": "constrain"}
    settings = {"plugin_registration": {"in_process_plugins": [mine], "x": 1}}
    assert [p["plugin_id"] for p in plugins(tmp_path, settings=settings)] == ["dynamo_elastic", "m"]
    assert plugins(tmp_path, constrain=False, settings=settings) == [mine]
    assert plugins(tmp_path, constrain=False) == []


def test_a_hold_lasts_no_longer_than_we_may_take(tmp_path: Path) -> None:
    config = deployment(
        tmp_path,
        scale={
            "initial_ranks": 1,
            "max_ranks": 2,
            "operation_timeout_s": 200.5,
            "slots_timeout_s": 40,
        },
    )
    assert planner_environment(config)["SCALING_MAX_WAIT_TIME"] == "241"


def test_ports_that_dynamo_cannot_take_are_refused(tmp_path: Path) -> None:
    most = MAX_SYSTEM_PORT - 1
    assert deployment(tmp_path, workers={"system_port": most}).system_port(1) == MAX_SYSTEM_PORT
    with pytest.raises(ConfigError, match=r"workers.system_port: 32768 of the last slot"):
        deployment(tmp_path, workers={"system_port": MAX_SYSTEM_PORT})
    assert deployment(tmp_path).system_port(1) == 0
