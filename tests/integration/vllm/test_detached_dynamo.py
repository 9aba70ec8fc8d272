"""A rank under Dynamo's own worker comes from an image, and Dynamo hears of it only then."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo_elastic.dynamo.vllm_registrar import REGISTER, UNREGISTER
from dynamo_elastic.engine.base import SOCKET_FILE
from dynamo_elastic.ipc import RpcClient, wait_for_socket
from dynamo_elastic.snapshot.catalog import Catalog
from dynamo_elastic.snapshot.criu import Criu
from dynamo_elastic.snapshot.namespace import temporary_namespace
from dynamo_elastic.testing.detached_ranks import (
    CONTROL_DIR,
    RANK,
    dynamo_argv,
    rank_environment,
)
from dynamo_elastic.testing.etcd_process import EtcdProcess
from dynamo_elastic.testing.rank_images import LOG, RankImages, attach

pytestmark = [
    pytest.mark.vllm_elastic,
    pytest.mark.slow,
    pytest.mark.root,
    pytest.mark.criu,
    pytest.mark.etcd,
    pytest.mark.timeout(1500),
]

BOOT_TIMEOUT_S = 900.0
LOOPBACK = "127.0.0.1"


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdProcess]:
    process = EtcdProcess(tmp_path / "etcd")
    process.start()
    yield process
    process.kill()


async def registered(socket_path: Path, log: Path) -> list[int]:
    """Ids of the instance, each time that its shell registers it."""
    await wait_for_socket(socket_path, timeout_s=60)
    rpc = RpcClient(socket_path)
    found = []
    try:
        for _ in range(2):
            data = {"runtime_data": {"rank": "of a test"}}
            found.append(int(await rpc.call(REGISTER, data, timeout_s=60)))
            await rpc.call(UNREGISTER, {}, timeout_s=60)
    except Exception as exc:
        exc.add_note(log.read_text()[-6000:] if log.exists() else "no log")
        raise
    finally:
        await rpc.close()
    return found


def test_dynamo_hears_of_a_rank_from_an_image_when_its_shell_says_so(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, etcd: EtcdProcess
) -> None:
    folder = tmp_path_factory.mktemp("dynamo")
    control_dir, directory = folder / CONTROL_DIR, tmp_path / "life"
    environment = rank_environment(folder)
    images = RankImages(Catalog(folder / "images"), Criu.find())
    manifest = images.take(
        RANK, control_dir, dynamo_argv(folder), environment, boot_timeout_s=BOOT_TIMEOUT_S
    )
    assert len(manifest.engine["probe"]) == 8
    directory.mkdir()
    with temporary_namespace({control_dir: directory}) as namespace:
        images.restore(manifest, namespace)
        attach(
            directory,
            control_dir,
            {
                "DYN_DISCOVERY_BACKEND": "etcd",
                "DYN_EVENT_PLANE": "zmq",
                "DYN_EVENT_PLANE_HOST": LOOPBACK,
                "DYN_NAMESPACE": "test",
                "DYN_REQUEST_PLANE": "tcp",
                "DYN_SELF_HOST_METADATA": "0",
                "DYN_SYSTEM_HOST": LOOPBACK,
                "DYN_TCP_RESPONSE_STREAM_HOST": LOOPBACK,
                "DYN_TCP_RPC_HOST": LOOPBACK,
                "ETCD_ENDPOINTS": etcd.url,
                "GLOO_SOCKET_IFNAME": "lo",
            },
        )
        first, again = asyncio.run(registered(directory / SOCKET_FILE, directory / LOG))
    assert first == again > 0
    assert os.path.exists(directory / LOG)
