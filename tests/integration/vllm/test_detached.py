"""A rank of vLLM 0.33 that boots without a group goes into an image with its whole process tree,
and comes back from it, more than once, into groups that serve."""

from __future__ import annotations

import json
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest

from dynamo_elastic.snapshot.catalog import Catalog
from dynamo_elastic.snapshot.criu import Criu
from dynamo_elastic.snapshot.manifest import Manifest
from dynamo_elastic.snapshot.namespace import PidNamespace, temporary_namespace
from dynamo_elastic.snapshot.process import identify, tree_of
from dynamo_elastic.testing.detached_ranks import (
    CONTROL_DIR,
    RANK,
    rank_environment,
    server_argv,
)
from dynamo_elastic.testing.etcd_process import free_port
from dynamo_elastic.testing.rank_images import LOG, RankImages, attach
from dynamo_elastic.testing.vllm_ranks import Group, Ranks

pytestmark = [
    pytest.mark.vllm_elastic,
    pytest.mark.slow,
    pytest.mark.root,
    pytest.mark.criu,
    pytest.mark.timeout(1000),
]

BOOT_TIMEOUT_S = 600.0
SERVE_TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> RankImages:
    return RankImages(Catalog(tmp_path_factory.mktemp("images")), Criu.find())


@pytest.fixture(scope="module")
def manifest(images: RankImages, tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    folder = tmp_path_factory.mktemp("rank")
    environment = rank_environment(folder)
    return images.take(
        RANK,
        folder / CONTROL_DIR,
        server_argv(folder),
        environment,
        boot_timeout_s=BOOT_TIMEOUT_S,
    )


class Life:
    """One life of the rank, from its image on."""

    def __init__(self, images: RankImages, manifest: Manifest, directory: Path) -> None:
        self._control_dir = Path(manifest.fingerprint.control_dir)
        self._directory = directory
        self._port = free_port()
        directory.mkdir()
        self._stack = ExitStack()
        namespace: PidNamespace = self._stack.enter_context(
            temporary_namespace({self._control_dir: directory})
        )
        self.process = images.restore(manifest, namespace).process

    def __enter__(self) -> Life:
        return self

    def __exit__(self, *error: Any) -> None:
        if error[1] is not None:
            log = self._directory / LOG
            error[1].add_note(log.read_text()[-6000:] if log.exists() else "no log")
        self._stack.close()

    def wake(self, **environment: str) -> None:
        """It has an identity, and listens for HTTP."""
        own = {
            "DYNAMO_ELASTIC_VLLM_HTTP_PORT": str(self._port),
            "DYNAMO_ELASTIC_VLLM_COMMIT_TIMEOUT_S": "5",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        attach(self._directory, self._control_dir, own | environment)
        deadline_s = time.monotonic() + SERVE_TIMEOUT_S
        while True:
            try:
                self._open("/health", None)
                return
            except URLError:
                assert time.monotonic() < deadline_s, "it does not listen"
                assert identify(self.process.pid) == self.process, "it has ended"
                time.sleep(0.05)

    def post(self, path: str, body: Any) -> Any:
        return self._open(path, json.dumps(body).encode())

    def _open(self, path: str, body: bytes | None) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}", data=body,
            headers={"Content-Type": "application/json"},
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=SERVE_TIMEOUT_S) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def tokens(self) -> list[int]:
        body = {
            "model": "m", "prompt": list(range(3, 11)), "max_tokens": 8, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        found: list[int] = self.post("/v1/completions", body)["choices"][0]["token_ids"]
        return found


def test_it_says_what_it_has_let_go_of(manifest: Manifest) -> None:
    said = manifest.engine
    assert said["left"] == {"communicators": ["NoMoves"]}
    assert said["cuda"] == {"multicast": 0, "ipc_imports": 0, "managed_bytes": 0}
    assert len(said["probe"]) == 8
    assert manifest.gpu.processes == 0


def test_it_joins_a_group_from_its_image_and_another_one_from_the_same(
    images: RankImages, manifest: Manifest, ranks: Ranks, tmp_path: Path
) -> None:
    for number in range(2):
        group = Group(ranks)
        with Life(images, manifest, tmp_path / str(number)) as life:
            assert len(tree_of(life.process.pid)) >= 3  # API process, engine core, worker
            life.wake()
            group.tell_scale(3, (0, 1))
            place = {"data_parallel_rank": 2, "data_parallel_rpc_port": group.rpc_port}
            parts_s = life.post("/elastic_ep/attach", place)
            assert {"handshake", "engines", "worker", "weights"} <= set(parts_s)
            answers = group.hear_scale((0, 1))
            assert [(a["error"], a["width"]) for a in answers] == [("", 3)] * 2
            (joined,) = life.post("/elastic_ep/facts", {})["workers"]
            assert (joined["rank"], joined["size"]) == (2, 3)
            assert joined["mapping"] == [[0, 1, 2, 3]] * 2
            assert joined["scales"] == 10
            assert life.tokens() == manifest.engine["probe"]
        group.lose(0, 1)
