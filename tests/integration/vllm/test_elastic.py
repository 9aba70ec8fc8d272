"""Scale operations of vLLM 0.33's own code with ours in it: they end well, or change nothing."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator

import pytest

from dynamo_elastic.testing.vllm_ranks import PYTHON, Group, Ranks

pytestmark = [pytest.mark.vllm_elastic, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
def group(ranks: Ranks) -> Iterator[Group]:
    made = Group(ranks)
    yield made
    made.lose(*sorted(made.alive))


def test_this_vllm_has_every_hook(ranks: Ranks) -> None:
    assert ranks.missing == []


def test_ranks_ask_no_name_server(ranks: Ranks) -> None:
    code = "import socket; socket.getnameinfo(('192.0.2.1', 1), socket.NI_NAMEREQD)"
    asked = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=False)
    assert "Temporary failure in name resolution" in asked.stderr


def comes_back(ranks: Ranks, group: Group) -> None:
    """Rank 2, which has left, joins the two others again."""
    ranks.tell(to=2, do="attach")
    assert [a["error"] for a in group.scale(3, (0, 1))] == ["", ""]
    assert ranks.hear(lambda w: bool(w.get("attached")))["error"] == ""


def test_no_loop_stands_still_while_it_connects_to_a_store(ranks: Ranks) -> None:
    """torch looks names up for that; all streams of a front end waited for the answer."""
    group = Group(ranks, DYNAMO_ELASTIC_VLLM_PARK_LEAVERS="1")
    try:
        group.join()
        assert [a["error"] for a in group.scale(3, (0, 1))] == ["", ""]
        for _ in range(2):
            assert [a["error"] for a in group.scale(2, (0, 1, 2))] == ["", "", ""]
            comes_back(ranks, group)
        assert [group.facts(rank)["connects"] for rank in range(3)] == [0, 0, 0]
    finally:
        group.lose(*sorted(group.alive))


def test_up_and_down_and_up(group: Group) -> None:
    for _ in range(2):
        group.join()
        for answer in group.scale(3, (0, 1)):
            assert (answer["error"], answer["width"], answer["scaling"]) == ("", 3, False)
        joiner, retained = group.facts(2), group.facts(0)
        assert joiner["dense"] == pytest.approx(retained["dense"])
        assert joiner["scales"] == retained["scales"] == 10
        assert joiner["mapping"] == [[0, 1, 2, 3]] * 2
        assert joiner["tokens"] > 0
        *stay, leaver = group.scale(2, (0, 1, 2))
        assert [(a["error"], a["width"]) for a in stay] == [("", 2)] * 2
        assert leaver["error"] == ""
        group.lose(2)


@pytest.mark.parametrize("fault", ["stream", "ready", "stop-ready", "resume", "stop-resume"])
def test_a_joiner_that_fails_costs_nothing(group: Group, fault: str) -> None:
    group.join(fault)
    for answer in group.scale(3, (0, 1)):
        assert answer["error"]
        assert (answer["width"], answer["scaling"]) == (2, False)
        assert answer["still_s"] < 1
    group.lose(2)
    before = group.facts(0)["tokens"]
    group.join()
    for answer in group.scale(3, (0, 1)):
        assert (answer["error"], answer["width"]) == ("", 3)
    assert group.facts(0)["tokens"] > before


@pytest.mark.parametrize("fault", ["late-commit", "late-resume"])
@pytest.mark.parametrize("slow", [0, 1])
def test_a_rank_that_serves_and_is_late_costs_no_joiner(
    ranks: Ranks, fault: str, slow: int
) -> None:
    """Seen on a busy host: the joiner's time ran while it waited for those who serve."""
    made = Group(ranks, faults={slow: fault}, DYNAMO_ELASTIC_VLLM_COMMIT_TIMEOUT_S="0.5")
    try:
        made.join()
        for answer in made.scale(3, (0, 1)):
            assert (answer["error"], answer["width"], answer["scaling"]) == ("", 3, False)
        assert made.facts(2)["tokens"] > 0
    finally:
        made.lose(*sorted(made.alive))


