"""Reading the planner's keys: whatever the order."""

from __future__ import annotations

import pytest

from dynamo_elastic.coordinator.store import Changed
from dynamo_elastic.dynamo.decisions import Decision, PlannerKeys, pending_decision

KEYS = PlannerKeys("dynamo")


def change(key: str, value: bytes | None, revision: int) -> Changed:
    return Changed(key, value, revision)


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
