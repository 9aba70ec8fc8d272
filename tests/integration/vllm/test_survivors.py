"""A rank of vLLM 0.33 dies while its group serves: the others throw the step away and go on without
it, by vLLM's own busy loop and operations with ours in them; or end, and say why."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from dynamo_elastic.testing.vllm_ranks import Group, Ranks

pytestmark = [pytest.mark.vllm_elastic, pytest.mark.slow, pytest.mark.timeout(400)]

GAP_S = 1.0
"""For those who live to serve on, 0.4 s of which they wait for each other's word."""
_TIMEOUT_S = 20.0


@pytest.fixture
def group(ranks: Ranks) -> Iterator[Group]:
    made = Group(ranks, 3, REDUNDANT="8")  # slots for all experts on each
    yield made
    made.lose(*sorted(made.alive))


def narrowed(group: Group, width: int) -> list[dict[str, Any]]:
    """Facts of its ranks, once they serve as so many."""
    deadline_s = time.monotonic() + _TIMEOUT_S
    before = [group.facts(rank)["tokens"] for rank in range(width)]
    while True:
        said = [group.facts(rank) for rank in range(width)]
        counts = zip(said, before, strict=True)
        if all(s["width"] == width and s["tokens"] > b + 10 for s, b in counts):
            return said
        assert time.monotonic() < deadline_s, said
        time.sleep(0.05)


def ended(ranks: Ranks, group: Group, rank: int) -> str:
    """Of what a rank has died."""
    said = ranks.hear(lambda w: w.get("died") == rank)
    ranks.hear(lambda w: w.get("from") == rank and bool(w.get("gone")))
    group.alive.discard(rank)
    return str(said["of"])


def test_the_others_serve_on_without_a_rank_that_is_killed(group: Group) -> None:
    for _ in range(2):
        group.lose(2)
        for said in narrowed(group, 2):
            assert said["recent_gap_s"] < GAP_S
            assert said["resets"], "what the failed step wrote must not be taken for cached"
            assert not said["scaling"]
        group.join()
        for answer in group.scale(3, (0, 1)):
            assert (answer["error"], answer["width"]) == ("", 3)
        assert group.facts(2)["dense"] == pytest.approx(group.facts(0)["dense"])


def test_the_others_serve_on_without_a_rank_that_stands_still_in_a_step(ranks: Ranks) -> None:
    """NIXL EP masks it; no socket closes."""
    faults = {0: "sees-fault", 1: "sees-fault", 2: "stop-step"}
    group = Group(ranks, 3, faults=faults)
    try:
        for said in narrowed(group, 2):
            assert said["recent_gap_s"] < GAP_S
    finally:
        group.lose(*sorted(group.alive))


@pytest.mark.parametrize(
    "environment",
    [
        {"PATIENCE_S": "1"},
        {"DYNAMO_ELASTIC_VLLM_STEP_TIMEOUT_S": "1", "BATCHES": "0"},
        {"DYNAMO_ELASTIC_VLLM_STEP_TIMEOUT_S": "1"},
    ],
    ids=["flag", "engines", "workers"],
)
def test_the_others_serve_on_without_a_rank_that_stands_still_and_is_not_masked(
    ranks: Ranks, environment: dict[str, str]
) -> None:
    """They wait for it in an exchange, of engines or of workers, for a second; no socket closes."""
    group = Group(ranks, 3, faults={2: "stop-step"}, **environment)
    try:
        for said in narrowed(group, 2):
            assert said["recent_gap_s"] < 1 + GAP_S
    finally:
        group.lose(*sorted(group.alive))


def test_a_slow_rank_is_not_taken_for_dead(ranks: Ranks) -> None:
    """Ranks exchange words at every 16th step alone: one of them saw it 0.8 s after the other."""
    group = Group(ranks, 3, faults={1: "slow"})
    try:
        for _ in range(3):
            group.lose(2)
            narrowed(group, 2)
            group.join()
            assert [answer["error"] for answer in group.scale(3, (0, 1))] == ["", ""]
    finally:
        group.lose(*sorted(group.alive))


def test_ranks_above_the_one_that_died_end(ranks: Ranks, group: Group) -> None:
    group.lose(1)
    assert "rank 1 died, and ranks above it" in ended(ranks, group, 2)
    (said,) = narrowed(group, 1)
    assert said["recent_gap_s"] < GAP_S


def test_nobody_goes_on_without_rank_0(ranks: Ranks, group: Group) -> None:
    group.lose(0)
    for rank in (1, 2):
        assert "rank 0 did not say" in ended(ranks, group, rank)  # its store is the test's


def test_nobody_goes_on_without_an_expert(ranks: Ranks) -> None:
    group = Group(ranks, 3, REDUNDANT="8", COMPLETE="3")
    group.lose(2)
    for rank in (0, 1):
        assert "rank 2 died, and the ranks below it have not every" in ended(ranks, group, rank)


def test_nobody_goes_on_with_too_few_slots(ranks: Ranks) -> None:
    group = Group(ranks, 3)
    group.lose(1)
    assert "can't change their numbers" in ended(ranks, group, 2)
    assert "cannot retain all model experts" in ended(ranks, group, 0)


def test_a_rank_that_waits_for_rank_0_to_begin_is_not_taken_for_dead(group: Group) -> None:
    """It said no word before its wait had ended, and rank 0 went on without it."""
    group.tell_scale(2, (1,))
    time.sleep(0.3)
    group.lose(2)
    (answer,) = group.hear_scale((1,))
    assert "a step failed" in answer["error"]
    for said in narrowed(group, 2):
        assert said["recent_gap_s"] < GAP_S


def test_a_rank_dies_while_another_joins(ranks: Ranks) -> None:
    """That operation is over, and the next one ends well."""
    group = Group(ranks, 2)
    try:
        group.join("stop-stream")
        group.tell_scale(3, (0, 1))
        time.sleep(0.5)
        group.lose(1)
        (answer,) = group.hear_scale((0,))
        assert answer["error"]
        (said,) = narrowed(group, 1)
        assert said["recent_gap_s"] < GAP_S
    finally:
        group.lose(*sorted(group.alive))
