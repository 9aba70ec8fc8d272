"""Control routes of real workers over HTTP: asked, refused, obeyed, while clients stream through
the KV router."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from dynamo_elastic.config import api_token
from dynamo_elastic.demo.load import Prompt
from dynamo_elastic.demo.run import demo_config, leftovers
from dynamo_elastic.testing.background_load import background_load
from dynamo_elastic.testing.dynamo_cards import read_cards
from dynamo_elastic.testing.dynamo_processes import free_system_port
from dynamo_elastic.testing.served import ServedDeployment, served

pytestmark = [
    pytest.mark.root,
    pytest.mark.etcd,
    pytest.mark.nixl,
    pytest.mark.dynamo,
    pytest.mark.timeout(180),
]

PROMPTS = [Prompt("river stone light", 7, 24), Prompt("amber cloud", 8, 60)]


def call(deployment: ServedDeployment, slot: int, route: str, **body: Any) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{deployment.config.system_port(slot)}/engine/control/{route}",
        data=json.dumps({"token": api_token(deployment.config), **body}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=20.0) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


@pytest.mark.slow
def test_workers_answer_and_are_obeyed(tmp_path: Path) -> None:
    config = demo_config(
        tmp_path,
        "test-control",
        planner={"enabled": False},
        snapshot={"enabled": False},
        frontend={"router_mode": "kv"},
        workers={"system_port": free_system_port(4)},
    )
    with (
        served(config, tmp_path) as deployment,
        background_load(deployment.url, config.model.name, PROMPTS, clients=3) as load,
    ):
        status = call(deployment, 1, "elastic_status")
        assert (status["status"], status["worker"], status["rank"]) == ("ok", "slot1", 1)
        assert status["capacity"]["legal"] == [2, 3, 4]
        assert call(deployment, 3, "elastic_status")["rank"] is None

        refused = call(deployment, 0, "scale_elastic", target=9)
        assert (refused["status"], refused["state"]) == ("error", "refused")
        assert "scale.max_ranks is 4" in refused["message"]
        assert "no smaller width" in call(deployment, 0, "park")["message"]

        grown = call(deployment, 0, "scale_elastic", target=4, request_id="up")
        assert (grown["status"], grown["state"]) == ("ok", "running")
        now = deployment.wait_width(4)
        assert now.last is not None
        assert now.last.operation_id == grown["operation_id"]
        assert (now.last.source, now.target and now.target.detail) == ("control", "slot0")
        # Asking twice is asking once.
        again = call(deployment, 2, "scale_elastic", target=4, request_id="up")
        assert (again["state"], again["operation_id"]) == ("reached", grown["operation_id"])

        parked = call(deployment, 1, "park")
        assert parked["status"] == "ok", parked
        now = deployment.wait_width(3)
        assert now.topology is not None
        assert now.topology.worker_ids == ("slot0", "slot2", "slot3")
        assert call(deployment, 1, "elastic_status")["state"] == "standby"
        assert call(deployment, 3, "elastic_status")["rank"] == 2

        # The cards of all that stayed name the epoch in force, and their new ranks.
        cards = deployment.with_store(lambda store: read_cards(store, config.namespace, now))
        assert sorted((c["rank"], c["width"]) for c in cards) == [
            ("0", "3"),
            ("1", "3"),
            ("2", "3"),
        ]
        assert {c["epoch"] for c in cards} == {str(now.topology.epoch)}

        assert not_found(deployment) == 404
        load.wait_for_tokens(timeout_s=20)
        summary = load.finish()
        assert summary.requests_failed == 0, summary.errors
        assert summary.tokens_equal
    assert leftovers(config, set()) == []


def not_found(deployment: ServedDeployment) -> int:
    try:
        call(deployment, 0, "no_such_route")
    except urllib.error.HTTPError as exc:
        return exc.code
    return 200
