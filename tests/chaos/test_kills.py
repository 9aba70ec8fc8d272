"""kill -9 in a real deployment under load: serving goes on, the next operation succeeds.

One deployment, one stream of clients for all of it: whatever is killed, no request may fail and
every token must equal the never-scaled answers.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from dynamo_elastic.agent.base import Tier
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
    # test_matrix.py has the same kinds of kills, and more; here is every phase.
    pytest.mark.slow,
    pytest.mark.timeout(180),
]

SLOW = pytest.mark.slow


def some_of(phases: Sequence[Phase], *always: Phase) -> list[Any]:
    """All of `phases` as parameters; but for those named the test is slow."""
    return [p if p in always else pytest.param(p, marks=SLOW) for p in phases]


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


def test_a_joiner_killed_while_it_is_restored_is_booted_cold(
    deployment: ServedDeployment, load: BackgroundLoad
) -> None:
    scale_to(deployment, 2)
    deployment.arm("slot2:engine.attached")
    scale_to(deployment, 4)
    assert deployment.fired("slot2:engine.attached")
    tiers = {slot.slot: slot.tier for slot in deployment.slots()}
    assert (tiers[2], tiers[3]) == (Tier.COLD, Tier.IMAGE)
    load.wait_for_tokens(timeout_s=20)


@pytest.mark.parametrize(
    "failpoint", [pytest.param("engine.after_open", marks=SLOW), "engine.after_connect"]
)
def test_a_joiner_killed_before_the_commit_aborts(
    deployment: ServedDeployment, load: BackgroundLoad, failpoint: str
) -> None:
    scale_to(deployment, 2)
    deployment.arm(f"slot2:{failpoint}")
    done = deployment.cli("scale", "4", timeout_s=120)
    assert deployment.fired(f"slot2:{failpoint}")
    assert Phase.ABORTED in outcomes(deployment)
    # The coordinator tries again by itself.
    assert done.returncode == 0, done.stderr
    assert width(deployment) == 4
    load.wait_for_tokens(timeout_s=20)


@pytest.mark.parametrize(
    "phase",
    some_of([Phase.STREAM, Phase.CHECK, Phase.CANARY, Phase.REBALANCE], Phase.STREAM),
)
def test_a_joiner_killed_in_a_phase(
    deployment: ServedDeployment, load: BackgroundLoad, phase: Phase
) -> None:
    scale_to(deployment, 2)
    with kill_joiner_in(deployment, phase, slot=3) as killed:
        deployment.cli("scale", "4", timeout_s=120)
    assert killed, f"no joiner was there in {phase}"
    load.wait_for_tokens(timeout_s=20)
    scale_to(deployment, 4)
    load.wait_for_tokens(timeout_s=20)


@pytest.mark.slow
def test_a_joiner_killed_at_its_first_step_is_evicted_and_replaced(
    deployment: ServedDeployment, load: BackgroundLoad
) -> None:
    """After COMMIT there is only forward: the operation is done, and the next one heals."""
    scale_to(deployment, 2)
    deployment.arm("slot3:engine.before_first_step")
    deployment.cli("scale", "4", timeout_s=120)
    assert deployment.fired("slot3:engine.before_first_step")
    load.wait_for_tokens(timeout_s=20)
    scale_to(deployment, 4)
    load.wait_for_tokens(timeout_s=20)


def outcomes(deployment: ServedDeployment) -> set[str]:
    """How the operations since the last scale-down ended."""
    ends = [e for e in deployment.timeline() if e["event"] == "end"]
    downs = [i for i, e in enumerate(ends) if e["kind"] == Kind.DOWN]
    return {e["phase"] for e in ends[downs[-1] + 1 if downs else 0 :]}


@contextmanager
def kill_joiner_in(deployment: ServedDeployment, phase: Phase, slot: int) -> Iterator[list[int]]:
    """kill -9 the engine of `slot` as soon as `phase` of an operation begins; yields its pid."""
    seen = len(deployment.timeline())
    killed: list[int] = []

    def watch() -> None:
        deadline_s = time.monotonic() + 60
        while time.monotonic() < deadline_s:
            began = {e["phase"] for e in deployment.timeline()[seen:] if e["event"] == "begin"}
            if phase in began:
                pid = next(s.pid for s in deployment.slots() if s.slot == slot)
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
                return
            time.sleep(0.003)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield killed
    finally:
        watcher.join()


@pytest.mark.parametrize("phase", some_of(phases_of(Kind.UP), Phase.COMMIT))
def test_the_coordinator_is_killed_going_up(
    deployment: ServedDeployment, load: BackgroundLoad, phase: Phase
) -> None:
    outlive_the_coordinator(deployment, load, phase, before=2, after=4)


@pytest.mark.parametrize("phase", some_of(phases_of(Kind.DOWN), Phase.COMMIT))
def test_the_coordinator_is_killed_going_down(
    deployment: ServedDeployment, load: BackgroundLoad, phase: Phase
) -> None:
    outlive_the_coordinator(deployment, load, phase, before=4, after=2)


def outlive_the_coordinator(
    deployment: ServedDeployment, load: BackgroundLoad, phase: Phase, *, before: int, after: int
) -> None:
    """Serving goes on, the operation ends either way, and the next one succeeds."""
    scale_to(deployment, before)
    kill_coordinator_in(deployment, phase, ranks=after)
    load.wait_for_tokens(timeout_s=20)
    deployment.wait_idle()
    assert last_phase(deployment) in (Phase.DONE, Phase.ABORTED)
    scale_to(deployment, after)


def kill_coordinator_in(deployment: ServedDeployment, phase: Phase, ranks: int) -> None:
    """Scale, with the coordinator dying when it enters `phase`; return once it has."""
    failpoint = f"scale.before_{phase}"
    deployment.arm(failpoint)
    deployment.cli("scale", str(ranks), timeout_s=120)
    deadline_s = time.monotonic() + 30
    while not deployment.fired(failpoint):
        assert time.monotonic() < deadline_s, f"{failpoint} was never reached"
        time.sleep(0.05)


@pytest.mark.parametrize(
    "failpoint",
    [
        pytest.param("slot2:worker.restore.begin", marks=SLOW),
        pytest.param("slot3:worker.check.end", marks=SLOW),
        "slot2:worker.serve.begin",
    ],
)
def test_a_worker_shell_is_killed(
    deployment: ServedDeployment, load: BackgroundLoad, failpoint: str
) -> None:
    """A joiner's, before COMMIT and after it: Dynamo does not know it yet, so no request fails."""
    scale_to(deployment, 2)
    deployment.arm(failpoint)
    deployment.cli("scale", "4", timeout_s=120)
    assert deployment.fired(failpoint)
    load.wait_for_tokens(timeout_s=20)
    scale_to(deployment, 4)
    load.wait_for_tokens(timeout_s=20)


def test_nothing_grows_in_etcd(deployment: ServedDeployment, load: BackgroundLoad) -> None:
    """After all of that, the store holds what a fresh deployment of this width holds."""
    scale_to(deployment, 2)
    topology = deployment.wait_idle().topology
    assert topology is not None
    keys = deployment.key_names()
    endpoints = [k for k in keys if "/endpoints/" in k]
    assert all(f"/endpoints/{topology.epoch:08d}/" in k for k in endpoints)
    assert len(endpoints) <= topology.world_size
    assert len([k for k in keys if "/members/" in k]) == deployment.config.scale.max_ranks
    assert len(keys) < 25
