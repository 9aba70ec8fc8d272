"""Reading the planner's keys: whatever the order, whoever wrote them."""

from __future__ import annotations

import pytest

from dynamo_elastic.coordinator.store import Changed
from dynamo_elastic.dynamo.decisions import Decision, PlannerKeys, Writers, pending_decision
from dynamo_elastic.types import LeaseId

KEYS = PlannerKeys("dynamo")
A, B = LeaseId(0xA), LeaseId(0xB)


def change(key: str, value: bytes | None, revision: int, lease: LeaseId | None = None) -> Changed:
    return Changed(key, value, revision, lease)


@pytest.mark.parametrize(("id_at", "count_at"), [(7, 7), (7, 6), (6, 7)])
def test_the_later_of_id_and_count_makes_the_decision(id_at: int, count_at: int) -> None:
    stored = {
        KEYS.decision: change(KEYS.decision, b"3", id_at),
        KEYS.ranks: change(KEYS.ranks, b"4", count_at),
        KEYS.acknowledged: change(KEYS.acknowledged, b"3", 5),
    }
    assert pending_decision(stored, KEYS) == Decision("3", 7, 4)
    stored[KEYS.acknowledged] = change(KEYS.acknowledged, b"3", 8)
    assert pending_decision(stored, KEYS) is None
    stored[KEYS.acknowledged] = change(KEYS.acknowledged, None, 9)
    assert pending_decision(stored, KEYS) == Decision("3", 7, 4), "it was lost"


def test_half_a_decision_is_none() -> None:
    assert pending_decision({KEYS.decision: change(KEYS.decision, b"3", 7)}, KEYS) is None
    assert pending_decision({KEYS.ranks: change(KEYS.ranks, b"3", 7)}, KEYS) is None


def complaints(*writes: tuple[bytes | None, LeaseId | None]) -> list[str]:
    writers = Writers()
    return [writers.saw(change(KEYS.decision, value, 1, lease)) for value, lease in writes]


@pytest.mark.parametrize(
    "writes",
    [
        [(b"0", A), (b"1", A), (b"2", A)],
        # Started again after its predecessor's lease had run out.
        [(b"0", A), (b"1", A), (None, None), (b"0", B), (b"1", B)],
        # Started again before: it goes on from the stored id, and the old lease takes the keys.
        [(b"0", A), (b"1", B), (None, None), (b"2", B)],
    ],
)
def test_one_planner_at_a_time_is_fine(writes: list[tuple[bytes | None, LeaseId | None]]) -> None:
    assert not any(complaints(*writes))


def test_two_planners_that_take_turns() -> None:
    assert "take turns" in complaints((b"0", A), (b"1", B), (b"1", A))[2]


def test_two_planners_that_count_the_same() -> None:
    assert "wrote id 0 again" in complaints((b"0", A), (b"0", B))[1]
