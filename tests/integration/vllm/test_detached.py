"""A rank of vLLM 0.33 boots without a group: it generates, and holds what an image may hold."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm_elastic, pytest.mark.slow, pytest.mark.timeout(500)]

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PYTHON = ROOT / ".venv-vllm-elastic" / "bin" / "python"
NOBODY_LISTENS = 29553
"""Where rank 0 would be, if it were asked for anything before there is a group."""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All words of one life of it."""
    folder = tmp_path_factory.mktemp("detached")
    environment = os.environ | {
        "DYNAMO_ELASTIC_VLLM_DETACHED": "1",
        "DYNAMO_ELASTIC_VLLM_PARK_LEAVERS": "1",
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
    arguments = [HERE / "detached_engine.py", folder / "model", str(NOBODY_LISTENS)]
    done = subprocess.run(
        [PYTHON, *arguments], env=environment, capture_output=True, text=True, timeout=280,
        check=False,
    )  # fmt: skip
    (folder / "log").write_text(done.stderr)
    assert done.returncode == 0, done.stderr[-3000:]
    words: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            words |= json.loads(line)
    return words


def test_it_generates_with_nobody_else_there(said: dict[str, Any]) -> None:
    assert len(said["tokens"]) == 4


def test_it_moves_no_experts_and_says_so(said: dict[str, Any]) -> None:
    assert said["detached"] == {"communicators": ["NoMoves"]}


def test_no_process_of_it_holds_what_an_image_can_not(said: dict[str, Any]) -> None:
    assert len(said["held"]) >= 3  # API process, engine core, worker
    kinds = {kind for held in said["held"].values() for kind in held}
    assert not {kind for kind in kinds if "io_uring" in kind or "infiniband" in kind}
    sockets = {kind for kind in kinds if kind.startswith("socket")}
    assert sockets <= {"socket unix"}
