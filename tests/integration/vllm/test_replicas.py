"""Real vLLM under Dynamo's worker: images, restored copies beside each other, scaled under load."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from dynamo_elastic.agent.base import Tier
from dynamo_elastic.agent.records import ENGINE_LOG
from dynamo_elastic.coordinator.status import read_status
from dynamo_elastic.demo.load import Load, reference_texts, summarize
from dynamo_elastic.demo.run import leftovers, restored_from
from dynamo_elastic.demo.vllm import CLIENTS, short_prompts, vllm_config
from dynamo_elastic.serve.deployment import Deployment, running
from dynamo_elastic.snapshot.process import tree_of
from dynamo_elastic.snapshot.sockets import socket_names
from dynamo_elastic.testing.cycles import scale_to

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.root,
    pytest.mark.criu,
    pytest.mark.etcd,
    pytest.mark.dynamo,
    pytest.mark.timeout(900),
]


@pytest.fixture
def work_dir(tmp_path: Path) -> Iterator[Path]:
    before = _shared_memory()
    yield tmp_path
    assert not _shared_memory() - before, "shared memory was left behind"


def _shared_memory() -> set[Path]:
    return set(Path("/dev/shm").glob("psm_*"))


def listening(pid: int) -> set[str]:
    """Addresses on which a process tree listens for TCP."""
    names = socket_names(pid)
    found = set()
    for member in tree_of(pid):
        for descriptor in Path(f"/proc/{member}/fd").iterdir():
            inode = descriptor.readlink().name.removeprefix("socket:").strip("[]")
            name = names.get(inode, "")
            if name.startswith("a listening TCP socket "):
                found.add(name.rpartition(" ")[2])
    return found


async def instances(deployment: Deployment) -> set[int]:
    """Ids of the instances of the workers' endpoint, as Dynamo keeps them in etcd."""
    prefix = f"v1/instances/{deployment.config.namespace}/backend/generate/"
    stored = await deployment.store.get_prefix(prefix)
    return {int(v.key.rpartition("/")[2], 16) for v in stored}


async def fpm_worker_id(port: int) -> int:
    """Whose forward-pass metrics are published there: what Dynamo's planner knows a worker by."""
    from dynamo.common.forward_pass_metrics import decode

    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.subscribe(b"")
        subscriber.connect(f"tcp://127.0.0.1:{port}")
        async with asyncio.timeout(10):
            _, _, payload = await subscriber.recv_multipart()
    metrics = decode(payload)
    assert metrics is not None
    return int(metrics.worker_id)


def fpm_port(deployment: Deployment, slot: int) -> int:
    """Where a slot's engine publishes forward-pass metrics, from its own log."""
    log = (deployment.config.control_dir(slot) / ENGINE_LOG).read_text()
    ports = re.findall(r"publishes on \{'fpm_port': (\d+)", log)
    relays = re.findall(r"FPM relay for dp_rank=0 subscribing to tcp://127.0.0.1:(\d+)", log)
    assert ports[-1:] == relays[-1:], "the relay listens to the publisher of its own engine"
    return int(ports[-1])


async def scale_up_and_down(work_dir: Path) -> None:
    config = vllm_config(work_dir, "test-vllm", replicas=2, planner=False)
    async with running(config, print) as deployment:
        load = Load(deployment.url, config.model.name, short_prompts(), CLIENTS)
        load.start()
        await load.wait_for_each_prompt(timeout_s=120)
        reference = reference_texts(load.results)
        up = await scale_to(deployment, 2)
        assert restored_from(up) == {Tier.IMAGE}
        assert len(await instances(deployment)) == 2

        slots = await deployment.agent.slots()
        ports = [listening(slot.pid) for slot in slots]
        assert all(ports)
        assert not ports[0] & ports[1], "copies beside each other listen on the same address"
        fpm = [fpm_port(deployment, slot.slot) for slot in slots]
        assert {await fpm_worker_id(port) for port in fpm} == await instances(deployment)

        await asyncio.sleep(3)
        await scale_to(deployment, 1)
        assert len(await instances(deployment)) == 1
        await asyncio.sleep(1)
        await load.stop()
        status = await read_status(deployment.store, deployment.keys)
        assert status.topology is not None
        assert status.topology.world_size == 1
        summary = summarize(load.results, reference)
        assert (summary.requests_failed, summary.errors) == (0, ())
        assert summary.tokens_equal
        assert summary.requests_total > 20
        pids = set(deployment.supervisor.pids.values())
    assert leftovers(config, pids) == []
    shutil.rmtree(config.state_dir)


def test_replicas_from_images_serve_beside_each_other(work_dir: Path) -> None:
    asyncio.run(scale_up_and_down(work_dir))