@pytest.mark.parametrize("fault", ["hello", "engines", "groups"])
def test_a_joiner_whose_death_is_told_is_not_waited_for(group: Group, fault: str) -> None:
    group.join(fault)
    for rank in (0, 1):
        group._ranks.tell(to=rank, do="scale", width=3)
    group._ranks.hear(lambda w: w.get("from") == 2 and bool(w.get("gone")))
    group.alive.discard(2)
    began_s = time.monotonic()
    group._ranks.tell(to=0, do="tell-failure", why="its process ended")
    answers = [group._ranks.answer(rank) for rank in (0, 1)]
    assert all("its process ended" in answer["error"] for answer in answers)
    assert time.monotonic() - began_s < 10  # of the 30 s that it would have had
    group.join()
    assert [a["error"] for a in group.scale(3, (0, 1))] == ["", ""]


def test_nobody_serves_slower_for_a_joiner_that_stands_still_and_is_given_up(group: Group) -> None:
    """What a rank closed of the new group waited for the joiner: its peers threw a step away after
    20 s, and went on without it."""
    group.join("stop-stream")
    group.tell_scale(3, (0, 1))
    time.sleep(1.5)
    group._ranks.tell(to=0, do="tell-failure", why="it stands still")
    for answer in group.hear_scale((0, 1)):
        assert "it stands still" in answer["error"]
        assert answer["s"] < 10
        assert (answer["width"], answer["longest_gap_s"] < 1) == (2, True)
    group.lose(2)
    group.join()
    assert [a["error"] for a in group.scale(3, (0, 1))] == ["", ""]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_death_that_is_told_before_the_others_know_of_the_operation(
    group: Group, rank: int
) -> None:
    """A joiner that dies at once; on a GPU everybody waited for it until the deadline."""
    group._ranks.tell(to=rank, do="scale", width=3, early="its process ended")
    group._ranks.tell(to=1 - rank, do="scale", width=3)
    for answer in (group._ranks.answer(0), group._ranks.answer(1)):
        assert "its process ended" in answer["error"]
        assert answer["width"] == 2
        assert answer["s"] < 10
    group.join()
    assert [a["error"] for a in group.scale(3, (0, 1))] == ["", ""]


def given_up_before(group: Group) -> None:
    """Rank 0 has prepared three ranks, and has been told that it comes to nothing."""
    group._ranks.tell(to=0, do="scale", width=3)
    time.sleep(0.5)
    group._ranks.tell(to=0, do="tell-failure", why="its process ended")
    assert "its process ended" in group._ranks.answer(0)["error"]


def test_a_rank_that_comes_after_rank_0_has_given_up_does_not_wait_for_long(ranks: Ranks) -> None:
    """Seen on a GPU: it answered when the next operation came."""
    group = Group(ranks, DYNAMO_ELASTIC_VLLM_GROUP_TIMEOUT_S="3")
    try:
        given_up_before(group)
        (answer,) = group.scale(3, (1,))
        assert "too late" in answer["error"]
        assert "its process ended" in answer["error"]
        assert answer["s"] < 10  # of the 30 s that it would have had
        group.join()
        assert [a["error"] for a in group.scale(3, (0, 1))] == ["", ""]
    finally:
        group.lose(*sorted(group.alive))


def test_a_rank_that_has_missed_an_operation_may_be_the_first_at_the_next(group: Group) -> None:
    given_up_before(group)
    group.join()
    group.tell_scale(3, (1,))
    time.sleep(1)
    group.tell_scale(3, (0,))
    for answer in group.hear_scale((0, 1)):
        assert (answer["error"], answer["width"]) == ("", 3)


