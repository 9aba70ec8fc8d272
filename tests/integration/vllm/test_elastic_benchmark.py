"""The benchmark of elastic expert parallelism: what its clients see, and what it makes of it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

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


slow = pytest.mark.slow
HASTE = ("--settle-s", "0.3", "--serve-s", "0.3", "--watch-s", "0.7", "--fault-after-s", "0.1")


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Path]:
    """Nobody is left of what was started in it, however its test ends."""
    yield tmp_path
    for path in tmp_path.glob("t/*/group.json"):
        for pid in json.loads(path.read_text())["pids"].values():
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def measure(work: Path, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": f"{STANDIN}:{ROOT}"}
    words = [sys.executable, str(BENCHMARK), command, "--run-id", "t", "--work", str(work)]
    return subprocess.run(
        [*words, "--gpus", "2", "--layers", "1", "--clients", "1", "--tokens", "16", *arguments],
        env=env, capture_output=True, text=True, timeout=170, check=False,
    )  # fmt: skip


def steps_of(work: Path, engine: str) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = json.loads((work / "t" / engine / "measured.json").read_text())
    return steps


@slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("engine", ["upstream", "ours"])
def test_a_run_measures_both_ways_and_leaves_nobody(work: Path, engine: str) -> None:
    port = str(free_ports(4))
    done = measure(work, "run", "--engine", engine, "--widths", "2,3,2", "--port", port)
    assert done.returncode == 0, done.stderr
    up, down = [step for step in steps_of(work, engine) if step["step"] == "scale"]
    assert (up["ok"], up["from"], up["to"]) == (True, 2, 3)
    assert up["total_s"] >= 0.2
    assert 0.15 < up["seen"]["longest_gap_s"] < 2
    assert up["before"]["longest_gap_s"] < up["seen"]["longest_gap_s"]
    assert up["joiner_first_token_s"]["2"] > 0
    assert up["seen"]["failed"] == 0
    assert (down["ok"], down["to"]) == (True, 2)
    scores = [step for step in steps_of(work, engine) if step["step"] == "score"]
    assert scores[1]["max_abs_err_by_rank"] == {"0": 0.0, "1": 0.0, "2": 0.0}
    group = json.loads((work / "t" / engine / "group.json").read_text())
    assert group["pids"] == {}


@slow
@pytest.mark.timeout(200)
def test_a_rank_that_left_comes_back(work: Path) -> None:
    port = str(free_ports(4))
    kept = ["--leavers", "kept", "--serve-s", "0.3", "--some-flag-of-vllm", "3"]
    done = measure(work, "run", "--engine", "ours", "--widths", "2,1,2", "--port", port, *kept)
    assert done.returncode == 0, done.stderr
    steps = steps_of(work, "ours")
    down, up = [step for step in steps if step["step"] == "scale"]
    assert (down["ok"], down["to"], up["ok"], up["to"]) == (True, 1, True, 2)
    (left,) = [step for step in steps if step["step"] == "left"]
    assert left["ranks"] == {"1": {"workers": [{"ep_size": 0}]}}
    (joiner,) = up["joiners"]
    assert (joiner["tier"], joiner["status"], joiner["attach"]["handshake"]) == ("kept", 200, 0.05)
    assert up["joiner_first_token_s"]["1"] > 0
    group = json.loads((work / "t" / "ours" / "group.json").read_text())
    assert group["setup"]["flags"] == ["--some-flag-of-vllm", "3"]
    assert group["setup"]["floor"] == 1


@pytest.mark.root
@pytest.mark.criu
@pytest.mark.timeout(300)
def test_joiners_come_from_an_image_beside_a_group_that_serves(work: Path) -> None:
    port = str(free_ports(4))
    imaged = ["--leavers", "image", "--port", port, *HASTE]
    done = measure(work, "run", "--engine", "ours", "--widths", "2,1,2,1,2", *imaged)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    steps = steps_of(work, "ours")
    (image,) = [step for step in steps if step["step"] == "image"]
    assert image["image_bytes"] > 1 << 20
    assert image["strict_findings"] == []
    assert image["engine"]["probe"] == list(range(8))
    ups = [step for step in steps if step["step"] == "scale" and step["to"] == 2]
    for (joiner,) in (up["joiners"] for up in ups):
        assert (joiner["tier"], joiner["status"]) == ("image", 200)
        assert joiner["restore"]["image_id"] == image["image_id"]
        assert joiner["restore"]["parts"]["restore"] > 0
    assert len(ups) == 2
    assert all(up["ok"] and up["seen"]["failed"] == 0 for up in ups)


@slow
@pytest.mark.root
@pytest.mark.criu
@pytest.mark.timeout(200)
def test_one_rank_alone_lives_twice_from_its_image(work: Path) -> None:
    script = BENCHMARK.with_name("vllm_elastic_alone.py")
    words = ["run", "--run-id", "t", "--work", str(work), "--layers", "1", "--keep-weights"]
    done = subprocess.run(
        [sys.executable, str(script), *words],
        env=os.environ | {"PYTHONPATH": f"{STANDIN}:{ROOT}"},
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert [step["step"] for step in said] == ["image", *["life"] * 4], done.stderr[-3000:]
    assert [life["after"] for life in said[1:]] == ["its image", "parking"] * 2
    assert all(life["same_tokens"] and "failed" not in life for life in said[1:])
    assert [life["logprobs_apart"] for life in said[1:]] == [0.0] * 4
    assert said[1]["rehearsed"] == {"called": "elastic_ep_execute"}
    assert said[0]["engine"]["probe"] == list(range(8))


@slow
@pytest.mark.timeout(400)
def test_commands_go_on_where_the_last_one_ended(work: Path) -> None:
    port = str(free_ports(4))
    try:
        started = measure(work, "start", "--widths", "2", "--max-ranks", "3", "--port", port)
        assert started.returncode == 0
        refused = measure(work, "scale", "--widths", "4")
        assert "did not scale" in refused.stderr
        waited_in_vain = json.loads((work / "t" / "upstream" / "group.json").read_text())["pids"][
            "2"
        ]
        assert measure(work, "scale", "--widths", "3").returncode == 0
        assert not Path(f"/proc/{waited_in_vain}").exists()
    finally:
        measure(work, "stop")
    failed, scaled = [s for s in steps_of(work, "upstream") if s["step"] == "scale"]
    assert not failed["ok"]
    assert failed["ranks"][0]["status"] == 400
    assert scaled["ok"]


@slow
def test_a_width_that_vllm_does_not_start_is_refused(work: Path) -> None:
    refused = measure(work, "run", "--widths", "1,2")
    assert refused.returncode == 2
    assert "below 2 ranks" in refused.stderr


def left_nobody(work: Path, engine: str) -> bool:
    group = json.loads((work / "t" / engine / "group.json").read_text())
    return bool(group["pids"] == {})


@pytest.mark.timeout(200)
def test_rounds_go_on_where_the_last_command_ended(work: Path) -> None:
    words = ["--engine", "ours", "--widths", "2,3", "--leavers", "kept", "--prompts", "8"]
    words += ["--port", str(free_ports(4)), *HASTE]
    assert measure(work, "rounds", *words, "--rounds", "1", "--keep").returncode == 0
    done = measure(work, "rounds", *words, "--rounds", "3")
    assert done.returncode == 0, done.stderr
    steps = steps_of(work, "ours")
    rounds = [step for step in steps if step["step"] == "round"]
    assert [step["turn"] for step in rounds] == [0, 1, 2]
    assert all(step["ok"] for step in rounds)
    assert set(rounds[-1]["usage"]) == {"0", "1", "2"}
    assert rounds[-1]["usage"]["2"]["descriptors"] > 3
    scored = [step for step in steps if step["step"] == "prompts"]
    assert next(step["when"] for step in scored) == "before"
    assert {step["token_max_abs_err"] for step in scored} == {0.0}
    assert {step["missing"] for step in scored} == {0}
    assert len([step for step in steps if step["step"] == "start"]) == 1
    assert left_nobody(work, "ours")


@pytest.mark.timeout(200)
def test_ours_goes_on_after_a_fault(work: Path) -> None:
    words = ["--engine", "ours", "--widths", "2,3", "--leavers", "kept", *HASTE]
    words += ["--fault", "joiner-killed-in-stream", "--fault", "joiner-stopped-in-stream"]
    words += ["--joiner-timeout-s", "1.5", "--port", str(free_ports(4))]
    done = measure(work, "faults", *words)
    assert done.returncode == 0, done.stderr
    faults = [step for step in steps_of(work, "ours") if step["step"] == "fault"]
    assert [step["acted"] for step in faults] == [True, True]
    for step in faults:
        assert not step["operations"][0]["ok"]
        assert step["silent_s"] < 1
        assert step["next_ok"]
        assert step["tokens"]["judged"] > 0
        assert step["tokens"]["wrong"] == 0
    assert left_nobody(work, "ours")


@slow
@pytest.mark.timeout(200)
def test_faults_one_after_the_other_with_who_is_there(work: Path) -> None:
    words = ["--engine", "ours", "--widths", "3,4", "--leavers", "kept", "--lower", *HASTE]
    words += ["--fault", "joiner-killed-restored", "--fault", "joiner-killed-ready"]
    done = measure(work, "faults", *words, "--port", str(free_ports(5)))
    assert done.returncode == 0, done.stderr
    faults = [step for step in steps_of(work, "ours") if step["step"] == "fault"]
    assert [(step["width"], step["acted"], step["next_ok"]) for step in faults] == [
        (3, True, True), (2, True, True),
    ]  # fmt: skip
    assert [[n["to"] for n in step["next"]] for step in faults] == [[2, 3], [1, 2]]
    tiers = [n["joiners"][0]["tier"] for step in faults for n in step["next"] if n["joiners"]]
    assert tiers == ["kept", "kept"]
    assert left_nobody(work, "ours")


@slow
@pytest.mark.timeout(200)
def test_upstream_does_not(work: Path) -> None:
    words = ["--engine", "upstream", "--widths", "2,3", "--fault", "joiner-killed-in-cold-start"]
    done = measure(work, "faults", *words, *HASTE, "--port", str(free_ports(4)))
    assert done.returncode == 0, done.stderr
    (step,) = [step for step in steps_of(work, "upstream") if step["step"] == "fault"]
    assert step["acted"]
    assert "unanswered_after_s" in step["operations"][0]
    assert not step["next_ok"]
    assert "already active" in step["next"][0]["ranks"][0]["said"]
    assert left_nobody(work, "upstream")


@slow
@pytest.mark.timeout(200)
def test_one_trace_for_every_mode(work: Path) -> None:
    words = ["--engine", "ours", "--widths", "2,3", "--leavers", "kept", "--trace-s", "4"]
    words += ["--rate", "10", *HASTE, "--port", str(free_ports(4))]
    modes = [word for mode in ("scaled", "restarted") for word in ("--mode", mode)]
    done = measure(work, "ramp", *words, *modes)
    assert done.returncode == 0, done.stderr
    scaled, restarted = [s for s in steps_of(work, "ours") if s["step"] == "ramp"]
    assert scaled["requests"] == restarted["requests"]
    assert scaled["change"]["ok"]
    assert scaled["failed"] == 0
    assert scaled["p95_all_s"] < 2
    assert restarted["failed"] > 0
    assert max(p95 for _, p95 in restarted["p95_s"]) == 30.0
    assert left_nobody(work, "ours")


@slow
@pytest.mark.timeout(200)
def test_a_command_ends_at_its_deadline_and_leaves_nobody(work: Path) -> None:
    words = ["--engine", "ours", "--widths", "2,3", "--port", str(free_ports(4))]
    done = measure(work, "rounds", *words, "--deadline-s", "3")
    assert "was not done in 3 s" in done.stderr
    assert left_nobody(work, "ours")
