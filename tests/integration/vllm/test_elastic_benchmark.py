"""The benchmark of elastic expert parallelism: what its clients see, and what it makes of it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
BENCHMARK = ROOT / "benchmarks" / "vllm_elastic.py"
STANDIN = Path(__file__).parent / "standin"


def free_ports(count: int) -> int:
    """The first of `count` neighbours that are free now."""
    for port in range(21300, 32000, count):
        try:
            for number in range(port, port + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", number))
        except OSError:
            continue
        return port
    raise AssertionError("no free ports")


def measure(work: Path, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": f"{STANDIN}:{ROOT}"}
    words = [sys.executable, str(BENCHMARK), command, "--run-id", "t", "--work", str(work)]
    return subprocess.run(
        [*words, "--gpus", "2", "--layers", "1", "--clients", "1", "--tokens", "16", *arguments],
        env=env, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip


def steps_of(work: Path, engine: str) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = json.loads((work / "t" / engine / "measured.json").read_text())
    return steps


@pytest.mark.timeout(200)
@pytest.mark.parametrize("engine", ["upstream", "ours"])
def test_a_run_measures_both_ways_and_leaves_nobody(tmp_path: Path, engine: str) -> None:
    port = str(free_ports(4))
    done = measure(tmp_path, "run", "--engine", engine, "--widths", "2,3,2", "--port", port)
    assert done.returncode == 0, done.stderr
    up, down = [step for step in steps_of(tmp_path, engine) if step["step"] == "scale"]
    assert (up["ok"], up["from"], up["to"]) == (True, 2, 3)
    assert up["total_s"] >= 0.2
    assert 0.15 < up["seen"]["longest_gap_s"] < 2
    assert up["before"]["longest_gap_s"] < up["seen"]["longest_gap_s"]
    assert up["joiner_first_token_s"]["2"] > 0
    assert up["seen"]["failed"] == 0
    assert (down["ok"], down["to"]) == (True, 2)
    scores = [step for step in steps_of(tmp_path, engine) if step["step"] == "score"]
    assert scores[1]["max_abs_err_by_rank"] == {"0": 0.0, "1": 0.0, "2": 0.0}
    group = json.loads((tmp_path / "t" / engine / "group.json").read_text())
    assert group["pids"] == {}


@pytest.mark.timeout(200)
def test_a_rank_that_left_comes_back(tmp_path: Path) -> None:
    port = str(free_ports(4))
    kept = ["--leavers", "kept", "--serve-s", "0.3", "--some-flag-of-vllm", "3"]
    done = measure(tmp_path, "run", "--engine", "ours", "--widths", "2,1,2", "--port", port, *kept)
    assert done.returncode == 0, done.stderr
    steps = steps_of(tmp_path, "ours")
    down, up = [step for step in steps if step["step"] == "scale"]
    assert (down["ok"], down["to"], up["ok"], up["to"]) == (True, 1, True, 2)
    (left,) = [step for step in steps if step["step"] == "left"]
    assert left["ranks"] == {"1": {"workers": [{"ep_size": 0}]}}
    (joiner,) = up["joiners"]
    assert (joiner["status"], joiner["attach"]) == (200, {"handshake": 0.01})
    assert up["joiner_first_token_s"]["1"] > 0
    group = json.loads((tmp_path / "t" / "ours" / "group.json").read_text())
    assert group["setup"]["flags"] == ["--some-flag-of-vllm", "3"]
    assert group["setup"]["floor"] == 1


@pytest.mark.root
@pytest.mark.criu
@pytest.mark.timeout(300)
def test_joiners_come_from_an_image_beside_a_group_that_serves(tmp_path: Path) -> None:
    port = str(free_ports(4))
    imaged = ["--leavers", "image", "--serve-s", "0.3", "--port", port]
    done = measure(tmp_path, "run", "--engine", "ours", "--widths", "2,1,2,1,2", *imaged)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    steps = steps_of(tmp_path, "ours")
    first, again = [step for step in steps if step["step"] == "image"]
    assert first["image_bytes"] > 1 << 20
    assert first["strict_findings"] == []
    assert first["engine"]["probe"] == list(range(8))
    assert again == {"step": "image", "rank": 1, "image_id": first["image_id"]}
    ups = [step for step in steps if step["step"] == "scale" and step["to"] == 2]
    for (joiner,) in (up["joiners"] for up in ups):
        assert joiner["status"] == 200
        assert joiner["restore"]["image_id"] == first["image_id"]
        assert joiner["restore"]["parts"]["restore"] > 0
    assert len(ups) == 2
    assert all(up["ok"] and up["seen"]["failed"] == 0 for up in ups)


@pytest.mark.timeout(400)
def test_commands_go_on_where_the_last_one_ended(tmp_path: Path) -> None:
    port = str(free_ports(4))
    try:
        assert measure(tmp_path, "start", "--widths", "2", "--port", port).returncode == 0
        refused = measure(tmp_path, "scale", "--widths", "4")
        assert "did not scale" in refused.stderr
        assert measure(tmp_path, "scale", "--widths", "3").returncode == 0
    finally:
        measure(tmp_path, "stop")
    failed, scaled = [s for s in steps_of(tmp_path, "upstream") if s["step"] == "scale"]
    assert not failed["ok"]
    assert failed["ranks"][0]["status"] == 500
    assert scaled["ok"]


def test_a_width_that_vllm_does_not_start_is_refused(tmp_path: Path) -> None:
    refused = measure(tmp_path, "run", "--widths", "1,2")
    assert refused.returncode == 2
    assert "below 2 ranks" in refused.stderr
