"""A rank of vLLM 0.33 boots without a group: it generates, and holds what an image may hold."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dynamo_elastic.testing.vllm_ranks import PYTHON, ROOT, Group, Ranks, start_ranks

pytestmark = [pytest.mark.vllm_elastic, pytest.mark.slow, pytest.mark.timeout(500)]

HERE = Path(__file__).parent
BOOT_TIMEOUT_S = 200.0


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All words of one life of it: it boots, lets go, and joins two ranks that serve."""
    folder = tmp_path_factory.mktemp("detached")
    ranks = start_ranks(HERE / "elastic_ranks.py", folder / "ranks")
    try:
        group = Group(ranks)
        words = live(folder, group)
        group.lose(0, 1)
    finally:
        ranks.finish()
    return words


def live(folder: Path, group: Group) -> dict[str, Any]:
    environment = os.environ | {
        "DYNAMO_ELASTIC_VLLM_COMMIT_TIMEOUT_S": "5",
        "DYNAMO_ELASTIC_VLLM_DETACHED": "1",
        "DYNAMO_ELASTIC_VLLM_PARK_LEAVERS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{HERE}:{ROOT}",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ELASTIC_EP_SCALE_UP_LAUNCH": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_RPC_BASE_PATH": str(folder),
    }
    model = ["-m", "dynamo_elastic.engine.vllm.make_model", str(folder / "model")]
    subprocess.run([PYTHON, *model], env=environment, check=True, timeout=200)
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [PYTHON, HERE / "detached_engine.py", folder / "model", str(group.rpc_port)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            text=True, env=environment, start_new_session=True,
        )  # fmt: skip
    engine = Ranks(process)
    words: dict[str, Any] = {}
    try:
        for word in ("tokens", "detached", "held"):
            words |= engine.hear(lambda said, w=word: w in said, BOOT_TIMEOUT_S)  # type: ignore[misc]
        engine.say("attach")
        words["scaled"] = group.scale(3, (0, 1))
        for word in ("attached", "tokens_in_group", "joined"):
            words |= engine.hear(lambda said, w=word: w in said)  # type: ignore[misc]
    except AssertionError as exc:
        exc.add_note((folder / "log").read_text()[-4000:])
        raise
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        engine.finish()
    return words


def test_it_generates_with_nobody_else_there(said: dict[str, Any]) -> None:
    assert len(said["tokens"]) == 4


def test_it_joins_a_group_that_serves_and_serves_with_it(said: dict[str, Any]) -> None:
    assert [(a["error"], a["width"]) for a in said["scaled"]] == [("", 3)] * 2
    joined = said["joined"]
    assert joined["size"] == 3
    assert joined["mapping"] == [[0, 1, 2, 3]] * 2
    assert joined["scales"] == 10
    assert joined["dense"]
    assert said["tokens_in_group"] == said["tokens"]


def test_it_moves_no_experts_and_says_so(said: dict[str, Any]) -> None:
    assert said["detached"] == {"communicators": ["NoMoves"]}


def test_no_process_of_it_holds_what_an_image_can_not(said: dict[str, Any]) -> None:
    assert len(said["held"]) >= 3  # API process, engine core, worker
    kinds = {kind for held in said["held"].values() for kind in held}
    assert not {kind for kind in kinds if "io_uring" in kind or "infiniband" in kind}
    sockets = {kind for kind in kinds if kind.startswith("socket")}
    assert sockets <= {"socket unix"}