def test_nobody_who_joins_is_given_up_at_the_deadline(ranks: Ranks) -> None:
    group = Group(ranks, DYNAMO_ELASTIC_VLLM_PREPARE_TIMEOUT_S="3")
    try:
        for answer in group.scale(3, (0, 1)):
            assert answer["error"]
            assert (answer["width"], answer["scaling"]) == (2, False)
            assert 2.5 < answer["s"] < 15
    finally:
        group.lose(0, 1)


def test_a_leaver_comes_back(ranks: Ranks) -> None:
    group = Group(ranks, DYNAMO_ELASTIC_VLLM_PARK_LEAVERS="1")
    try:
        group.join()
        assert [a["error"] for a in group.scale(3, (0, 1))] == ["", ""]
        for _ in range(2):
            assert [a["error"] for a in group.scale(2, (0, 1, 2))] == ["", "", ""]
            tokens = group.facts(2)["tokens"]
            comes_back(ranks, group)
            back, retained = group.facts(2), group.facts(0)
            assert back["dense"] == pytest.approx(retained["dense"])
            assert back["scales"] == retained["scales"]
            assert back["mapping"] == [[0, 1, 2, 3]] * 2
            assert back["tokens"] > tokens
            assert back["resets"], "its KV cache was gone, and what it had of prompts with it"
            assert back["width"] == retained["width"] == 3
    finally:
        group.lose(*sorted(group.alive))


def test_one_rank_serves_alone_and_is_joined_again(ranks: Ranks) -> None:
    """Each rank has slots for all experts, so that one is enough."""
    group = Group(ranks, DYNAMO_ELASTIC_VLLM_PARK_LEAVERS="1")
    try:
        for _ in range(2):
            assert [a["error"] for a in group.scale(1, (0, 1))] == ["", ""]
            alone = group.facts(0)
            assert alone["width"] == 1
            ranks.tell(to=1, do="attach")
            (answer,) = group.scale(2, (0,))
            assert (answer["error"], answer["width"]) == ("", 2)
            assert answer["tokens"] > alone["tokens"]
            attached = ranks.hear(lambda w: bool(w.get("attached")))
            assert attached["error"] == ""
            assert group.facts(1)["dense"] == pytest.approx(group.facts(0)["dense"])
    finally:
        group.lose(*sorted(group.alive))


def test_operations_leave_nothing_behind(ranks: Ranks) -> None:
    """Engine cores collect garbage seldom: what an operation held goes with it."""
    group = Group(ranks, DYNAMO_ELASTIC_VLLM_PARK_LEAVERS="1")
    held = []
    try:
        for _ in range(6):
            assert [a["error"] for a in group.scale(1, (0, 1))] == ["", ""]
            ranks.tell(to=1, do="attach")
            assert [a["error"] for a in group.scale(2, (0,))] == [""]
            assert ranks.hear(lambda w: bool(w.get("attached")))["error"] == ""
            held.append([(f["threads"], f["descriptors"]) for f in map(group.facts, (0, 1))])
    finally:
        group.lose(*sorted(group.alive))
    for warm, last in zip(held[3], held[5], strict=True):
        assert last[0] <= warm[0]
        assert last[1] <= warm[1]


def test_a_leaver_lets_go_and_lives_on(ranks: Ranks) -> None:
    group = Group(ranks, DYNAMO_ELASTIC_VLLM_PARK_LEAVERS="1")
    try:
        group.join()
        assert [a["error"] for a in group.scale(3, (0, 1))] == ["", ""]
        assert [a["error"] for a in group.scale(2, (0, 1, 2))] == ["", "", ""]
        leaver = group.facts(2)
        assert (leaver["width"], leaver["let_go"]) == (0, True)
        serving = group.facts(0)["tokens"]
        assert group.facts(2)["tokens"] == leaver["tokens"]
        assert group.facts(0)["tokens"] >= serving
    finally:
        group.lose(*sorted(group.alive))
