"""A shell that can not take its instance out of Dynamo: others do, long before its lease ends.

Dynamo's leases last a minute, so that an outage of etcd costs no serving; who is gone must not be
visible for as long.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo_elastic.coordinator.records import Keys
from dynamo_elastic.coordinator.status import read_status
from dynamo_elastic.coordinator.store import Store
from dynamo_elastic.demo.run import demo_config, leftovers
from dynamo_elastic.testing.dynamo_cards import Card, all_cards, read_cards
from dynamo_elastic.testing.served import ServedDeployment, served
from dynamo_elastic.types import WorkerId

pytestmark = [
    pytest.mark.root,
    pytest.mark.criu,
    pytest.mark.etcd,
    pytest.mark.nixl,
    pytest.mark.dynamo,
    pytest.mark.slow,
    pytest.mark.timeout(180),
]

SHELL = WorkerId("slot1")


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedDeployment]:
    work_dir: Path = tmp_path_factory.mktemp("gone")
    config = demo_config(work_dir, "test-gone", planner={"enabled": False})
    assert config.workers.lease_ttl_s == 60
    with served(config, work_dir) as running:
        yield running
    assert leftovers(config, set()) == []


def pid(deployment: ServedDeployment) -> int:
    return deployment.status().members[SHELL].pid


def is_member(deployment: ServedDeployment) -> bool:
    in_force = deployment.status().in_force
    return in_force is None or SHELL in in_force.worker_ids


def instances(deployment: ServedDeployment) -> dict[str, Card]:
    """By id, whatever they say."""

    async def read(store: Store) -> dict[str, Card]:
        return await all_cards(store, deployment.config.namespace)

    return deployment.with_store(read)


def as_in_force(deployment: ServedDeployment) -> int:
    """How many cards there are, once they are those of the topology in force and no others."""

    async def read(store: Store) -> int:
        status = await read_status(store, Keys(deployment.config.deployment))
        return len(await read_cards(store, deployment.config.namespace, status))

    return deployment.with_store(read)


def test_the_instance_of_a_killed_shell_goes_when_its_successor_comes(
    deployment: ServedDeployment,
) -> None:
    before, shell = instances(deployment), pid(deployment)
    assert len(before) == deployment.wait_idle().width
    began_s = time.monotonic()
    os.kill(shell, signal.SIGKILL)
    while len(instances(deployment).keys() - before.keys()) < 1 or pid(deployment) == shell:
        assert time.monotonic() - began_s < 40.0
        time.sleep(0.1)
    assert as_in_force(deployment) == len(before)
    assert time.monotonic() - began_s < 45.0, "not by the end of its lease"


def test_the_instance_of_a_stopped_shell_goes_when_it_is_evicted(
    deployment: ServedDeployment,
) -> None:
    done = deployment.cli("scale", "4", timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr
    shell, began_s = pid(deployment), time.monotonic()
    os.kill(shell, signal.SIGSTOP)
    try:
        while is_member(deployment):
            assert time.monotonic() - began_s < 40.0
            time.sleep(0.1)
        assert as_in_force(deployment) == deployment.status().width
        assert time.monotonic() - began_s < 45.0, "not by the end of its lease"
    finally:
        os.kill(shell, signal.SIGCONT)
    deployment.wait_width(4, timeout_s=90.0)
    assert as_in_force(deployment) == 4
