"""What the benchmark makes of the tokens that its clients saw."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import vllm_elastic_meter as meter
import vllm_elastic_result as result
from vllm_elastic_scores import worst_difference


def stream(
    rank: int, began_s: float, *tokens_s: float, error: str = "", waits: bool = False
) -> Any:
    return meter.Stream(rank, began_s, list(tokens_s), error, complete=not (waits or error))


def test_a_stream_that_waits_still_has_a_gap() -> None:
    """Else a group that stands still for good would look like one without any."""
    streams = [stream(0, 0, 1.0, 1.1, waits=True), stream(1, 0, 1.0, 1.2)]
    seen = meter.seen(streams, 0.5, 61.1)
    assert seen.longest_gap_s == pytest.approx(60.0)
    assert seen.longest_gap_by_rank_s == {0: pytest.approx(60.0), 1: pytest.approx(0.2)}


def test_the_longest_gap_is_that_of_one_stream() -> None:
    """Two streams that take turns hide each other's gaps from who looks at all tokens."""
    streams = [
        stream(0, 0, 1.0, 1.1, 3.1, 3.2),
        stream(1, 0, 1.0, 2.0, 2.5, 3.0),
    ]
    seen = meter.seen(streams, 1.0, 4.0)
    assert seen.longest_gap_s == pytest.approx(2.0)
    assert seen.longest_gap_at_s == pytest.approx(0.1)
    assert seen.longest_gap_by_rank_s == {0: pytest.approx(2.0), 1: pytest.approx(1.0)}
    assert seen.all_silent_s == pytest.approx(0.9)


def test_gaps_outside_of_the_window_do_not_count() -> None:
    streams = [stream(0, 0, 1.0, 9.0, 9.1, 9.2, 20.0)]
    assert meter.seen(streams, 9.05, 9.15).longest_gap_s == pytest.approx(0.1)


def test_a_gap_that_begins_before_the_window_counts() -> None:
    streams = [stream(0, 0, 1.0, 5.0)]
    assert meter.seen(streams, 4.0, 6.0).longest_gap_s == pytest.approx(4.0)


def test_requests_that_failed_are_counted_in_their_window() -> None:
    streams = [
        stream(0, 1.0, error="503 scaling"),
        stream(0, 9.0, 9.5),
        stream(1, 0.0, 0.5),
    ]
    seen = meter.seen(streams, 0.9, 5.0)
    assert (seen.requests, seen.failed, seen.errors) == (1, 1, ["503 scaling"])


def test_nothing_seen_is_no_gap() -> None:
    seen = meter.seen([], 0.0, 1.0)
    assert (seen.longest_gap_s, seen.tokens, seen.first_token_p50_s) == (0.0, 0, 0.0)


def test_the_worst_difference_of_scores() -> None:
    assert worst_difference([[-1.0, -2.0], [-3.0]], [[-1.0, -2.5], [-3.25]]) == 0.5
    assert worst_difference(None, [[-1.0]]) is None


def scaled(**values: Any) -> dict[str, Any]:
    seen = {"longest_gap_s": 0.5, "requests": 10, "failed": 1}
    return {"step": "scale", "from": 2, "to": 4, "ok": True, "total_s": 9.0, "seen": seen, **values}


def test_the_result_holds_the_worst_of_each_kind() -> None:
    steps = [
        {"step": "start", "cold_start_s": 100.0},
        scaled(),
        scaled(total_s=12.0, seen={"longest_gap_s": 0.1, "requests": 5, "failed": 2}),
        scaled(**{"from": 4, "to": 2, "ok": False}),
        {"step": "score", "max_abs_err_by_rank": {"0": 0.0, "1": 0.02, "2": None}},
    ]
    metrics = result.metrics_of(steps)
    assert metrics == {
        "cold_start_s": 100.0,
        "up_failed": 0.0,
        "up_s": 12.0,
        "gap_up_s": 0.5,
        "down_failed": 1.0,
        "down_in_vain_s": 9.0,
        "gap_down_s": 0.5,
        "requests": 25,
        "requests_failed": 4,
        "logprob_max_abs_err": 0.02,
        "ranks_without_score": 1.0,
    }


@pytest.mark.parametrize(
    ("tiers", "name"),
    [
        (["cold"], "up_cold_s"),
        (["image"], "up_image_s"),
        (["parked"], "up_parked_s"),
        (["kept"], "up_kept_s"),
        (["kept", "cold"], "up_cold_s"),
    ],
)
def test_a_result_says_how_its_joiners_came(tiers: list[str], name: str) -> None:
    joiners = [{"rank": 2 + n, "tier": tier} for n, tier in enumerate(tiers)]
    assert result.metrics_of([scaled(joiners=joiners)])[name] == 9.0


def test_an_operation_whose_joiners_make_no_token_was_quick_for_nothing() -> None:
    joiners = [{"rank": 2, "tier": "parked"}]
    found = result.metrics_of([scaled(joiners=joiners, joiner_first_token_s={"2": None})])
    assert (found["up_failed"], found["up_parked_in_vain_s"]) == (1.0, 9.0)
    assert "up_parked_s" not in found
    found = result.metrics_of([scaled(joiners=joiners, joiner_first_token_s={"2": 0.4})])
    assert (found["up_failed"], found["up_parked_s"]) == (0.0, 9.0)


def test_ranks_that_share_gpus_have_a_result_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = []
    monkeypatch.setattr(result, "write_result", lambda name, *_: named.append(name))
    for gpus in (2, 1):
        start = {"step": "start", "cold_start_s": 1.0, "setup": {"gpus": gpus, "max_ranks": 2}}
        (tmp_path / "ours").mkdir(exist_ok=True)
        (tmp_path / "ours" / "measured.json").write_text(json.dumps([start]))
        result.write(tmp_path)
    assert named == ["vllm_elastic", "vllm_elastic_shared"]


def test_both_engines_are_compared_where_their_ranks_are_alike() -> None:
    def steps(floor: int, logprob: float) -> list[dict[str, Any]]:
        return [
            {"step": "start", "cold_start_s": 1.0, "setup": {"layers": 8, "floor": floor}},
            {"step": "first score", "logprobs": [[logprob]]},
        ]

    alike = {"upstream": steps(2, -1.0), "ours": steps(2, -1.25)}
    assert result.beside_upstream(alike) == {"logprob_upstream_max_abs_err": 0.25}
    assert result.beside_upstream({"upstream": steps(2, -1.0), "ours": steps(1, -1.0)}) == {}
    assert result.beside_upstream({"ours": steps(2, -1.0)}) == {}


def test_each_fault_has_its_own_numbers() -> None:
    fault = {
        "step": "fault", "fault": "joiner-killed-ready", "acted": True, "silent_s": 0.5,
        "next_ok": True, "seen": {"failed": 0}, "tokens": {"judged": 9, "wrong": 0},
    }  # fmt: skip
    worse = fault | {"silent_s": 0.75, "next_ok": False}
    missed = fault | {"acted": False, "silent_s": 99.0}
    name = "fault_joiner_killed_ready"
    assert result.metrics_of([fault, worse, missed]) == {
        f"{name}_silent_s": 0.75,
        f"{name}_next_failed": 1.0,
        f"{name}_requests_failed": 0.0,
        f"{name}_wrong_tokens": 0.0,
        "faults": 2,
        "faults_next_failed": 1,
        "faults_wrong_tokens": 0,
    }
