"""kill -9 in a real deployment under load: serving goes on, the next operation succeeds.

One deployment, one stream of clients for all of it: whatever is killed, no request may fail and
every token must equal the never-scaled answers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo_elastic.demo.load import Prompt
from dynamo_elastic.demo.run import demo_config, leftovers
from dynamo_elastic.phases import Kind, Phase, phases_of
from dynamo_elastic.testing.background_load import BackgroundLoad, background_load
from dynamo_elastic.testing.served import ServedDeployment, served

pytestmark = [
    pytest.mark.root,
    pytest.mark.criu,
    pytest.mark.etcd,
    pytest.mark.nixl,
    pytest.mark.dynamo,
    pytest.mark.timeout(180),
]

PROMPTS = [Prompt("river stone light", 7, 24), Prompt("amber cloud", 8, 40)]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedDeployment]:
    work_dir = tmp_path_factory.mktemp("kills")
    config = demo_config(
        work_dir, "test-kills", planner={"enabled": False}, scale={"lease_ttl_s": 2}
    )
    with served(config, work_dir) as running:
        yield running
    assert leftovers(config, set()) == []


@pytest.fixture(scope="module")
def load(deployment: ServedDeployment) -> Iterator[BackgroundLoad]:
    config = deployment.config
    with background_load(deployment.url, config.model.name, PROMPTS, clients=2) as clients:
        yield clients
        summary = clients.finish()
    assert summary.requests_failed == 0, summary.errors
    assert summary.tokens_equal
    assert summary.requests_total > 20


def width(deployment: ServedDeployment) -> int:
    topology = deployment.wait_idle().topology
    assert topology is not None
    return topology.world_size


def scale_to(deployment: ServedDeployment, ranks: int) -> None:
    """An operation that must succeed; the width may be there already."""
    if width(deployment) != ranks:
        done = deployment.cli("scale", str(ranks), timeout_s=120)
        assert done.returncode == 0, done.stdout + done.stderr
    assert width(deployment) == ranks


def last_phase(deployment: ServedDeployment) -> Phase:
    last = deployment.status().last
    assert last is not None
    return last.phase


@pytest.mark.parametrize(
    ("failpoint", "ends"),
    [
        ("slot2:engine.after_attach", Phase.ABORTED),
        ("slot2:engine.after_connect", Phase.ABORTED),
        ("slot0:engine.before_push", Phase.ABORTED),
        ("slot3:engine.before_first_step", Phase.DONE),
        ("slot2:engine.after_switch", Phase.DONE),
    ],
)
def test_a_joiner_is_killed(
    deployment: ServedDeployment, load: BackgroundLoad, failpoint: str, ends: Phase
) -> None:
    scale_to(deployment, 2)
    deployment.arm(failpoint)
    deployment.cli("scale", "4", timeout_s=120)
    assert deployment.fired(failpoint)
    load.wait_for_tokens(timeout_s=20)
    scale_to(deployment, 4)
    load.wait_for_tokens(timeout_s=20)


@pytest.mark.parametrize("phase", phases_of(Kind.UP))
def test_the_coordinator_is_killed_going_up(
    deployment: ServedDeployment, load: BackgroundLoad, phase: Phase
) -> None:
    scale_to(deployment, 2)
    kill_coordinator_in(deployment, phase, ranks=4)
    load.wait_for_tokens(timeout_s=20)
    deployment.wait_idle()
    assert last_phase(deployment) in (Phase.DONE, Phase.ABORTED)
    scale_to(deployment, 4)


@pytest.mark.parametrize("phase", phases_of(Kind.DOWN))
def test_the_coordinator_is_killed_going_down(
    deployment: ServedDeployment, load: BackgroundLoad, phase: Phase
) -> None:
    scale_to(deployment, 4)
    kill_coordinator_in(deployment, phase, ranks=2)
    load.wait_for_tokens(timeout_s=20)
    deployment.wait_idle()
    assert last_phase(deployment) in (Phase.DONE, Phase.ABORTED)
    scale_to(deployment, 2)


def kill_coordinator_in(deployment: ServedDeployment, phase: Phase, ranks: int) -> None:
    """Scale, with the coordinator dying when it enters `phase`; return once it has."""
    failpoint = f"scale.before_{phase}"
    deployment.arm(failpoint)
    deployment.cli("scale", str(ranks), timeout_s=120)
    deadline_s = time.monotonic() + 30
    while not deployment.fired(failpoint):
        assert time.monotonic() < deadline_s, f"{failpoint} was never reached"
        time.sleep(0.05)


def test_nothing_grows_in_etcd(deployment: ServedDeployment, tmp_path: Path) -> None:
    """After all of that, the store holds what a fresh deployment of this width holds."""
    scale_to(deployment, 2)
    status = deployment.wait_idle()
    assert status.operation is None
    keys = deployment.key_names()
    assert [k for k in keys if "/endpoints/" in k] == []
    assert len([k for k in keys if "/members/" in k]) == deployment.config.scale.max_ranks
