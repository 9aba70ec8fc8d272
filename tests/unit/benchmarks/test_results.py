"""Every stored result is as the schema says, every benchmark is listed, and what was not measured
is shown as that."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import plots
import pytest
import questions
import report
from catalog import BENCHMARKS, HERE
from results import RESULTS, all_results, newest_results, problems
from vllm_elastic_plot import draw_ramp

POINTS: dict[str, Any] = json.loads(report.REFERENCE_POINTS.read_text())


def test_every_result_is_as_the_schema_says() -> None:
    assert problems() == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"metrics": {"up_s": "fast"}}, "'fast' is not of type"),
        ({"metrics": {}}, "should be non-empty"),
        ({"hardware": "2 GPUs"}, "is not of type 'object'"),
        ({"commit": None}, "None is not of type"),
        ({"note": "more"}, "'note' was unexpected"),
        ({"benchmark": "other"}, "is not named after"),
    ],
)
def test_a_wrong_result_is_named(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    result = newest_results()["cpu_scale"] | change
    (tmp_path / f"cpu_scale-{result['date']}.json").write_text(json.dumps(result))
    (problem,) = problems(tmp_path)
    assert said in problem


def test_every_script_that_writes_a_result_is_listed() -> None:
    listed = {b.name for b in BENCHMARKS}
    writers = {
        p.stem
        for p in HERE.glob("*.py")
        if 'if __name__ == "__main__"' in (text := p.read_text())
        and ("write_result" in text or "gpu_report" in text or "gpu_ranks" in text)
    }
    assert writers - listed == set()
    names = {r["benchmark"] for r in all_results().values()}
    assert {n for n in names if not n.startswith("spike_")} <= listed


def test_each_benchmark_says_what_it_shows() -> None:
    for benchmark in BENCHMARKS:
        assert benchmark.source.is_file(), benchmark.name
        assert len(benchmark.summary) > 40, benchmark.name


def test_what_was_not_measured_is_shown_as_that() -> None:
    for question in questions.QUESTIONS:
        rows = list(report.rows_of(question, {}, POINTS))
        assert [row[1] for row in rows[: len(question.ours)]] == [report.NOT_RUN] * len(
            question.ours
        )
    assert all(row[1] == report.NOT_RUN for row in report.inventory({}))


def test_ours_is_never_mixed_with_what_others_published() -> None:
    for question in questions.QUESTIONS:
        for what, number, _, source in report.rows_of(question, newest_results(), POINTS):
            ours = what.startswith("**ours**")
            published = number.endswith("(published)")
            assert ours + published + (source == "measured before (a)") == 1
            assert source


def test_points_of_others_have_unit_hardware_and_source() -> None:
    for point in POINTS["published"]:
        assert {"id", "system", "what", "value", "unit", "hardware", "source"} == set(point)


def test_the_command_knows_its_benchmarks() -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(HERE), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    assert run("validate").stdout == f"{len(list(RESULTS.glob('*.json')))} results, 0 problems\n"
    wrong = run("run", "nothing")
    assert wrong.returncode == 2
    assert "there is no benchmark 'nothing'; there are cpu_scale" in wrong.stderr


def test_a_ramp_is_drawn_once_it_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "PLOTS", tmp_path)
    ramp = {
        "step": "ramp", "mode": "scaled", "trace_s": 60.0, "window_s": 15.0,
        "change": {"until_s": 34.0}, "p95_s": [[15.0, 0.1], [20.0, 0.2]],
    }  # fmt: skip
    empty = ramp | {"mode": "small", "p95_s": []}
    result = {"detail": {"about": "a run", "upstream": [{"step": "start"}], "ours": [ramp, empty]}}
    assert draw_ramp(result) == ["vllm_elastic_ramp"]
    drawn = (tmp_path / "vllm_elastic_ramp.svg").read_text()
    assert "scaled up in the middle" in drawn
    assert "small group" not in drawn
    assert draw_ramp({}) == []
