"""What grows, what is silent, what differs, what moved: the parts that judge a run."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import asdict
from typing import Any

import pytest
import vllm_elastic_meter as meter
from vllm_elastic_faults import stream_after_s
from vllm_elastic_park import parked_report
from vllm_elastic_rounds import rounds_metrics
from vllm_elastic_scores import compared, prompts, scored, wrong_tokens
from vllm_elastic_usage import growth, growths, usage

from dynamo_elastic.snapshot.park import ParkedReport
from dynamo_elastic.snapshot.process import ProcessRef


def test_what_a_process_holds_is_read() -> None:
    found = usage(os.getpid())
    own = found["processes"][os.getpid()]
    assert own["rss_bytes"] > 1_000_000
    assert own["threads"] >= 1
    assert own["descriptors"] >= 3
    assert found["rss_bytes"] >= own["rss_bytes"]


def test_a_process_that_ended_holds_nothing() -> None:
    assert usage(2**22 + 1)["processes"] == {}


def test_noise_around_a_level_is_no_growth() -> None:
    assert abs(growth([100.0, 101.0, 99.0, 100.0, 101.0, 99.0])) < 0.01
    assert growth([100.0 + n for n in range(10)]) > 0.08


def test_only_ranks_that_were_always_there_are_compared() -> None:
    rounds = [
        {"0": {"rss_bytes": 100 + n, "threads": 5}, **({"3": {"rss_bytes": 9}} if n else {})}
        for n in range(3)
    ]
    assert growths(rounds) == {"rss_bytes": pytest.approx(2 / 101), "threads": 0.0}


def round_step(turn: int, rss: int) -> dict[str, Any]:
    seen = {"requests": 5, "failed": 0, "longest_gap_s": 0.1}
    resizes = [
        {"from": 2, "to": 4, "total_s": 3.0, "seen": seen},
        {"from": 4, "to": 2, "total_s": 1.0, "seen": seen},
    ]
    held = {"0": {"rss_bytes": rss}}
    return {"step": "round", "turn": turn, "ok": True, "resizes": resizes, "usage": held}


def test_the_first_round_warms_up() -> None:
    steps = [round_step(turn, rss) for turn, rss in enumerate([50, 100, 100, 100])]
    found = rounds_metrics(steps)
    assert found["rounds"] == 4
    assert found["rounds_rss_bytes_growth"] == 0
    assert (found["rounds_up_s"], found["rounds_down_s"]) == (3.0, 1.0)
    assert found["rounds_requests"] == 40


def test_a_rank_without_tokens_is_silent_all_the_time() -> None:
    stream = meter.Stream(0, 0.0, [1.0, 1.5, 4.0])
    assert meter.silent_s([stream], 0, 1.0, 5.0) == pytest.approx(2.5)
    assert meter.silent_s([stream], 0, 4.0, 10.0) == pytest.approx(6.0)
    assert meter.silent_s([stream], 1, 1.0, 5.0) == pytest.approx(4.0)


def test_the_gap_of_a_move_is_apart() -> None:
    stream = meter.Stream(0, 0.0, [1.0, 1.1, 3.1, 3.2], complete=True, moved=2)
    seen = meter.seen([stream], 0.5, 5.0)
    assert seen.longest_gap_s == pytest.approx(0.1)
    assert seen.moved_gap_max_s == pytest.approx(2.0)


def test_the_middle_of_the_weights_is_that_of_the_last_attach() -> None:
    early = {"joiners": [{"attach": {"worker": 9.0, "weights": 9.0}}]}
    late = {"joiners": [{"attach": {"worker": 1.0, "weights": 1.0}}]}
    assert stream_after_s([early, late, {"step": "score"}], 7.0) == 1.5
    assert stream_after_s([{"joiners": [{"tier": "cold"}]}], 7.0) == 7.0


def test_prompts_are_the_same_in_every_run() -> None:
    assert prompts(256) == prompts(256)
    assert len({tuple(prompt) for prompt in prompts(256)}) == 256


async def answered(rank: int, body: Any) -> tuple[int, Any]:
    """A model for which token + 1 is likely; rank 1 answers nothing."""
    if rank == 1:
        return 503, None
    rows: list[Any] = [None]
    for last, token in zip(body["prompt"], body["prompt"][1:], strict=False):
        rows.append({str(token): {"logprob": -9.0}})
        rows[-1][str(last + 1)] = {"logprob": -1.0}
    return 200, {"choices": [{"prompt_logprobs": rows}]}


def test_each_prompt_is_scored_by_one_rank_in_turn() -> None:
    found = asyncio.run(scored(answered, range(2), "m", 4))
    assert [row is None for row in found] == [False, True, False, True]
    assert compared(found, found)["missing"] == 2


def test_a_token_that_is_not_the_likeliest_is_wrong() -> None:
    async def post(body: Any) -> tuple[int, Any]:
        return await answered(0, body)

    right = meter.Stream(0, 0.0, prompt=[3, 9], tokens=[10, 11, 12])
    wrong = meter.Stream(0, 0.0, prompt=[3, 9], tokens=[10, 50, 51])
    found = asyncio.run(wrong_tokens(post, "m", [right, wrong]))
    assert found == {"judged": 6, "wrong": 1, "worst_margin": 8.0, "streams_not_judged": 0}


def test_who_is_parked_is_known_to_the_next_command() -> None:
    process = ProcessRef(5, 77)
    parked = ParkedReport(process, (process,), {"GPU-1": 9}, 0, 10, {"lock": 0.1})
    assert parked_report(json.loads(json.dumps(asdict(parked)))) == parked
